"""The KV cache of a batch. It grows in place, so a step copies no keys and values of earlier tokens.

All texts end in the same column; shorter texts are padded on the left. Free columns to the right are for the
next steps. `DynamicCache` would copy everything to add a column.
"""

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from knnstore.lm import TextState, TextStateLayer
from knnstore.server.engine.prompts import Layers

_ROOM = 64
"""Number of columns that are added at once. It is at least the number of tokens of a step."""


class Memory:
    """Token state and KV cache of each row. Padding is zero: a NaN in it would spread to the attention."""

    def __init__(self) -> None:
        self._texts: list[TextState] = []
        self._layers: Layers = []
        self._rows = self._columns = 0
        """Allocated rows and columns of the layers."""
        self._end = 0
        self.lengths: list[int] = []
        """Number of tokens of each row that the model has read and `keep` has kept."""

    def join(self, layers: Layers, text: TextState) -> None:
        """Add a row. Copies its keys and values.

        Args:
            layers: keys and values of the row's tokens, at least one token.
            text: state of these tokens. The row owns it from now on and changes it.
        """
        row, length = len(self.lengths), text.length
        if row == self._rows or length > self._end:
            self._make_room(row + 1, length, layers)
        at = slice(self._end - length, self._end)
        for of_all, of_row in zip(self._layers, layers, strict=True):
            for values, new in zip(of_all, of_row, strict=True):
                values[row] = 0
                values[row, :, at] = new[0]
        self.lengths.append(length)
        self._texts.append(text)

    def leave(self, row: int) -> None:
        """Remove a row. The last row takes its place."""
        self.lengths[row], self._texts[row] = self.lengths[-1], self._texts[-1]
        self.lengths.pop()
        self._texts.pop()
        last = len(self.lengths)
        if not last:
            self._layers, self._rows, self._columns, self._end = [], 0, 0, 0
        elif row < last:
            for of_all in self._layers:
                for values in of_all:
                    values[row, :, : self._end] = values[last, :, : self._end]

    def step(self, count: int) -> DynamicCache:
        """Return a cache for a forward pass that reads `count` further tokens of each row.

        The pass writes into free columns. They are dropped unless `keep` is called before the next step.
        """
        rows = len(self.lengths)
        if self._end + count > self._columns:
            self._make_room(rows, 0, self._layers)
        columns = slice(self._end - max(self.lengths), self._end + count)
        cache = DynamicCache()
        cache.layers = [
            _Layer(keys[:rows, :, columns], values[:rows, :, columns], count) for keys, values in self._layers
        ]
        self._forget_unkept()
        cache.layers.append(TextStateLayer(self._texts))
        return cache

    def keep(self, count: int) -> None:
        """Keep the first `count` tokens of the last step, and drop its other tokens."""
        self._end += count
        self.lengths = [length + count for length in self.lengths]
        self._forget_unkept()

    def _forget_unkept(self) -> None:
        for text, length in zip(self._texts, self.lengths, strict=True):
            text.truncate(length)

    def _make_room(self, rows: int, length: int, like: Layers) -> None:
        """Reallocate the layers, with `_ROOM` free columns, and copy the kept rows.

        Args:
            rows: number of rows to allocate.
            length: number of tokens of a new row; 0 without one.
            like: layers whose shapes, dtypes and devices the new layers have.
        """
        old = slice(self._end - max(self.lengths, default=0), self._end)
        kept, end = len(self.lengths), max([length, *self.lengths])
        at = slice(end - (old.stop - old.start), end)
        layers = []
        for number, pair in enumerate(like):
            made = [one.new_zeros((rows, one.shape[1], end + _ROOM, one.shape[3])) for one in pair]
            for new, values in zip(made, self._layers[number], strict=True) if kept else ():
                new[:kept, :, at] = values[:kept, :, old]
            layers.append((made[0], made[1]))
        self._layers, self._rows, self._columns, self._end = layers, rows, end + _ROOM, end


class _Layer(DynamicLayer):
    """A layer of a cache whose last columns the forward pass fills in place.

    Args:
        keys: keys of all columns, the new ones included, shape (b, heads, t, width).
        values: values, likewise.
        new: number of new columns.
    """

    def __init__(self, keys: Tensor, values: Tensor, new: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._new = (keys, values), new
        self.keys, self.values = keys[:, :, :-new], values[:, :, :-new]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns. Returns the keys and values of all columns."""
        self.keys, self.values = self._whole
        self.keys[:, :, -self._new :], self.values[:, :, -self._new :] = key_states, value_states
        return self.keys, self.values
