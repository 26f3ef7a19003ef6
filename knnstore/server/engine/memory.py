"""What the model remembers of the texts of a batch: they grow in place, so a step copies nothing.

All texts end in one column; shorter ones are padded on the left. Beyond it there is room for the next steps,
where `DynamicCache` copies everything to add a column.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from knnstore.server.engine.prompts import PADDING, Layers

_ROOM = 64
"""Columns that are added at once, at least as many as a step has."""


class Memory:
    """Tokens of rows, and keys and values of each layer's attention; padding is zeros, for NaN would spread.

    Args:
        device: of the tokens.
    """

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.empty((0, 0), dtype=torch.long, device=device)
        self._layers: Layers = []
        self._end = 0
        self.lengths: list[int] = []
        """Tokens of each row that the model has read."""

    def join(self, tokens: Sequence[int], layers: Layers) -> None:
        """Take in a row: tokens that were read, at least one, and their keys and values."""
        row, length = len(self.lengths), len(tokens)
        if row == len(self._tokens) or length > self._end:
            self._make_room(row + 1, length, layers)
        at = slice(self._end - length, self._end)
        self._tokens[row] = PADDING
        self._tokens[row, at] = torch.tensor(tokens, device=self._tokens.device)
        for of_all, of_row in zip(self._layers, layers, strict=True):
            for values, new in zip(of_all, of_row, strict=True):
                values[row] = 0
                values[row, :, at] = new[0]
        self.lengths.append(length)

    def leave(self, row: int) -> None:
        """Let a row go; the last one takes its place."""
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()
        last = len(self.lengths)
        if not last:
            self._tokens, self._layers, self._end = self._tokens[:0, :0], [], 0
        elif row < last:
            self._tokens[row] = self._tokens[last]
            for of_all in self._layers:
                for values in of_all:
                    values[row, :, : self._end] = values[last, :, : self._end]

    def step(self, tokens: Sequence[Sequence[int]]) -> tuple[Tensor, DynamicCache]:
        """Put some tokens after each row, as many after one as after another; `keep` lets them count.

        Returns:
            The texts with them, int64, shape (b, t), `PADDING` on the left; and a cache for a pass over them.
        """
        count, rows = len(tokens[0]), len(self.lengths)
        if self._end + count > self._tokens.shape[1]:
            self._make_room(rows, 0, self._layers)
        columns = slice(self._end - max(self.lengths), self._end + count)
        new = torch.tensor(tokens, device=self._tokens.device)
        self._tokens[:rows, self._end : columns.stop] = new
        cache = DynamicCache()
        cache.layers = [
            _Layer(keys[:rows, :, columns], values[:rows, :, columns], count) for keys, values in self._layers
        ]
        return self._tokens[:rows, columns], cache

    def keep(self, count: int) -> None:
        """Let so many tokens of the last step count."""
        self._end += count
        self.lengths = [length + count for length in self.lengths]

    def _make_room(self, rows: int, length: int, like: Layers) -> None:
        """Make room for so many rows, of which a new one has a length, and for the next steps."""
        old = slice(self._end - max(self.lengths, default=0), self._end)
        kept, end = len(self.lengths), max([length, *self.lengths])
        at = slice(end - (old.stop - old.start), end)
        tokens = self._tokens.new_full((rows, end + _ROOM), PADDING)
        tokens[:kept, at] = self._tokens[:kept, old]
        layers = []
        for number, pair in enumerate(like):
            made = [one.new_zeros((rows, one.shape[1], end + _ROOM, one.shape[3])) for one in pair]
            for new, values in zip(made, self._layers[number], strict=True) if kept else ():
                new[:kept, :, at] = values[:kept, :, old]
            layers.append((made[0], made[1]))
        self._tokens, self._layers, self._end = tokens, layers, end


class _Layer(DynamicLayer):
    """A layer of a cache whose last columns are still to be written.

    Args:
        keys: with these columns, shape (b, heads, t, width).
        values: likewise.
        new: how many they are.
    """

    def __init__(self, keys: Tensor, values: Tensor, new: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._new = (keys, values), new
        self.keys, self.values = keys[:, :, :-new], values[:, :, :-new]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the columns."""
        self.keys, self.values = self._whole
        self.keys[:, :, -self._new :], self.values[:, :, -self._new :] = key_states, value_states
        return self.keys, self.values
