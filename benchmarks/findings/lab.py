"""What experiments share: texts, stores, passes over held-out text and fine-tuned models, each made once.

All of it is kept in a folder that is named by its inputs, so that a run goes on where it stopped, and other
inputs never meet it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from finetuning import fine_tune
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import knnstore
from knnstore.documents import TextDocument, read_documents
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.comparison import Candidate, Comparison, compare
from knnstore.lm.continuous_cache import Reading
from knnstore.lm.encoder import Encoder
from knnstore.lm.loading import load, model_fingerprint
from knnstore.lm.locations import locate
from knnstore.lm.scored_text import ScoredText, score_once
from knnstore.lm.scoring import BATCH_TOKENS
from knnstore.lm.text import in_chunks, tokenized
from knnstore.lm.windows import Batch, pack, prefix_of
from knnstore.store import Selection

SPLITS = ("store", "dev", "test")
FRACTIONS = (1, 2, 4, 8, 16, 32)
"""Nested parts of every store: one half, one quarter, ... of its documents' tokens."""
MIN_DOCUMENTS = 12
"""Of dev and test, however long they are: fewer make an interval over documents meaningless."""


@dataclass(frozen=True)
class Limits:
    """How much of the data is used."""

    documents: int | None = None
    """Of each split of a domain."""
    store_tokens: int = 400_000
    """Of a domain's store: whole documents, the first ones, until there are so many."""
    held_out_tokens: int = 20_000
    """Of dev and of test likewise, but at least `MIN_DOCUMENTS`."""
    train_tokens: int | None = None
    """Of a domain's store, to fine-tune on: the largest nested part with no more; default is all of it."""
    k: int = 1024
    fractions: int = len(FRACTIONS)
    generated: int = 128
    """Tokens of each continuation."""
    prompts: int = 32


