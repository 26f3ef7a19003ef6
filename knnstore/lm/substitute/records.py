"""The records that a substitute is trained on, and the documents that are held out."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import IdRanges, positions_of, ranges_of, record_ids, tokens_of
from knnstore.errors import InputError
from knnstore.store import KNNStore, Selection

HELD_OUT_SHARE = 0.05
HELD_OUT_TOKENS = 20_000
"""At most so many tokens, in whole documents, say when to stop and how much to trust the substitute."""

_BLOCK_VALUES = 1 << 26
"""How many values of keys are in memory at once: 128 MiB of float16, shuffled together."""


class Records(NamedTuple):
    """Keys and what they predict."""

    keys: Tensor
    """float16, shape (m, d)."""
    tokens: Tensor
    """int64, shape (m,)."""
    weights: Tensor
    """How many records each stands for, float32, shape (m,): 1 but where the store was pruned."""


class RecordBlocks:
    """The records of some documents in blocks of bounded size, which are kept when there is but one."""

    def __init__(self, store: KNNStore, ranges: IdRanges) -> None:
        self._store = store
        self._ranges = ranges
        self._only: Records | None = None

    def __iter__(self) -> Iterator[Records]:
        if self._only is not None:
            yield self._only
            return
        read = list(islice(blocks := self._read(), 2))
        if len(read) == 1:
            self._only = read[0]
        yield from chain(read, blocks)

    def _read(self) -> Iterator[Records]:
        survivors = self._store.view().snapshot.survivors
        parts: list[Records] = []
        room = 0
        for ids, keys, _ in self._store.datastore.iterate(ids=self._ranges):
            if room < len(ids) and parts:
                yield _together(parts)
                parts = []
            if not parts:
                room = max(1, _BLOCK_VALUES // keys.shape[1])
            logs = None if survivors is None else survivors.log_weights_at(positions_of(ids))
            weights = torch.ones(len(ids)) if logs is None else torch.from_numpy(logs).exp()
            parts.append(Records(torch.from_numpy(keys).half(), torch.from_numpy(tokens_of(ids)), weights))
            room -= len(ids)
        if parts:
            yield _together(parts)


def _together(parts: list[Records]) -> Records:
    return Records(*(torch.cat(column) for column in zip(*parts, strict=True)))


def divide(
    store: KNNStore, selection: Selection, generator: torch.Generator
) -> tuple[IdRanges, list[NDArray[np.uint32]]]:
    """The records to train on, and the tokens of the documents that are held out."""
    view = store.view()
    snapshot, live = view.snapshot, view.scope(selection).live
    lengths = snapshot.stops - snapshot.starts
    first = record_ids(snapshot.starts, np.zeros_like(lengths))
    chosen = np.flatnonzero(live.contains(first) & (lengths > 0))
    if len(chosen) < 2:
        raise InputError(
            f"{len(chosen)} documents are too few to train on: at least 2 are needed, since some are held out"
        )
    left = min(HELD_OUT_TOKENS, int(HELD_OUT_SHARE * lengths[chosen].sum()))
    held_out = []
    for at in chosen[torch.randperm(len(chosen), generator=generator).numpy()].tolist():
        if lengths[at] <= left:
            left -= int(lengths[at])
            held_out.append(at)
    held_out = held_out or [int(chosen[lengths[chosen].argmin()])]
    places = store.provenance(first[held_out], before=0, after=0)
    documents = [store.tokens(place.document, domain=place.domain) for place in places if place is not None]
    kept = np.setdiff1d(chosen, held_out)
    return ranges_of(snapshot.starts[kept], snapshot.stops[kept]), documents
