"""The KV cache of a batch of texts. It grows in place, so a step copies no keys and values of earlier tokens.

All texts end at or before the same column (token position of the tensors); shorter texts are padded on the
left. Free columns to the right are for the next steps. transformers' `DynamicCache` would copy all keys and
values to add a column.

A step may add more tokens to one text than to another, if more of its draft tokens were accepted. The columns
that another text does not use are gaps: the attention mask hides them, until larger layers are allocated and
all gaps are closed.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from knnstore.lm import TextState, TextStateLayer, copy_without_gaps
from knnstore.server.engine.prompts import Layers

_FREE_COLUMNS = 64
"""Number of free columns that are added at once. A step may not add more tokens to a text than this."""


class BatchCache:
    """The KV cache of a batch of texts, with the `TextState` of each text.

    Row i of the tensors belongs to the i-th text. A `TextState` holds the text's tokens and the vectors that
    retrieval needs. The padding is zero, because a NaN in the padding would spread through the attention.
    """

    def __init__(self) -> None:
        self._texts: list[TextState] = []
        self._layers: Layers = []
        self._rows = self._columns = 0
        """Numbers of rows (texts) and of columns (token positions) for which the layers have memory."""
        self._end = 0
        """Index of the column after the last token of the texts. This column and the columns after it are
        free."""
        self._is_token = np.zeros((0, 0), np.bool_)
        """True where a column holds a token of a text, shape (rows, columns)."""
        self.lengths: list[int] = []
        """Number of tokens of each text in the cache. Tokens of a step count after `keep_first_tokens`."""

    def add_row(self, layers: Layers, text: TextState) -> None:
        """Append a text to the batch. Copies the keys and values of its tokens into this cache.

        Args:
            layers: keys and values of the text's tokens, for each attention layer; at least one token.
            text: the state of the same tokens for retrieval: their ids and query vectors. This object takes
                the state over and changes it later.
        """
        row, length = len(self.lengths), text.length
        if row == self._rows or length > self._end:
            self._reallocate(row + 1, length, layers)
        columns = slice(self._end - length, self._end)
        self._is_token[row] = False
        self._is_token[row, columns] = True
        for batch_layer, row_layer in zip(self._layers, layers, strict=True):
            for batch_values, row_values in zip(batch_layer, row_layer, strict=True):
                batch_values[row] = 0
                batch_values[row, :, columns] = row_values[0]
        self.lengths.append(length)
        self._texts.append(text)

    def remove_row(self, row: int) -> None:
        """Remove the text with this index. The last text of the batch takes over the index."""
        self.lengths[row], self._texts[row] = self.lengths[-1], self._texts[-1]
        self.lengths.pop()
        self._texts.pop()
        last = len(self.lengths)
        if not last:
            self._layers, self._rows, self._columns, self._end = [], 0, 0, 0
        elif row < last:
            self._is_token[row] = self._is_token[last]
            for layer in self._layers:
                for values in layer:
                    values[row, :, : self._end] = values[last, :, : self._end]

    def begin_step(self, count: int) -> DynamicCache:
        """Return a transformers cache for a forward pass that reads `count` further tokens of each text.

        The pass writes its keys and values into free columns of this object. Call `keep_first_tokens` after
        the pass to keep them; without that call, the next pass overwrites them.
        """
        rows = len(self.lengths)
        if self._end + count > self._columns:
            self._reallocate(rows, 0, self._layers)
        columns = slice(self._find_first_column(), self._end + count)
        cache = DynamicCache()
        cache.layers = [
            _InPlaceLayer(keys[:rows, :, columns], values[:rows, :, columns], count)
            for keys, values in self._layers
        ]
        self._truncate_texts()
        cache.layers.append(TextStateLayer(self._texts))
        return cache

    def attention_mask(self, count: int) -> Tensor:
        """Return the mask of the columns of a pass after `begin_step(count)`, int64, shape (rows, columns).

        It is 0 at padding and in gaps, and 1 at the tokens of the texts and at the `count` new tokens.
        """
        known = self._is_token[: len(self.lengths), self._find_first_column() : self._end]
        return torch.from_numpy(np.pad(known, ((0, 0), (0, count)), constant_values=True).astype(np.int64))

    def keep_first_tokens(self, counts: Sequence[int]) -> None:
        """Keep the first tokens that the last step read of each text, and drop its other tokens.

        Args:
            counts: the number of tokens to keep of each text.
        """
        for row, count in enumerate(counts):
            self._is_token[row, self._end : self._end + max(counts)] = np.arange(max(counts)) < count
            self.lengths[row] += count
        self._end += max(counts)
        self._truncate_texts()

    def _find_first_column(self) -> int:
        """Return the index of the first column that holds a token of any text."""
        return int(self._is_token[: len(self.lengths), : self._end].any(0).argmax())

    def _truncate_texts(self) -> None:
        """Cut the `TextState` of each text to the tokens that are kept in the cache."""
        for text, length in zip(self._texts, self.lengths, strict=True):
            text.truncate(length)

    def _reallocate(self, rows: int, length: int, like: Layers) -> None:
        """Allocate larger layers with free columns at the end, and copy all keys and values into them.

        In the new layers the columns of each text are adjacent, and all texts end in the same column. It is
        followed by `_FREE_COLUMNS` free columns.

        Args:
            rows: number of rows (texts) to allocate.
            length: number of tokens of a text that will be added next; 0 if none will be added.
            like: used only if the cache has no layers yet. The new layers get the number of heads, the width,
                the dtype and the device of these layers.
        """
        end = max([length, *self.lengths])
        shape = rows, end + _FREE_COLUMNS
        was_token = self._is_token[: len(self.lengths), : self._end]
        self._layers = [
            (copy_without_gaps(keys, was_token, shape, end), copy_without_gaps(values, was_token, shape, end))
            for keys, values in self._layers or like
        ]
        self._is_token = np.zeros(shape, np.bool_)
        for row, old_length in enumerate(self.lengths):
            self._is_token[row, end - old_length : end] = True
        self._rows, self._columns, self._end = *shape, end


class _InPlaceLayer(DynamicLayer):
    """Layer of a transformers cache. A forward pass writes its new keys and values into the given tensors.

    Args:
        keys: keys of all t columns, with free columns at the end, shape (b, heads, t, width).
        values: values of the same columns, same shape.
        new: number of free columns at the end, which is the number of tokens that the pass reads.
    """

    def __init__(self, keys: Tensor, values: Tensor, new: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole, self._new = (keys, values), new
        self.keys, self.values = keys[:, :, :-new], values[:, :, :-new]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write the attention keys and values of new tokens into the free columns.

        Args:
            key_states: keys of the new tokens, shape (b, heads, new, width).
            value_states: values of the new tokens, same shape.

        Returns:
            The keys and the values of all columns, each of shape (b, heads, t, width).
        """
        self.keys, self.values = self._whole
        self.keys[:, :, -self._new :], self.values[:, :, -self._new :] = key_states, value_states
        return self.keys, self.values