class Stored(NamedTuple):
    """What storing a domain took."""

    tokens: dict[str, int]
    """Of each fraction, ``1/1`` being everything."""
    seconds: float


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
        say: hears what is being made.
    """

    def __init__(
        self,
        model: str,
        texts: dict[str, dict[str, list[TextDocument]]],
        limits: Limits,
        out: Path,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.texts, self.limits, self.say = model, texts, limits, say
        self.domains = list(texts)
        self.tokenizer = load(model, device="cpu").tokenizer
        self.inputs = self._hash()
        self.folder = out / "shared" / self.inputs[:12]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._memories: dict[str, Memory] = {}
        self._compared: dict[str, Comparison] = {}

    def _hash(self) -> str:
        base = load(self.model, device="cpu").model
        digest = hashlib.sha256(model_fingerprint(base).encode())
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
    def base(self) -> "Memory":
        """The base model with a store of every domain, searched exactly."""
        return self.memory(self.model, "base")

    def memory(self, model: str, name: str, index: str = "exact") -> "Memory":
        """A model with a store, which is filled when a domain is first asked for.

        Args:
            model: folder of the model.
            name: of the store, the same for the same model and index.
            index: of the FAISS adapter.
        """
        return self._memory(
            name, lambda home: knnstore.create(home, model, device="cpu", params={"index": index})
        )

    def pruned(self, keep: float, method: str) -> "Memory":
        """A copy of the base model's store, in which only some records stay."""

        def make(home: Path) -> KNNLMForCausalLM:
            for domain in self.domains:
                self.base.stored(domain)
            self.base.lm.store.datastore.flush()
            shutil.copytree(self.base.folder / "home", home)
            for record in self.base.folder.glob("stored-*.json"):
                shutil.copy(record, home.parent)
            self.say(f"pruning, {method}, to {keep:.0%}")
            lm = knnstore.load(home, "a", device="cpu")
            lm.prune(keep, method=method)
            return lm

        return self._memory(f"{method}-{keep}", make)

    def _memory(self, name: str, make: "Make") -> "Memory":
        if name not in self._memories:
            self._memories[name] = Memory(self, self.folder / "homes" / name, make)
        return self._memories[name]

    def dev(self, domain: str) -> ScoredText:
        """The text to choose settings on, by the base model with the domain's store."""
        return self.base.scored(domain, "dev")

    def test(self, domain: str) -> ScoredText:
        """The text to report, likewise."""
        return self.base.scored(domain, "test")

    def compared(self, domain: str) -> Comparison:
        """All candidates of `knnstore calibrate`, fitted on dev."""
        if domain not in self._compared:
            self.say(f"{domain}: calibrating")
            self._compared[domain] = compare(self.dev(domain))
        return self._compared[domain]

    def calibrated(self, domain: str) -> KNNSettings:
        """The best way to mix the store alone, to retrieve from the domain."""
        settings = store_alone(self.compared(domain)).settings
        return replace(settings, selection=Selection(domains=(domain,)))

    def fixed(self, domain: str) -> KNNSettings:
        """The best fixed λ, T and k."""
        fixed = [one for one in self.compared(domain).candidates if one.name == "fixed"]
        return min(fixed, key=lambda one: one.held_out.ppl).settings

    def train_fraction(self, domain: str) -> int:
        """Which part of a domain's store models are fine-tuned on."""
        tokens, most = self.base.stored(domain).tokens, self.limits.train_tokens
        fractions = FRACTIONS[: self.limits.fractions]
        fit = [one for one in fractions if most is None or tokens[f"1/{one}"] <= most]
        return fit[0] if fit else fractions[-1]

    def part(self, domain: str, fraction: int = 1) -> list[TextDocument]:
        """Documents of the store: a fraction of its tokens, the same ones in every larger fraction."""
        return [document for document, level in self._leveled(domain) if level % fraction == 0]

    def _leveled(self, domain: str) -> list[tuple[TextDocument, int]]:
        """Each document with the smallest fraction that it is in, in an order drawn once."""
        documents = self.texts[domain]["store"]
        order = np.random.default_rng(0).permutation(len(documents))
        sizes = [len(documents[at].text) for at in order]
        shares = (np.cumsum(sizes) - 0.5 * np.array(sizes)) / sum(sizes)
        shares[0] = 0  # every part has a document
        fractions = FRACTIONS[: self.limits.fractions]
        return [
            (documents[at], max(fraction for fraction in fractions if share * fraction <= 1))
            for at, share in zip(order.tolist(), shares, strict=True)
        ]

    def tuned(self, domain: str, epochs: int, fraction: int = 1) -> Tuned:
        """The base model fine-tuned on a fraction of a domain's store."""
        folder = self.folder / "tuned" / f"{domain}-{epochs}-{fraction}"
        record = folder / "tuned.json"
        if not record.is_file():
            documents = self.part(domain, fraction)
            tokens = sum(map(len, tokenized(documents, self.tokenizer)))
            self.say(f"{domain}: fine-tuning on {tokens:,} tokens, {epochs} times")
            seconds = fine_tune(self.model, documents, epochs, folder)
            write_json(record, {"tokens": tokens, "seconds": seconds})
        values = json.loads(record.read_text())
        return Tuned(str(folder), values["tokens"], epochs, values["seconds"])

    def log_probs(self, model: str, domain: str) -> Tensor:
        """Log p of every token of test by a model alone, in the order of `test`."""
        lm, tokenizer = load(model, device="cpu")
        encoder, length = Encoder(lm, locate(lm)), self.base.lm.store.identity.max_length
        log_probs, gold = [], []
        for batch in batches(self.texts[domain]["test"], tokenizer, length):
            states = encoder.encode(batch.input_ids, batch.at).states
            log_probs.append(encoder.gold_log_probs(states, batch.gold))
            gold.append(torch.from_numpy(batch.gold))
        assert torch.equal(torch.cat(gold), self.test(domain).reading.gold), "in another order"
        return torch.cat(log_probs)


Make = Callable[[Path], KNNLMForCausalLM]
"""Makes a home and opens it for writing."""


