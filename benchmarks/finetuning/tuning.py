"""Choosing learning rate and epochs on dev."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from steps import Step, step
from texts import reader_of
from training import fine_tune, perplexity, saved

from knnstore.documents import TextDocument

FIRST = 2
"""Epochs: one was never the best."""
AT_LEAST = 3
"""Epochs that are tried also where fewer are better: what a store is compared with, beside the best."""


class Tuning:
    """Fine-tuned models, each made once.

    Args:
        model: to begin with.
        store: text to train on.
        dev: text to choose on.
        results: folder for what was found.
        models: folder for the models.
        device: to train on.
        say: hears what is done.
    """

    def __init__(
        self,
        model: str,
        store: Sequence[TextDocument],
        dev: Sequence[TextDocument],
        results: Path,
        models: Path,
        device: str | None,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._store, self._dev = model, store, dev
        self._results, self._models, self._device, self._say = results, models, device, say

    def grid(self, rates: Sequence[float], most: int) -> list[dict[str, Any]]:
        """Every run: for each learning rate more epochs until dev gets worse, each with its own schedule."""
        runs: list[dict[str, Any]] = []
        for rate in rates:
            lowest = float("inf")
            for epochs in range(min(FIRST, most), most + 1):
                runs.append(self.run(rate, epochs))
                if runs[-1]["dev"] > lowest and epochs >= AT_LEAST:
                    break
                lowest = min(lowest, runs[-1]["dev"])
        keep = {self._folder(one["rate"], one["epochs"]) for one in (lowest_of(runs), thrice_of(runs))}
        for folder in self._models.glob("*"):
            if folder not in keep:
                shutil.rmtree(folder)
        return runs

    def model(self, run: dict[str, Any]) -> str:
        """Return the folder of a run's model, which is made again where it is missing."""
        folder = self._folder(run["rate"], run["epochs"])
        if not (folder / "config.json").is_file():
            self._train(run["rate"], run["epochs"])
        return str(folder)

    def run(self, rate: float, epochs: int) -> dict[str, Any]:
        """One run: its perplexity on dev, and its seconds."""
        name = f"tuned-{rate:g}-{epochs}"
        return step(self._results, name, lambda: Step(self._train(rate, epochs), {})).values

    def _train(self, rate: float, epochs: int) -> dict[str, Any]:
        reader = reader_of(self._model, self._device)
        seconds = fine_tune(reader, self._store, epochs, rate)
        dev = perplexity(reader, self._dev)
        saved(reader, self._folder(rate, epochs))
        self._say(f"fine-tuned at {rate:g}, {epochs} epochs: {dev:.2f} on dev, {seconds:.1f} s")
        return {"rate": rate, "epochs": epochs, "dev": dev, "seconds": seconds}

    def _folder(self, rate: float, epochs: int) -> Path:
        return self._models / f"{rate:g}-{epochs}"


def lowest_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the run that is best on dev."""
    return min(runs, key=lambda one: one["dev"])


def thrice_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the best of three epochs, or of as many as were tried."""
    most = min(AT_LEAST, max(one["epochs"] for one in runs))
    return lowest_of([one for one in runs if one["epochs"] == most])
