"""Cutting documents into windows, and packing windows into batches; used for adding and for scoring.

No context is shared between documents. A prefix (the tokenizer's BOS or EOS token) has position -1, before
the tokens 0, 1, ..., so that the model can predict the first token as well. A decoder that reads a source may
have a prefix of several tokens, whose last one has position -1. With ``max_length=6`` and ``stride=3`` a
document of 10 tokens with a prefix of one token has three windows::

    position   -1  0  1  2  3  4  5  6  7  8  9
    window 1   [B  *  *  *  *  *]                     B the prefix, context only
    window 2            [.  .  .  *  *  *]            . context only
    window 3                  [.  .  .  .  *  *]      * predicted here

Every token is predicted once. A token that is predicted in a later window than the first has at least
``max_length - stride`` tokens of context. The model processes every window of a pair (a text with its source)
together with the whole source.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import ConfigError

Tokens = NDArray[np.int64]
"""Token ids or positions, shape (n,)."""


class Window(NamedTuple):
    """Consecutive positions of one document that the model processes in one row."""

    start: int
    """First position of the window; negative positions are in the prefix."""

    stop: int
    """One past the last position."""

    first: int
    """First position whose token is predicted; the window predicts ``first .. stop - 1``."""


def cut_windows(length: int, max_length: int, stride: int, *, prefix_length: int) -> Iterator[Window]:
    """Cut one document into windows that predict every token exactly once.

    A document without target tokens gives no windows.

    Args:
        length: number of tokens in the document, without the prefix, >= 0.
        max_length: largest number of tokens in a window, the prefix included, >= 2.
        stride: number of tokens between the ends of two windows, 1 <= stride < max_length.
        prefix_length: number of tokens in the prefix of the document. With 0 the first token is not
            predicted, because it has no context.

    Raises:
        ConfigError: `max_length` or `stride` is out of range, or the prefix fills a window.

    Example:
        Each window is (start, stop, first predicted token).

        >>> [tuple(window) for window in windows(10, 6, 3, prefix_length=1)]
        [(-1, 5, 0), (2, 8, 5), (4, 10, 8)]
    """
    check_window(max_length, stride)
    if prefix_length >= max_length:
        raise ConfigError(
            f"max_length is {max_length}, but {prefix_length} tokens precede every document: give a larger "
            "max_length"
        )
    origin = -prefix_length
    first, stop = 0 if prefix_length else 1, min(origin + max_length, length)
    while first < length:
        yield Window(max(origin, stop - max_length), stop, first)
        first, stop = stop, min(stop + stride, length)


class SourceBatch(NamedTuple):
    """The sources of the rows of a batch: the texts that the encoder of an encoder-decoder model reads."""

    input_ids: NDArray[np.int64]
    """Token ids, int64, shape (rows, width), padded on the right with token 0."""
    attention_mask: NDArray[np.int64]
    """1 at tokens and 0 at padding, int64, shape (rows, width)."""

    @classmethod
    def from_rows(cls, rows: Sequence[NDArray[np.integer[Any]]]) -> "SourceBatch":
        """Pad the token ids of at least one source, shapes (n_i,), to the same length."""
        lengths = np.array([len(row) for row in rows])
        mask = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.zeros(mask.shape, np.int64)
        input_ids[mask] = np.concatenate(rows)
        return cls(input_ids, mask.astype(np.int64))


@dataclass(frozen=True, slots=True)
class WindowBatch:
    """Windows that the model processes together, and the positions of their predictions.

    Short rows are padded on the right. No attention mask is needed, because a position attends only to
    earlier positions of its text, and padding comes last. A row does not contain the last token of its
    window, because no token is predicted from this token.
    """

    input_ids: NDArray[np.int64]
    """Token ids, int64, shape (rows, width), padded with token 0."""

    at: Tokens
    """Indices into ``input_ids.reshape(-1)`` of the positions at which a token is predicted, shape (n,).

    The arrays `at`, `documents`, `positions` and `gold` are aligned.
    """

    documents: Tokens
    """For each of the n predicted tokens, the index of its document in the argument `documents` of
    `pack_windows`, shape (n,)."""

    positions: Tokens
    """Position of the target token in its document, 0 for the first token, shape (n,)."""

    gold: Tokens
    """The target tokens, shape (n,)."""

    source: SourceBatch | None = None
    """The source of each row; None for a model that reads no source."""


def pack_windows(
    documents: Sequence[NDArray[np.integer[Any]]],
    *,
    prefix: Sequence[int],
    max_length: int,
    stride: int,
    batch_tokens: int,
    sources: Sequence[NDArray[np.integer[Any]]] | None = None,
) -> Iterator[WindowBatch]:
    """Cut documents into windows, and group the windows into batches of rows of similar length.

    A window is a part of a document that the model processes in one row.

    The longest windows come first, so that a batch that is too large for the memory fails at the start. All
    windows of a document with several windows have the same length, so they stay adjacent and in order.

    Args:
        documents: token ids of each document, shapes (n_i,).
        prefix: the tokens that precede every document; empty for no prefix.
        max_length: largest number of tokens in a window, the prefix included.
        stride: number of tokens between the ends of two windows.
        batch_tokens: largest number of tokens in the windows of a batch, padding included, and also in the
            sources of a batch. A window that is longer is a batch of its own.
        sources: token ids of the source of each document, shapes (m_i,), m_i >= 1; None for a model that
            reads no source.

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
    before = np.array(prefix, np.int64)
    pieces = [piece for document in documents for piece in (before, np.asarray(document, np.int64))]
    text = np.concatenate([np.zeros(0, np.int64), *pieces])
    lengths = np.array([len(document) for document in documents], np.int64)
    # Index of token 0 of each document in `text`.
    origins = np.cumsum(lengths + len(before)) - lengths
    # 2) Cut the documents into windows, and sort these by length, longest first. A window with a longer
    # source counts as long as the source.
    table = np.array(
        [
            (document, *window)
            for document, length in enumerate(lengths.tolist())
            for window in cut_windows(length, max_length, stride, prefix_length=len(prefix))
        ],
        np.int64,
    ).reshape(-1, 4)
    widths = table[:, 2] - table[:, 1] - 1
    sizes = widths
    if sources is not None:
        sizes = np.maximum(widths, np.array([len(source) for source in sources], np.int64)[table[:, 0]])
    order = np.argsort(-sizes, kind="stable")
    # 3) Yield batches; the first window of a batch is the longest and sets the number of rows.
    done = 0
    while done < len(order):
        rows = order[done : done + max(1, batch_tokens // int(sizes[order[done]]))]
        batch = _create_batch(text, origins, table[rows], int(widths[rows].max()))
        if sources is not None:
            batch = replace(batch, source=SourceBatch.from_rows([sources[i] for i in table[rows, 0]]))
        yield batch
        done += len(rows)


def _create_batch(text: Tokens, origins: Tokens, table: NDArray[np.int64], width: int) -> WindowBatch:
    """Create one batch from the windows in `table`.

    The input of a window is its tokens without the last one, padded with 0. The tokens from position `first`
    on are its target tokens.

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


def prefix_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that precede every document of a causal model.

    This is one token: the tokenizer's BOS token or, if it has none, its EOS token. If the tokenizer has
    neither, the result is empty.
    """
    candidates = (getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id"))
    return next(((int(token),) for token in candidates if token is not None), ())


def find_decoder_prefix(model: Any) -> tuple[int, ...]:
    """Return the tokens with which the decoder of a model begins every text; see `get_decoder_prefix`."""
    return get_decoder_prefix(model.generation_config, type(model).__name__)


def get_decoder_prefix(config: Any, name: str) -> tuple[int, ...]:
    """Return the tokens with which the decoder of an encoder-decoder model begins every text.

    The first is the token that starts the decoder. If the configuration has ``forced_bos_token_id``, the
    second is this token, which `generate` always generates first, such as the language of a multilingual
    model's answer.

    Args:
        config: the model's generation configuration.
        name: the model's name, for the message.

    Raises:
        ConfigError: the generation configuration names no single token that starts the decoder.
    """
    start = config.decoder_start_token_id
    if start is None:
        start = config.bos_token_id
    if not isinstance(start, int):
        raise ConfigError(
            f"{name}: decoder_start_token_id of the generation configuration is {start}, but it must be the "
            "one token with which every text begins"
        )
    forced = config.forced_bos_token_id
    return (start,) if forced is None else (start, int(forced))


def read_max_length(config: Any) -> int:
    """Return the largest number of input tokens of a model, from its transformers configuration.

    Raises:
        ConfigError: the configuration has no limit, as for a model without position embeddings.
    """
    text_config = config.get_text_config()
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:  # -1 means no limit
            return limit
    raise ConfigError(
        f"{text_config.model_type}: the configuration gives no maximum length of the input: give max_length"
    )


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