class Memory:
    """A model with a store.

    Args:
        lab: where texts come from.
        folder: for the home and what is found with it.
        make: called once.
    """

    def __init__(self, lab: Lab, folder: Path, make: Make) -> None:
        self._lab, self.folder, self._make = lab, folder, make

    @cached_property
    def lm(self) -> KNNLMForCausalLM:
        """The model with its store, opened for writing."""
        home, made = self.folder / "home", self.folder / "made"
        if made.is_file():
            return knnstore.load(home, "a", device="cpu")
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
            leveled = self._lab._leveled(domain)
            # The smallest part first, so that each part is a run of records.
            for fraction in reversed(FRACTIONS[: self._lab.limits.fractions]):
                documents = [document for document, level in leveled if level == fraction]
                parts = [f"1/{larger}" for larger in FRACTIONS if larger <= fraction]
                added = lm.add(documents, domain=domain, tags=parts)
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
        params: Mapping[str, Any] | None = None,
    ) -> ScoredText:
        """Held-out text of a domain after one pass of model and search.

        Args:
            domain: of the text and of the store.
            split: ``dev`` or ``test``.
            fraction: which part of the store to search.
            k: neighbours; default that of the limits, at most as many as there are.
            params: of the FAISS adapter, in place of those of the store.
        """
        stored = self.stored(domain)
        k = min(k or self._lab.limits.k, stored.tokens[f"1/{fraction}"])
        given = "".join(f"-{name}={value}" for name, value in (params or {}).items())
        file = self.folder / "passes" / f"{domain}-{split}-{fraction}-{k}{given}.safetensors"
        if not file.is_file():
            self._lab.say(f"{domain}: scoring {split}, 1/{fraction} of the store, k={k}{given}")
            selection = Selection(domains=(domain,), tags=None if fraction == 1 else (f"1/{fraction}",))
            lm = (
                self.lm
                if params is None
                else knnstore.load(self.folder / "home", params=params, device="cpu")
            )
            texts = self._lab.texts[domain][split]
            scored = score_once(lm.store, lm.encoder, lm.tokenizer, texts, k=k, selection=selection)
            if params is not None:
                lm.store.close()
            save_scored(file, scored)
        return load_scored(file)


def store_alone(found: Comparison) -> Candidate:
    """The best candidate of `knnstore calibrate` without a continuous cache."""
    without = [candidate for candidate in found.candidates if candidate.settings.cache is None]
    return min(without, key=lambda candidate: candidate.held_out.ppl)


def save_scored(file: Path, scored: ScoredText) -> None:
    """Write a pass whole or not at all."""
    values = {field.name: getattr(scored, field.name) for field in fields(scored)}
    reading = values.pop("reading")
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    tensors |= {"reading.keys": reading.keys, "reading.gold": reading.gold}
    file.parent.mkdir(exist_ok=True)
    part = file.with_suffix(".part")
    metadata = {"rest": json.dumps(rest), "metric": str(reading.metric)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, metadata)
    os.replace(part, file)


def load_scored(file: Path) -> ScoredText:
    """Read what `save_scored` wrote."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    keys, gold = tensors.pop("reading.keys"), tensors.pop("reading.gold")
    reading = Reading(keys, gold, tensors["documents"], metadata["metric"])
    return ScoredText(**tensors, **json.loads(metadata["rest"]), reading=reading)


def write_json(file: Path, values: Any) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, file)


def batches(documents: Sequence[TextDocument], tokenizer: Any, length: int) -> Iterator[Batch]:
    """The windows of held-out text in the order in which they are scored."""
    for ahead in in_chunks(documents):
        yield from pack(
            tokenized(ahead, tokenizer), prefix=prefix_of(tokenizer),
            max_length=length, stride=max(1, length // 2), batch_tokens=BATCH_TOKENS,
        )  # fmt: skip


def read(folder: Path, domains: Sequence[str], model: str, limits: Limits) -> dict[str, Any]:
    """Read the documents of each domain's splits, as many as the limits allow.

    Args:
        folder: with a folder for each domain, which holds ``store.jsonl``, ``dev.jsonl``, ``test.jsonl``.
        domains: their names; none is all.
        model: whose tokens are counted.
        limits: how much is used.
    """
    names = domains or sorted(path.name for path in folder.iterdir() if (path / "store.jsonl").is_file())
    tokenizer = load(model, device="cpu").tokenizer
    return {
        name: {
            split: cut(read_documents([folder / name / f"{split}.jsonl"]), split, tokenizer, limits)
            for split in SPLITS
        }
        for name in names
    }


def cut(documents: Iterator[TextDocument], split: str, tokenizer: Any, limits: Limits) -> list[TextDocument]:
    """The first documents of a split, as many as the limits allow."""
    enough, least = (limits.store_tokens, 0) if split == "store" else (limits.held_out_tokens, MIN_DOCUMENTS)
    taken: list[TextDocument] = []
    tokens = 0
    for document in documents:
        if len(taken) == limits.documents or (tokens >= enough and len(taken) >= least):
            break
        taken.append(document)
        tokens += len(tokenized([document], tokenizer)[0])
    return taken
