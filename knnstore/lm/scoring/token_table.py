"""What an evaluation says about every single token."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.documents import TextDocument
from knnstore.errors import ConfigError
from knnstore.lm.reading import TokenTexts, tokenized
from knnstore.lm.scoring.scores import TokenScores

COLUMNS = (
    "document", "position", "token", "text", "p_lm", "p_knn", "lambda", "p", "distance", "frequency",
)  # fmt: skip
"""``position`` counts a document's tokens from 0, ``token`` is the token's id, ``text`` what it adds to the
document's text (empty inside a character; its last token has all of it), ``distance`` that of the nearest
neighbor, null where there is none, ``frequency`` how often the token was stored."""


class TokenTable:
    """Collects a row for every evaluated token; 48 bytes each until it is written."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._documents: Sequence[TextDocument] = ()
        self._counts = np.zeros(0, np.int64)

    def add(self, scores: TokenScores, p_knn: Tensor, lam: Tensor, log_p: Tensor) -> None:
        """Take in n tokens, with p_kNN, λ and log p of the mixture of each, shape (n,)."""
        columns = (scores.lm_log_probs.exp(), p_knn, lam, log_p.exp(), scores.evidence.distances.amin(1))
        tensors = (column.numpy() for column in columns)
        self._parts.append((scores.documents, scores.positions, scores.targets.numpy(), *tensors))

    def name(self, documents: Sequence[TextDocument], counts: NDArray[np.int64]) -> None:
        """Say what documents the scores count, and how often each token of the vocabulary was stored."""
        self._documents, self._counts = documents, counts

    def rows(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
        """Yield a value for each of `COLUMNS`, in the order of the text."""
        if not self._parts:
            return
        columns = [np.concatenate(column) for column in zip(*self._parts, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        texts = self._texts(tokenizer, *(column[order] for column in columns[:3]))
        for at, text in zip(order.tolist(), texts, strict=True):
            document, position, token, *numbers = (column[at].item() for column in columns)
            numbers[-1] = numbers[-1] if np.isfinite(numbers[-1]) else None
            name, frequency = self._documents[document].id, int(self._counts[token])
            values = (name, position, token, text, *numbers, frequency)
            yield dict(zip(COLUMNS, values, strict=True))

    def _texts(
        self,
        tokenizer: PreTrainedTokenizerBase,
        documents: NDArray[Any],
        positions: NDArray[Any],
        tokens: NDArray[Any],
    ) -> Iterator[str]:
        """Yield the text of each token, in order; the texts of a document's tokens add up to its text."""
        texts = TokenTexts(tokenizer)
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            before: list[int] = []
            if positions[start]:  # without a token that begins a text the first one is not predicted
                text = self._documents[documents[start]].text
                before = tokenized(tokenizer, [text])[0].tolist()
            yield from texts.pieces(tokens[start:end].tolist(), before[: positions[start]])

    def to_pandas(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """All rows as a DataFrame of pandas, with the columns `COLUMNS`."""
        return table_of(list(self.rows(tokenizer)))

    def write(self, file: TextIO, tokenizer: PreTrainedTokenizerBase, *, as_json: bool) -> None:
        """Write all rows.

        Args:
            file: opened for writing text.
            tokenizer: the model's.
            as_json: JSON Lines; else tab-separated values under a heading, texts as JSON strings.
        """
        if not as_json:
            file.write("\t".join(COLUMNS) + "\n")
        for row in self.rows(tokenizer):
            values = [row] if as_json else row.values()
            file.write("\t".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n")


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a DataFrame.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas  # of whoever asks for it
    except ImportError as error:
        raise ConfigError("to_pandas needs pandas. Install it with: pip install pandas") from error
    return pandas.DataFrame.from_records(rows)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Open a new file that takes the place of another at the end, unless an error comes before.

    Args:
        path: of the file to be replaced, which need not exist; a device or a pipe is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    target = path.resolve()  # a link stays one
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
