"""The records that a substitute is trained on, and the documents that are held out."""

from collections.abc import Collection, Iterator
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from knnstore.datastore import tokens_of
from knnstore.errors import InputError
from knnstore.store import Reader, Selection

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


class RecordBlocks:
    """The records of the documents selected, `without` those of some numbers, in blocks of bounded size.

    They are kept when there is but one block.
    """

    def __init__(self, store: Reader, selection: Selection, without: Collection[int] = ()) -> None:
        self._store = store
        self._selection = selection
        self._without = without
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
        parts: list[Records] = []
        room = 0
        for ids, keys in self._store.records(self._selection, without=self._without):
            if room < len(ids) and parts:
                yield _together(parts)
                parts = []
            if not parts:
                room = max(1, _BLOCK_VALUES // keys.shape[1])
            parts.append(Records(torch.from_numpy(keys).half(), torch.from_numpy(tokens_of(ids))))
            room -= len(ids)
        if parts:
            yield _together(parts)


def _together(parts: list[Records]) -> Records:
    return Records(*(torch.cat(column) for column in zip(*parts, strict=True)))


def choose_held_out(store: Reader, selection: Selection, generator: torch.Generator) -> list[int]:
    """The numbers of the documents that are kept from training, in random order.

    Raises:
        InputError: there are fewer than two documents.
    """
    lengths = {number: tokens for number, tokens in store.lengths(selection).items() if tokens}
    if len(lengths) < 2:
        raise InputError(
            f"{len(lengths)} documents are too few to train on: at least 2 are needed, since some are held "
            "out"
        )
    left = min(HELD_OUT_TOKENS, int(HELD_OUT_SHARE * sum(lengths.values())))
    numbers, held_out = list(lengths), []
    for at in torch.randperm(len(numbers), generator=generator).tolist():
        if lengths[numbers[at]] <= left:
            left -= lengths[numbers[at]]
            held_out.append(numbers[at])
    return held_out or [min(lengths, key=lengths.__getitem__)]
