"""What experiments share: stores, passes over held-out text and fine-tuned models, each made once.

All of it is kept in a folder that is named by its inputs, so that a run goes on where it stopped, and other
inputs never meet it.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from memory import Make, Memory, write_json
from texts import FRACTIONS, SPLITS, Limits, leveled, reader_of
from training import fine_tune, saved
from versions import source_hash

import knnstore
from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.calibration.candidates import Candidate, Comparison, compare_candidates
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.keys import model_fingerprint
from knnstore.lm.reading import chunk_documents
from knnstore.store import Selection

LEARNING_RATE = 1e-3
EXACT: tuple[str, Mapping[str, Any]] = (
    ("faiss", {"index": "exact"}) if find_spec("faiss") else ("cells", {"cells": 1, "codes": "none"})
)
"""The engine and its parameters with which every record is compared, the fastest that is installed."""


class Tuned(NamedTuple):
    """A model fine-tuned on a fraction of a domain's store."""

    model: str
    tokens: int
    epochs: int
    seconds: float


class Lab:
    """Everything that is made from the inputs.

    Args:
        model: folder of the base model.
        texts: of each domain, its documents by split; see `read`.
        limits: how they were cut, and the sizes of experiments.
        out: what is kept goes below it.
        device: where models run; None is the GPU if there is one.
        say: hears what is being made.
    """

    def __init__(
        self,
        model: str,
        texts: dict[str, dict[str, list[TextDocument]]],
        limits: Limits,
        out: Path,
        device: str | None,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.texts, self.limits, self.device, self.say = model, texts, limits, device, say
        self.domains, self.fractions = list(texts), FRACTIONS[: limits.fractions]
        self.reader = reader_of(model, device)
        self.inputs = self._hash()
        self.folder = out / "shared" / self.inputs[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._memories: dict[str, Memory] = {}
        self._compared: dict[tuple[str, str, int], Comparison] = {}

    def _hash(self) -> str:
        digest = hashlib.sha256(model_fingerprint(self.reader.encoder.model).encode())
        digest.update(source_hash().encode())
        digest.update(json.dumps(asdict(self.limits)).encode())
        for domain, splits in self.texts.items():
            for split in SPLITS:
                hashes = [document.content_hash for document in splits[split]]
                digest.update(f"\n{domain} {split} {' '.join(hashes)}".encode())
        return digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._memories.values():
            memory.close()

    @property
    def base(self) -> Memory:
        """The base model with a store of every domain, searched exactly."""
        return self.memory(self.model, "base")

    def memory(
        self,
        model: str,
        name: str,
        store: str = EXACT[0],
        params: Mapping[str, Any] = EXACT[1],
        states: int = 1,
    ) -> Memory:
        """Return a model with a store, which is filled when a domain is first asked for.

        Args:
            model: folder of the model.
            name: of the store, the same for the same model and engine.
            store: the engine; by default all records are compared.
            params: of the engine.
            states: of each key.
        """

        def make(home: Path) -> KNNLMForCausalLM:
            return knnstore.create(
                home, model,
                store=store, params=params, states=states, device=self.device, dtype="float32",
            )  # fmt: skip

        return self._memory(name, model, make)

    def in_cells(self, domain: str, states: int = 1, codes: str = "none") -> Memory:
        """Return the base model with cells of its own for a domain, whose keys are of so many states.

        Args:
            domain: whose text is stored.
            states: of each key.
            codes: what they are kept as.
        """
        name = f"{domain}-{states}-{codes}"
        return self.memory(self.model, name, "cells", {"codes": codes, "coded_from": 1}, states)

    def inside(self, domain: str) -> Memory:
        """Return the model fine-tuned on a domain's store, three epochs, with its own store of that text."""
        fraction = self.train_fraction(domain)
        return self.memory(self.tuned(domain, 3, fraction).model, f"{domain}-3-{fraction}")

    def load(self, home: Path) -> KNNLMForCausalLM:
        """Open a store for writing."""
        return knnstore.load(home, "a", device=self.device, dtype="float32")

    def _memory(self, name: str, model: str, make: Make) -> Memory:
        if name not in self._memories:
            self._memories[name] = Memory(self, model, self.folder / "homes" / name, make)
        return self._memories[name]

    def dev(self, domain: str) -> ScoredText:
        """Return the text to choose settings on, by the base model with the domain's store."""
        return self.base.scored(domain, "dev")

    def test(self, domain: str) -> ScoredText:
        """The text to report, likewise."""
        return self.base.scored(domain, "test")

    def compared(self, domain: str, memory: Memory | None = None, fraction: int = 1) -> Comparison:
        """All candidates of `knnstore calibrate`, fitted on dev.

        Args:
            domain: of the text and of the store.
            memory: model and store; default the base model's.
            fraction: which part of the store to search.
        """
        of = memory or self.base
        asked = of.folder.name, domain, fraction
        if asked not in self._compared:
            self.say(f"{domain}: calibrating, {asked[0]}")
            self._compared[asked] = compare_candidates(
                of.scored(domain, "dev", fraction=fraction), networks=True
            )
        return self._compared[asked]

    def calibrated(self, domain: str, memory: Memory | None = None, fraction: int = 1) -> KNNSettings:
        """Return the best way to mix the domain's store alone; for the arguments see `compared`."""
        settings = store_alone(self.compared(domain, memory, fraction)).settings
        return replace(settings, selection=Selection(domains=(domain,)))

    def fixed(self, domain: str) -> KNNSettings:
        """Return the best fixed λ, T and k."""
        fixed = [one for one in self.compared(domain).candidates if one.name == "fixed"]
        return min(fixed, key=lambda one: one.held_out.ppl).settings

    def train_fraction(self, domain: str) -> int:
        """Which part of a domain's store models are fine-tuned on."""
        tokens, most = self.base.stored(domain).tokens, self.limits.train_tokens
        fit = [one for one in self.fractions if most is None or tokens[f"1/{one}"] <= most]
        return fit[0] if fit else self.fractions[-1]

    def part(self, domain: str, fraction: int = 1) -> list[TextDocument]:
        """Documents of the store: a fraction of its tokens, the same ones in every larger fraction."""
        return [
            document
            for document, level in leveled(self.texts[domain]["store"], self.fractions)
            if level % fraction == 0
        ]

    def tuned(self, domain: str, epochs: int, fraction: int = 1) -> Tuned:
        """Return the base model fine-tuned on a fraction of a domain's store, or on the smallest one."""
        fraction = min(fraction, self.fractions[-1])
        folder = self.folder / "tuned" / f"{domain}-{epochs}-{fraction}"
        record = folder / "tuned.json"
        if not record.is_file():
            documents = self.part(domain, fraction)
            tokens = sum(map(len, self.reader.tokenize_documents(documents)))
            self.say(f"{domain}: fine-tuning on {tokens:,} tokens, {epochs} times")
            reader = reader_of(self.model, self.device)
            seconds = fine_tune(reader, documents, epochs, LEARNING_RATE)
            saved(reader, folder)
            write_json(record, {"tokens": tokens, "seconds": seconds})
        values = json.loads(record.read_text())
        return Tuned(str(folder), values["tokens"], epochs, values["seconds"])

    def alone(self, model: str, domain: str, split: str) -> ScoredText:
        """Held-out text as another model reads it; the neighbors are still those of the base model."""
        reader = reader_of(model, self.device)
        log_probs, keys, gold = [], [], []
        for ahead in chunk_documents(self.texts[domain][split]):  # as it was scored
            for batch in reader.batch_windows(reader.tokenize_documents(ahead)):
                encoded = reader.encoder.encode(batch.input_ids, batch.at)
                log_probs.append(reader.encoder.target_log_probs(encoded.states, batch.gold).cpu())
                keys.append(encoded.keys.cpu())
                gold.append(torch.from_numpy(batch.gold))
        scored = self.base.scored(domain, split)
        assert torch.equal(torch.cat(gold), scored.targets), "in another order"
        evidence = replace(scored.evidence, keys=torch.cat(keys))
        return replace(scored, lm_log_probs=torch.cat(log_probs), evidence=evidence)


def store_alone(found: Comparison) -> Candidate:
    """Return the best candidate of `knnstore calibrate` without a continuous cache."""
    without = [candidate for candidate in found.candidates if candidate.settings.cache is None]
    return min(without, key=lambda candidate: candidate.held_out.ppl)
