"""A model with a store, and passes over held-out text, each made once and kept."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from knnstore_research.distance_mixers import NearnessLambda
from safetensors import safe_open
from safetensors.torch import save_file
from texts import leveled
from torch import Tensor

from knnstore.lm import KNNLMForCausalLM, KNNSettings, NGramSettings
from knnstore.lm.batch import Batch
from knnstore.lm.calibration.scored_text import ScoredText, score_once
from knnstore.lm.calibration.searches import FurtherSearches
from knnstore.lm.components import Form, TargetContinuation
from knnstore.lm.mixing import Evidence, NeighborSums, TargetSums
from knnstore.lm.mixture import look_up
from knnstore.store import KNNStore, Selection

if TYPE_CHECKING:
    from lab import Lab


PROBES = 16
"""Cells that are visited, where there are some."""
_EVIDENCE, _SUMS, _FOUND = "evidence.", "sums.", "found."
_VISITED = "visited."
_NEIGHBOURS = 1 << 22
"""Of all queries that are searched for at once."""


class Stored(NamedTuple):
    """What storing a domain took."""

    tokens: dict[str, int]
    """Of each fraction, ``1/1`` being everything."""
    seconds: float


Make = Callable[[Path], KNNLMForCausalLM]
"""Makes a home and opens it for writing."""


class Memory:
    """A model with a store.

    Args:
        lab: where texts come from.
        model: folder of the model.
        folder: for the home and what is found with it.
        make: called once.
    """

    def __init__(self, lab: "Lab", model: str, folder: Path, make: Make) -> None:
        self._lab, self.model, self.folder, self._make = lab, model, folder, make

    @cached_property
    def lm(self) -> KNNLMForCausalLM:
        """The model with its store, opened for writing."""
        home, made = self.folder / "home", self.folder / "made"
        if made.is_file():
            return self._lab.load(home)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        lm = self._make(home)
        made.touch()
        return lm

    def close(self) -> None:
        """Close the store, if it was opened."""
        if "lm" in self.__dict__:
            self.lm.store.close()

    def stored(self, domain: str) -> Stored:
        """Store a domain if it is not there; says what that took."""
        lm, record = self.lm, self.folder / f"stored-{domain}.json"
        if not record.is_file():
            self._lab.say(f"{domain}: storing, {self.folder.name}")
            if any(there.name == domain for there in lm.store.domains()):
                lm.store.remove_domain(domain)  # of a run that was interrupted: its time is not known
            tokens, seconds = {}, 0.0
            documents = leveled(self._lab.texts[domain]["store"], self._lab.fractions)
            # The smallest part first, so that each part is a run of records.
            for fraction in reversed(self._lab.fractions):
                parts = [f"1/{larger}" for larger in self._lab.fractions if larger <= fraction]
                added = lm.add(
                    [one for one, least in documents if least == fraction], domain=domain, tags=parts
                )
                seconds += added.seconds
                for part in parts:
                    tokens[part] = tokens.get(part, 0) + added.tokens
            write_json(record, {"tokens": tokens, "seconds": seconds})
        return Stored(**json.loads(record.read_text()))

    def scored(
        self,
        domain: str,
        split: str,
        *,
        fraction: int = 1,
        k: int | None = None,
    ) -> ScoredText:
        """Held-out text of a domain after one pass of model and search.

        Args:
            domain: of the text and of the store.
            split: ``dev`` or ``test``.
            fraction: which part of the store to search.
            k: neighbors; default that of the limits, at most as many as there are.
        """
        stored = self.stored(domain)
        k = min(k or self._lab.limits.k, stored.tokens[f"1/{fraction}"])
        file = self.folder / "passes" / f"{domain}-{split}-{fraction}-{k}.safetensors"
        if not file.is_file():
            self._lab.say(f"{domain}: scoring {split}, 1/{fraction} of the store, k={k}")
            selection = Selection(domains=(domain,), tags=None if fraction == 1 else (f"1/{fraction}",))
            store = self.lm.store
            base = self._lab.base
            if self.model == self._lab.model and not (self is base and fraction == 1):
                scored = search_again(base.scored(domain, split), store, k, selection)
            else:
                texts = self._lab.texts[domain][split]
                scored = score_once(store, self.lm.reader, texts, k=k, selection=selection, ngrams=None)
            save_scored(file, scored)
        return load_scored(file)

    def visited(self, domain: str, split: str) -> ScoredText:
        """Held-out text after visits to `PROBES` cells, with what n-grams of the domain say."""
        self.stored(domain)
        file = self.folder / "passes" / f"{domain}-{split}-cells.safetensors"
        if not file.is_file():
            self._lab.say(f"{domain}: scoring {split}, {self.folder.name}")
            texts, selection = self._lab.texts[domain][split], Selection(domains=(domain,))
            scored = score_once(
                self.lm.store, self.lm.reader, texts, k=1, selection=selection, probes=PROBES,
                ngrams=NGramSettings(),
            )  # fmt: skip
            further = FurtherSearches(self.lm.store, scored, texts, selection)
            save_scored(file, replace(scored, visited=further.search_with_probes([PROBES])))
        return load_scored(file)


def search_again(scored: ScoredText, store: KNNStore, k: int, selection: Selection) -> ScoredText:
    """Another search for a text that was scored with the same model, which need not run again."""
    settings, evidence = KNNSettings(k=k, mixer=NearnessLambda(), selection=selection), scored.evidence
    parts = []
    for at in torch.split(torch.arange(len(scored)), max(1, _NEIGHBOURS // k)):
        batch = Batch(
            evidence.keys[at], evidence.lm_max[at], evidence.lm_entropy[at], store.identity.vocab_size,
            targets=scored.targets[at],
        )  # fmt: skip
        parts.append(look_up(store, settings, batch, Form.TARGET))
    searches = Evidence.concatenate(parts, k).searches
    return replace(scored, evidence=replace(evidence, searches=searches))


def save_scored(file: Path, scored: ScoredText) -> None:
    """Write a pass whole or not at all."""
    tensors, metadata = (
        dict[str, Tensor](),
        {"fitted_for": json.dumps(scored.fitted_for), "metric": str(scored.metric)},
    )
    for prefix, part in (("", scored), (_EVIDENCE, scored.evidence), (_SUMS, scored.sums)):
        tensors |= {f"{prefix}{name}": value for name, value in tensors_of(part).items()}
    for name, found in scored.evidence.found.items():
        tensors |= {f"{_FOUND}{name}.{column}": value for column, value in tensors_of(found).items()}
        metadata[f"{_FOUND}{name}"] = str(found.order)
    for probes, visited in scored.visited.items():
        tensors |= {f"{_VISITED}{probes}.{name}": value for name, value in tensors_of(visited).items()}
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, metadata)
    os.replace(part, file)


def load_scored(file: Path) -> ScoredText:
    """Read what `save_scored` wrote."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118

    def taken(prefix: str) -> dict[str, Tensor]:
        names = [name for name in tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensors.pop(name) for name in names}

    found = {
        name.removeprefix(_FOUND): TargetContinuation(int(order), **taken(f"{name}."))
        for name, order in metadata.items()
        if name.startswith(_FOUND)
    }
    visited = {probes: TargetSums(**grid) for probes in [PROBES] if (grid := taken(f"{_VISITED}{probes}."))}
    sums = NeighborSums(**taken(_SUMS))
    evidence = Evidence(searches=[sums], found=found, **taken(_EVIDENCE))
    return ScoredText(
        evidence=evidence, fitted_for=json.loads(metadata["fitted_for"]), metric=metadata["metric"],
        visited=visited, **tensors,
    )  # fmt: skip


def tensors_of(part: Any) -> dict[str, Tensor]:
    """Return the fields of a dataclass or a named tuple that are tensors, by their names."""
    names = part._fields if isinstance(part, tuple) else [field.name for field in fields(part)]
    values = {name: getattr(part, name) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def write_json(file: Path, values: Any) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, file)
