"""Smaller stores, with the perplexity that it costs.

Methods: ``merge`` (He et al. 2021, https://arxiv.org/abs/2109.04212, the nearest pairs first), ``known``
(what the model predicts anyway goes first) and ``random``. See `knnstore.store.relocation.choices`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import positions_of
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, InputError
from knnstore.lm.reading import BATCH_TOKENS, Encoder, pack, prefix_of
from knnstore.lm.scoring.evaluating import evaluate
from knnstore.lm.settings import settings_for
from knnstore.progress import Progress
from knnstore.store import (
    EVERYTHING,
    Choice,
    Chooser,
    DomainRecords,
    Identity,
    KNNStore,
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
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    keep: float,
    *,
    method: str = "merge",
    domains: Sequence[str] = (),
    held_out: Iterable[TextDocument] = (),
    leave_out: bool = False,
    seed: int = 0,
    location: str | None = None,
    params: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Pruning:
    """Let only some records of each domain stay; see `KNNStore.prune`.

    Args:
        store: opened for writing.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        keep: share of each domain's tokens that shall have a record, above 0 and at most 1.
        method: which records go.
        domains: the domains to prune; none is all.
        held_out: measures the cost before the switch, retrieving from these domains.
        leave_out: a held-out document that is itself in the store does not retrieve from itself; else it
            is refused.
        seed: of ``random``.
        location: a new place for the keys; by default a new folder beside the old one, in the home.
        params: adapter's parameters that differ from those in use.
        progress: hears of each batch.

    Raises:
        ConfigError: the method is unknown, or `keep` is out of range.
        InputError: a held-out document is in the store.
    """
    if method == "known":
        choose = known_chooser(encoder, tokenizer, store.identity)
    else:
        choose = chooser_without_model(method, seed)
    selection = Selection(domains=tuple(sorted(set(domains)))) if domains else EVERYTHING
    listed, measured = list(held_out), list[tuple[int, float, float]]()
    twins = store.stored_content((document.content_hash for document in listed), selection)
    if twins and not leave_out:
        raise InputError(
            f"{len(twins):,} of the held-out documents are in the store and would find themselves; give "
            "others, or leave each out of its own search (leave_out, --leave-out)"
        )
    settings = settings_for(store, selection) if listed else None

    def compare(preview: Reader) -> None:
        for reader in (store, preview):
            if settings is not None:
                found = evaluate(
                    cast(KNNStore, reader), encoder, tokenizer, listed, settings,
                    leave_out=leave_out, progress=progress,
                )  # fmt: skip
                measured.append((found.tokens, found.base_ppl, found.knn_ppl))

    pruned = store.prune(
        keep, choose, domains=domains, location=location, params=params, inspect=compare, progress=progress
    )
    cost = None
    if measured:
        (tokens, base, before), (_, _, after) = measured
        cost = PruningCost(tokens, base, before, after)
    return Pruning(method, pruned, cost)


def chooser_without_model(method: str, seed: int = 0) -> Chooser:
    """The chooser of a method that needs no model.

    Raises:
        ConfigError: there is no such method.
    """
    if method == "merge":
        return merge_chooser()
    if method == "random":
        return random_chooser(seed)
    raise ConfigError(f"unknown method {method!r}; known: merge, known, random")


def known_chooser(encoder: Encoder, tokenizer: PreTrainedTokenizerBase, identity: Identity) -> Chooser:
    """The records whose token the model itself finds likeliest go first: one forward pass over the tokens.

    Args:
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        identity: of the store.
    """

    def choose(records: DomainRecords, left: int, progress: Progress) -> Choice:
        starts = np.array([start for start, _ in records.documents], np.int64)
        positions = positions_of(records.ids)
        scores = np.zeros(len(positions), np.float32)
        progress.start("reading", total=sum(len(tokens) for _, tokens in records.documents))
        for batch in pack(
            [tokens for _, tokens in records.documents],
            prefix=prefix_of(tokenizer),
            max_length=identity.max_length,
            stride=identity.stride,
            batch_tokens=BATCH_TOKENS,
        ):
            encoded = encoder.encode(batch.input_ids, batch.at)
            log_probs = encoder.gold_log_probs(encoded.states, batch.gold).cpu().numpy()
            places = starts[batch.documents] + batch.positions
            at = np.minimum(np.searchsorted(positions, places), len(positions) - 1)
            there = positions[at] == places  # the others were pruned before
            scores[at[there]] = log_probs[there]
            progress.advance(len(places))
        progress.finish()
        return drop_highest(scores, left)

    return choose
