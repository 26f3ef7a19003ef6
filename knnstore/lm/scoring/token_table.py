"""A table with one row for each evaluated token; and helpers for data frames and for replacing files."""

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
from knnstore.lm.reading import TokenTexts, tokenize_texts
from knnstore.lm.scoring.token_scores import TokenScores

COLUMNS = (
    "document",
    "position",
    "token",
    "text",
    "p_lm",
    "p_knn",
    "lambda",
    "p",
    "distance",
    "frequency",
)
"""Names of the columns.

- ``position``: index of the token in its document, from 0; ``token``: its id.
- ``text``: what the token adds to the document's text. The last token of a character has the whole character;
  the earlier tokens of the character have an empty text.
- ``distance``: distance to the nearest neighbor; null if none was found.
- ``frequency``: number of records with this token in the selection.
"""


class TokenTable:
    """Collects one row for every evaluated token, to write or return them as a table.

    A token takes 48 bytes until the table is written.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[NDArray[Any], ...]] = []
        self._documents: Sequence[TextDocument] = ()
        self._counts = np.zeros(0, np.int64)

    def add_scores(self, scores: TokenScores, p_knn: Tensor, lam: Tensor, log_p: Tensor) -> None:
        """Add the rows of n tokens.

        Args:
            scores: the tokens.
            p_knn: probability of each target token by all components together, without the model, shape (n,).
            lam: weight λ of all components together for each token, shape (n,).
            log_p: log-probability of each target token in the mixture, shape (n,).
        """
        columns = (scores.lm_log_probs.exp(), p_knn, lam, log_p.exp(), scores.evidence.distances.amin(1))
        tensors = (column.numpy() for column in columns)
        self._batches.append((scores.documents, scores.positions, scores.targets.numpy(), *tensors))

    def set_documents(self, documents: Sequence[TextDocument], counts: NDArray[np.int64]) -> None:
        """Set the documents and token counts, which the rows also contain; call it before the rows are read.

        Args:
            documents: the documents that `TokenScores.documents` has indices into.
            counts: number of records of each token of the vocabulary, shape (v,).
        """
        self._documents, self._counts = documents, counts

    def rows(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[dict[str, Any]]:
        """Yield one dict with the keys `COLUMNS` for each token, sorted by document and position.

        Args:
            tokenizer: the model's tokenizer.
        """
        if not self._batches:
            return
        columns = [np.concatenate(column) for column in zip(*self._batches, strict=True)]
        order = np.lexsort((columns[1], columns[0]))
        texts = self._decode_texts(tokenizer, *(column[order] for column in columns[:3]))
        for row, text in zip(order.tolist(), texts, strict=True):
            document, position, token, *numbers = (column[row].item() for column in columns)
            numbers[-1] = numbers[-1] if np.isfinite(numbers[-1]) else None
            name, frequency = self._documents[document].id, int(self._counts[token])
            values = (name, position, token, text, *numbers, frequency)
            yield dict(zip(COLUMNS, values, strict=True))

    def _decode_texts(
        self,
        tokenizer: PreTrainedTokenizerBase,
        documents: NDArray[Any],
        positions: NDArray[Any],
        tokens: NDArray[Any],
    ) -> Iterator[str]:
        """Yield the text that each token adds to the text of its document.

        Concatenated, the texts of a document's tokens are its text. The arrays have shape (n,) and are sorted
        by document and position.
        """
        texts = TokenTexts(tokenizer)
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            preceding: list[int] = []
            if positions[start]:  # the first token is not predicted if the tokenizer has no BOS token
                text = self._documents[documents[start]].text
                preceding = tokenize_texts(tokenizer, [text])[0].tolist()
            yield from texts.decode_pieces(tokens[start:end].tolist(), preceding[: positions[start]])

    def to_pandas(self, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Return all rows as a pandas DataFrame with the columns `COLUMNS`.

        Raises:
            ConfigError: pandas is not installed.
        """
        return build_data_frame(list(self.rows(tokenizer)))

    def write(self, file: TextIO, tokenizer: PreTrainedTokenizerBase, *, as_json: bool) -> None:
        """Write all rows to a file.

        Args:
            file: a text file that is open for writing.
            tokenizer: the model's tokenizer.
            as_json: True to write JSON Lines; False to write tab-separated values with a header, each value
                as JSON.
        """
        if not as_json:
            file.write("\t".join(COLUMNS) + "\n")
        for row in self.rows(tokenizer):
            values = [row] if as_json else row.values()
            file.write("\t".join(json.dumps(value, ensure_ascii=False) for value in values) + "\n")


def build_data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Convert rows to a pandas DataFrame with one column for each key of the rows.

    Args:
        rows: dicts with the same keys.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        import pandas  # not a dependency; installed by the user
    except ImportError as error:
        raise ConfigError("to_pandas needs pandas. Install it with: pip install pandas") from error
    return pandas.DataFrame.from_records(rows)


@contextmanager
def replace_file(path: Path) -> Iterator[TextIO]:
    """Replace a file by new content: a context manager that yields a temporary file to write to.

    When the context ends without an error, the temporary file replaces `path` in one step. After an error the
    temporary file is removed, and `path` is unchanged.

    Args:
        path: the file to replace; it need not exist. A device or a pipe is written to directly. A symbolic
            link is kept, and its target is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    target = path.resolve()
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
