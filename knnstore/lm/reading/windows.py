"""Documents cut into windows, and windows packed into batches: the same for storing and for scoring.

Each document stands alone. A prefix (the tokenizer's BOS or EOS token) takes position -1 before its
tokens 0, 1, ..., so that even the first token is predicted from something. With ``max_length=6``
and ``stride=3`` a prefixed document of 10 tokens has three windows::

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
    """A stretch of one document that goes through the model at once, in the document's positions."""

    start: int
    """First position of the window; -1 is the prefix."""

    stop: int
    """One past the last position."""

    first: int
    """First position predicted; the window predicts ``first .. stop - 1``."""


def windows(length: int, max_length: int, stride: int, *, has_prefix: bool) -> Iterator[Window]:
    """Cut one document into windows that predict every token exactly once.

    Args:
        length: tokens of the document, without the prefix, >= 0.
        max_length: tokens of a window, the prefix counted, >= 2.
        stride: by how much a window's end moves on, 1 <= stride < max_length.
        has_prefix: whether a prefix precedes the document; without one its first token is
            context only, since nothing comes before it.

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
    """Windows that go through the model together, and where to read their predictions.

    Short rows are padded on the right and no attention mask is needed: in a causal model a
    position sees only what is before it, and the padding is after everything that is read.
    A window's last token is not in its row, for nothing is predicted from it.
    """

    input_ids: NDArray[np.int64]
    """Shape (rows, width), padded with token 0."""

    at: Tokens
    """Shape (n,): indices into ``input_ids.reshape(-1)`` of the positions that predict; the four
    arrays of shape (n,) are aligned."""

    documents: Tokens
    """Shape (n,): index of the document whose token is predicted, in the order given to `pack`."""

    positions: Tokens
    """Shape (n,): position of the predicted token in its document, 0 is the first token."""

    gold: Tokens
    """Shape (n,): the predicted token itself."""


def pack(
    documents: Sequence[NDArray[np.integer[Any]]],
    *,
    prefix: int | None,
    max_length: int,
    stride: int,
    batch_tokens: int,
) -> Iterator[WindowBatch]:
    """Group the windows of many documents into batches of rows of similar length.

    The longest come first, so that too large a batch fails at the start and not after an hour. Where a
    document has several windows all are of the same length, so they stay together and in order. A batch has
    at most `batch_tokens`, padding counted; a window longer than that is a batch of its own.

    Yields:
        Batches that together predict every token of every document once (without a prefix, every
        token but the first).

    Raises:
        ConfigError: max_length, stride or batch_tokens is out of range.
    """
    check_window(max_length, stride)
    if batch_tokens < 1:
        raise ConfigError(f"batch_tokens must be at least 1, got {batch_tokens}")
    before = [] if prefix is None else [np.array([prefix], np.int64)]
    pieces = [piece for document in documents for piece in (*before, np.asarray(document, np.int64))]
    text = np.concatenate([np.zeros(0, np.int64), *pieces])
    lengths = np.array([len(document) for document in documents], np.int64)
    # Where token 0 of each document stands in `text`.
    origins = np.cumsum(lengths + len(before)) - lengths
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
    done = 0
    while done < len(order):
        width = int(widths[order[done]])
        rows = order[done : done + max(1, batch_tokens // width)]
        yield _batch(text, origins, table[rows], width)
        done += len(rows)


def _batch(text: Tokens, origins: Tokens, table: NDArray[np.int64], width: int) -> WindowBatch:
    """Build the batch of the windows in `table`: rows of (document, start, stop, first)."""
    document, start, stop, first = table.T
    column = np.arange(width)
    inside = column < (stop - start - 1)[:, None]
    source = origins[document, None] + start[:, None] + column
    input_ids = np.where(inside, text[np.where(inside, source, 0)], 0)
    # The token at position p is predicted one column before its own.
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
    """Return the token id that precedes every document: the tokenizer's BOS, else its EOS, else None."""
    candidates = (getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id"))
    return next((int(token) for token in candidates if token is not None), None)


def max_length_of(config: Any) -> int:
    """Return the longest input that a model takes, in tokens, from its transformers configuration.

    Raises:
        ConfigError: the configuration names no limit (a model without position embeddings).
    """
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:  # -1 says that there is none
            return limit
    raise ConfigError(f"{text_config.model_type}: the model names no longest input; give max_length")


def check_window(max_length: int, stride: int) -> None:
    """Refuse windows that hold nothing to predict, or that would leave tokens out."""
    if max_length < 2:
        raise ConfigError(f"max_length must be at least 2, got {max_length}")
    if not 1 <= stride < max_length:
        raise ConfigError(f"stride must be between 1 and max_length - 1 = {max_length - 1}, got {stride}")


BATCH_TOKENS = 4_096
"""Tokens in one forward pass, padding included."""
