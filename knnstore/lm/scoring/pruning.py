"""Smaller stores, with the perplexity that it costs.

Methods: ``merge`` (He et al. 2021, https://arxiv.org/abs/2109.04212, the nearest pairs first), ``known``
(what the model predicts anyway goes first) and ``random``. See `knnstore.store.relocation.choices`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from knnstore.datastore import positions_of
from knnstore.documents import OnBad
from knnstore.errors import ConfigError
from knnstore.lm.reading import TextReader, usable_documents
from knnstore.lm.scoring.evaluating import Evaluation, evaluate
from knnstore.lm.scoring.held_out import HeldOut
from knnstore.lm.settings import KNNModel, KNNSettings, ReadingParts, resolve
from knnstore.progress import Progress
from knnstore.store import (
    EVERYTHING,
    Choice,
    Chooser,
    DomainRecords,
    Pruned,
    Reader,
    Selection,
    drop_highest,
    merge_chooser,
    random_chooser,
)


@dataclass(frozen=True, slots=True)
class PruningCost:
    """Perplexity of held-out text with the settings in force, which were fitted to the store as it was."""

    tokens: int
    base_ppl: float
    """Of the model alone."""
    before_ppl: float
    after_ppl: float

    @property
    def change(self) -> float:
        """By how much it grew, as a share of what it was."""
        return self.after_ppl / self.before_ppl - 1


@dataclass(frozen=True, slots=True)
class Pruning:
    """What `prune` did."""

    method: str
    pruned: Pruned
    cost: PruningCost | None
    """None when there was no held-out text, or nothing to do."""


def prune(
    lm: KNNModel,
    keep: float,
    *,
    method: str = "merge",
    domains: Iterable[str] = (),
    held_out: Iterable[object] = (),
    leave_out: bool = False,
    seed: int = 0,
    location: str | None = None,
    params: Mapping[str, Any] | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Pruning:
    """Let only some records of each domain stay, and measure what it costs; see `KNNStore.prune`.

    Args:
        lm: the model, its store opened for writing.
        keep: share of each domain's tokens that shall have a record, above 0 and at most 1.
        method: which records go: ``merge``, ``known`` or ``random``.
        domains: the domains to prune; none is all.
        held_out: documents as in `add`, by which the cost is measured before the switch, retrieving from the
            domains.
        leave_out: a held-out document that is itself in the store does not retrieve from itself; else it
            is refused.
        seed: of ``random``.
        location: a new place for the keys; by default a new folder beside the old one, in the home.
        params: the adapter's parameters that differ from those in use.
        on_bad: called for each held-out document that cannot be used, or that has a token which the model
            does not have; it is then left out. None raises at the first.
        progress: is told of each batch.

    Raises:
        ConfigError: the method is unknown, or `keep` is out of range.
        InputError: a held-out document is in the store, or one cannot be used and `on_bad` is None.
    """
    store, names = lm.store, tuple(sorted(set(domains)))
    choosers: dict[str, Callable[[], Chooser]] = {
        "merge": merge_chooser,
        "known": partial(known_chooser, lm.reader),
        "random": partial(random_chooser, seed),
    }
    if method not in choosers:
        raise ConfigError(f"unknown method {method!r}; known: {', '.join(choosers)}")
    choose = choosers[method]()
    selection = Selection(domains=names) if names else EVERYTHING
    texts = HeldOut.of(store, lm.reader, usable_documents(lm.reader, held_out, on_bad), selection)
    if not leave_out:
        texts.refuse_stored()
    settings = resolve(store, KNNSettings(selection=selection)) if texts.documents else None
    measured: list[Evaluation] = []

    def compare(preview: Reader) -> None:
        if settings is not None:
            for one in (store, preview):
                parts = ReadingParts(one, lm.reader, settings)
                measured.append(evaluate(parts, texts.documents, leave_out=leave_out, progress=progress))

    pruned = store.prune(
        keep, choose, domains=names, location=location, params=params, inspect=compare, progress=progress
    )
    cost = None
    if measured:
        before, after = measured
        cost = PruningCost(after.tokens, after.base_ppl, before.knn_ppl, after.knn_ppl)
    return Pruning(method, pruned, cost)


def known_chooser(reader: TextReader) -> Chooser:
    """The records whose token the model itself finds likeliest go first: one forward pass over the tokens."""

    def choose(records: DomainRecords, left: int, progress: Progress) -> Choice:
        starts = np.array([start for start, _ in records.documents], np.int64)
        positions = positions_of(records.ids)
        scores = np.zeros(len(positions), np.float32)
        texts = [tokens for _, tokens in records.documents]
        progress.start("reading", total=sum(map(len, texts)))
        for batch in reader.batches(texts):
            encoded = reader.encoder.encode(batch.input_ids, batch.at)
            log_probs = reader.encoder.gold_log_probs(encoded.states, batch.gold).cpu().numpy()
            places = starts[batch.documents] + batch.positions
            at = np.minimum(np.searchsorted(positions, places), len(positions) - 1)
            there = positions[at] == places  # the others were pruned before
            scores[at[there]] = log_probs[there]
            progress.advance(len(places))
        progress.finish()
        return drop_highest(scores, left)

    return choose
