"""The KV cache of a batch. It grows in place, so a step copies no keys and values of earlier tokens.

All texts end in the same column; shorter texts are padded on the left. Free columns to the right are for the
next steps. `DynamicCache` would copy everything to add a column.
"""

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from knnstore.lm import TextState, TextStateLayer
from knnstore.server.engine.prompts import Layers

_FREE_COLUMNS = 64
"""Number of columns that are added at once. It is at least the number of tokens of a step."""


class Memory:
    """KV cache and `TextState` of each row of a batch.

    Padding is zero, because a NaN in the padding would spread through the attention.
    """

    def __init__(self) -> None:
        self._texts: list[TextState] = []
        self._layers: Layers = []
        self._rows = self._columns = 0
        """Number of rows and of columns (token positions) that the layers have memory for."""
        self._end = 0
        """Column after the last token of every row; the columns from here on are free."""
        self.lengths: list[int] = []
        """Number of tokens of each row that are in the cache, without tokens of a step that is not kept
        yet."""

    def add_row(self, layers: Layers, text: TextState) -> None:
        """Append a row to the batch. Copies the row's keys and values into the layers.

        Args:
            layers: keys and values of the row's tokens, at least one token.
            text: state of the same tokens. This object owns the state from now on and changes it.
        """
        row, length = len(self.lengths), text.length
        if row == self._rows or length > self._end:
            self._reallocate(row + 1, length, layers)
        columns = slice(self._end - length, self._end)
        for batch_layer, row_layer in zip(self._layers, layers, strict=True):
            for batch_values, row_values in zip(batch_layer, row_layer, strict=True):
                batch_values[row] = 0
                batch_values[row, :, columns] = row_values[0]
        self.lengths.append(length)
        self._texts.append(text)

    def remove_row(self, row: int) -> None:
        """Remove a row by its index. The last row takes the index of the removed row."""
        self.lengths[row], self._texts[row] = self.lengths[-1], self._texts[-1]
        self.lengths.pop()
        self._texts.pop()
        last = len(self.lengths)
        if not last:
            self._layers, self._rows, self._columns, self._end = [], 0, 0, 0
        elif row < last:
            for layer in self._layers:
                for values in layer:
                    values[row, :, : self._end] = values[last, :, : self._end]

    def begin_step(self, count: int) -> DynamicCache:
        """Return a cache for a forward pass that reads `count` further tokens of each row.

        The pass writes into the free columns of this object. If `keep_tokens` is not called before the next
        step, the next step overwrites them.
        """
        rows = len(self.lengths)
        if self._end + count > self._columns:
            self._reallocate(rows, 0, self._layers)
        columns = slice(self._end - max(self.lengths), self._end + count)
        cache = DynamicCache()
        cache.layers = [
            _InPlaceLayer(keys[:rows, :, columns], values[:rows, :, columns], count)
            for keys, values in self._layers
        ]
        self._truncate_texts()
        cache.layers.append(TextStateLayer(self._texts))
        return cache

    def keep_tokens(self, count: int) -> None:
        """Keep the first `count` new tokens of each row from the last step, and drop the others."""
        self._end += count
        self.lengths = [length + count for length in self.lengths]
        self._truncate_texts()

    def _truncate_texts(self) -> None:
        """Cut the `TextState` of each row to the row's kept tokens."""
        for text, length in zip(self._texts, self.lengths, strict=True):
            text.truncate(length)

    def _reallocate(self, rows: int, length: int, like: Layers) -> None:
        """Allocate layers with `_FREE_COLUMNS` free columns, and copy the rows of the old layers.

        Args:
            rows: number of rows to allocate.
            length: number of tokens of a row that is to be added; 0 if no row is.
            like: layers whose shapes, dtypes and devices the new layers have.
        """
        old_columns = slice(self._end - max(self.lengths, default=0), self._end)
        row_count, end = len(self.lengths), max([length, *self.lengths])
        new_columns = slice(end - (old_columns.stop - old_columns.start), end)
        layers = []
        for number, pair in enumerate(like):
            new_pair = [
                tensor.new_zeros((rows, tensor.shape[1], end + _FREE_COLUMNS, tensor.shape[3]))
                for tensor in pair
            ]
            for new_values, values in zip(new_pair, self._layers[number], strict=True) if row_count else ():
                new_values[:row_count, :, new_columns] = values[:row_count, :, old_columns]
            layers.append((new_pair[0], new_pair[1]))
        self._layers, self._rows, self._columns, self._end = layers, rows, end + _FREE_COLUMNS, end


class _InPlaceLayer(DynamicLayer):
    """Layer of a transformers cache whose last columns a forward pass fills in place.

    Args:
        keys: keys of all columns, the new columns included, shape (b, heads, t, width).
        values: values of the same columns, same shape.
        new: number of new columns, at the end.
    """

    def __init__(self, keys: Tensor, values: Tensor, new: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._new = (keys, values), new
        self.keys, self.values = keys[:, :, :-new], values[:, :, :-new]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values into the new columns. Returns the keys and values of all columns."""
        self.keys, self.values = self._whole
        self.keys[:, :, -self._new :], self.values[:, :, -self._new :] = key_states, value_states
        return self.keys, self.values
