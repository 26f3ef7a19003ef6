"""Cutting documents into windows, and packing windows into batches; used for adding and for scoring.

No context is shared between documents. A prefix (the tokenizer's BOS or EOS token) has position -1, before
the tokens 0, 1, ..., so that the model can predict the first token as well. With ``max_length=6`` and
``stride=3`` a prefixed document of 10 tokens has three windows::

    position   -1  0  1  2  3  4  5  6  7  8  9
    window 1   [B  *  *  *  *  *]                     B the prefix, context only
    window 2            [.  .  .  *  *  *]            . context only
    window 3                  [.  .  .  .  *  *]      * predicted here

Every token is predicted once, and each one after the first window from at least
``max_length - stride`` tokens of context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import ConfigError

Tokens = NDArray[np.int64]
"""Token ids or positions, shape (n,)."""


class Window(NamedTuple):
    """Consecutive positions of one document that the model processes in one row."""

    start: int
    """First position of the window; -1 is the prefix."""

    stop: int
    """One past the last position."""

    first: int
    """First position whose token is predicted; the window predicts ``first .. stop - 1``."""


def windows(length: int, max_length: int, stride: int, *, has_prefix: bool) -> Iterator[Window]:
    """Cut one document into windows that predict every token exactly once.

    A document without target tokens gives no windows.

    Args:
        length: number of tokens in the document, without the prefix, >= 0.
        max_length: largest number of tokens in a window, the prefix included, >= 2.
        stride: number of tokens between the ends of two windows, 1 <= stride < max_length.
        has_prefix: True if a prefix precedes the document. Without a prefix the first token is not predicted,
            because it has no context.

    Raises:
        ConfigError: `max_length` or `stride` is out of range.

    Example:
        >>> [tuple(window) for window in windows(10, 6, 3, has_prefix=True)]
        [(-1, 5, 0), (2, 8, 5), (4, 10, 8)]
    """
    check_window(max_length, stride)
    origin = -1 if has_prefix else 0
    first, stop = origin + 1, min(origin + max_length, length)
    while first < length:
        yield Window(max(origin, stop - max_length), stop, first)
        first, stop = stop, min(stop + stride, length)


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows that the model processes together, and the positions of their predictions.

    Short rows are padded on the right. No attention mask is needed, because a position of a causal model
    attends only to earlier positions, and padding comes last. The last token of a window is not in its row,
    because no token is predicted from it.
    """

    input_ids: NDArray[np.int64]
    """Token ids, int64, shape (rows, width), padded with token 0."""

    at: Tokens
    """Indices into ``input_ids.reshape(-1)`` of the positions that predict, shape (n,).

    The arrays `at`, `documents`, `positions` and `gold` are aligned.
    """

    documents: Tokens
    """For each of the n predicted tokens, the index of its document in the argument `documents` of `pack`,
    shape (n,)."""

    positions: Tokens
    """Position of the target token in its document, 0 for the first token, shape (n,)."""

    gold: Tokens
    """The target tokens, shape (n,)."""


def pack(
    documents: Sequence[NDArray[np.integer[Any]]],
    *,
    prefix: int | None,
    max_length: int,
    stride: int,
    batch_tokens: int,
) -> Iterator[WindowBatch]:
    """Cut documents into windows, and group the windows into batches of rows of similar length.

    A window is a part of a document that the model processes in one row.

    The longest windows come first, so that a batch that is too large for the memory fails at the start. All
    windows of a document with several windows have the same length, so they stay adjacent and in order.

    Args:
        documents: token ids of each document, shapes (n_i,).
        prefix: the token that precedes every document; None for no prefix.
        max_length: largest number of tokens in a window, the prefix included.
        stride: number of tokens between the ends of two windows.
        batch_tokens: largest number of tokens in a batch, padding included. A window that is longer is a
            batch of its own.

    Yields:
        Batches that together predict every token of every document once; without a prefix every token except
        the first of each document. Documents without target tokens give no batches.

    Raises:
        ConfigError: `max_length`, `stride` or `batch_tokens` is out of range.
    """
    check_window(max_length, stride)
    if batch_tokens < 1:
        raise ConfigError(f"batch_tokens must be at least 1, got {batch_tokens}")
    # 1) Concatenate all documents, each after its prefix.
    before = [] if prefix is None else [np.array([prefix], np.int64)]
    pieces = [piece for document in documents for piece in (*before, np.asarray(document, np.int64))]
    text = np.concatenate([np.zeros(0, np.int64), *pieces])
    lengths = np.array([len(document) for document in documents], np.int64)
    # Index of token 0 of each document in `text`.
    origins = np.cumsum(lengths + len(before)) - lengths
    # 2) Cut the documents into windows, and sort these by length, longest first.
    table = np.array(
        [
            (document, *window)
            for document, length in enumerate(lengths.tolist())
            for window in windows(length, max_length, stride, has_prefix=prefix is not None)
        ],
        np.int64,
    ).reshape(-1, 4)
    widths = table[:, 2] - table[:, 1] - 1
    order = np.argsort(-widths, kind="stable")
    # 3) Yield batches; the first window of a batch is the longest and sets the width.
    done = 0
    while done < len(order):
        width = int(widths[order[done]])
        rows = order[done : done + max(1, batch_tokens // width)]
        yield _create_batch(text, origins, table[rows], width)
        done += len(rows)


def _create_batch(text: Tokens, origins: Tokens, table: NDArray[np.int64], width: int) -> WindowBatch:
    """Create one batch from the windows in `table`.

    The input of a window is its tokens without the last one, padded with 0. Each token from position `first`
    on is a target token; the batch has the document and the position of each.

    Args:
        text: all documents, concatenated.
        origins: index of token 0 of each document in `text`.
        table: one row (document, start, stop, first) for each window, int64.
        width: length of the longest input, stop - start - 1.
    """
    document, start, stop, first = table.T
    column = np.arange(width)
    inside = column < (stop - start - 1)[:, None]
    source = origins[document, None] + start[:, None] + column
    input_ids = np.where(inside, text[np.where(inside, source, 0)], 0)
    # The token at position p is predicted in the column of position p - 1.
    predicts = inside & (column >= (first - start - 1)[:, None])
    row, at_column = np.nonzero(predicts)
    positions = start[row] + at_column + 1
    documents = document[row]
    return WindowBatch(
        input_ids=input_ids,
        at=np.flatnonzero(predicts),
        documents=documents,
        positions=positions,
        gold=text[origins[documents] + positions],
    )


def prefix_of(tokenizer: Any) -> int | None:
    """Return the id of the tokenizer's BOS token, else of its EOS token, else None."""
    candidates = (getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id"))
    return next((int(token) for token in candidates if token is not None), None)


def max_length_of(config: Any) -> int:
    """Return the largest number of input tokens of a model, from its transformers configuration.

    Raises:
        ConfigError: the configuration has no limit, as for a model without position embeddings.
    """
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:  # -1 means no limit
            return limit
    raise ConfigError(f"{text_config.model_type}: the model names no longest input; give max_length")


def check_window(max_length: int, stride: int) -> None:
    """Check that the size of windows, and the distance between their ends, are possible.

    Raises:
        ConfigError: `max_length` is below 2, so that a window predicts nothing; or `stride` is not between 1
            and ``max_length - 1``.
    """
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, got {max_length}")
    if not 1 <= stride < max_length:
        raise ConfigError(f"stride must be between 1 and max_length - 1 = {max_length - 1}, got {stride}")


BATCH_TOKENS = 4_096
"""Default number of tokens in one forward pass, padding included."""
