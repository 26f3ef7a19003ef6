"""Predictions of the store alone for each token of a text, as arrays and as a Parquet file.

`compute_keys`, `find_neighbors` and `compute_p_knn` return arrays for one text; `export` writes a file for
many documents.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys
from knnstore.documents import TextDocument
from knnstore.errors import ConfigError
from knnstore.lm.mixture import build_mixture
from knnstore.lm.reading import chunk_documents
from knnstore.lm.scoring.token_scores import TokenScores, score_texts
from knnstore.lm.scoring.token_table import build_data_frame, replace_file
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve
from knnstore.progress import Progress


@dataclass(frozen=True, slots=True, repr=False)
class TextNeighbors:
    """The records that were retrieved for the n predicted tokens of a text, nearest first.

    The first token of a text is predicted only if the tokenizer has a BOS token.
    """

    positions: NDArray[np.int64]
    """Index of each token in the text, shape (n,), ascending."""
    tokens: NDArray[np.int64]
    """The predicted (target) tokens, shape (n,)."""
    ids: NDArray[np.int64]
    """Record ids, shape (n, m), -1 for a missing record; `lm.store.provenance` returns the documents of
    records."""
    retrieved: NDArray[np.int64]
    """Token that each record predicts, shape (n, m); -1 for a missing record."""
    distances: NDArray[np.float32]
    """Squared distances for l2, negated inner products for ip, shape (n, m); +inf for a missing record."""
    weights: NDArray[np.float32]
    """Probability of each record in p_kNN, shape (n, m). A row sums to 1, or is 0 if nothing was found."""

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each record that was retrieved for each token.

        The columns are ``position``, ``token``, ``rank`` (0 is the nearest record), ``ids``, ``retrieved``,
        ``distances`` and ``weights``.

        Raises:
            ConfigError: pandas is not installed.
        """
        rows, ranks = np.nonzero(self.ids >= 0)
        columns = {"position": self.positions[rows], "token": self.tokens[rows], "rank": ranks}
        for name in ("ids", "retrieved", "distances", "weights"):
            columns[name] = getattr(self, name)[rows, ranks]
        return build_data_frame(
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        )

    def __repr__(self) -> str:
        return f"TextNeighbors({len(self.tokens)} tokens, up to {self.ids.shape[1]} neighbors)"


def compute_keys(lm: ReadingModel, text: str) -> Keys:
    """Compute the key (hidden state of the model) from which each token of a text is predicted.

    Args:
        lm: the model.
        text: the text.

    Returns:
        Float32, shape (n, dim), in the order of the text; a search in the store uses the keys as query
        vectors. If the tokenizer has no BOS token, the first token has no key.
    """
    reader = lm.reader
    tokens = reader.tokenize(text)
    first = 0 if reader.prefix else 1
    rows = np.zeros((max(0, len(tokens) - first), lm.store.identity.dim), np.float32)
    for batch in reader.batch_windows([tokens]):
        rows[batch.positions - first] = reader.encoder.encode(batch.input_ids, batch.at).keys.cpu().numpy()
    return rows


def find_neighbors(lm: ReadingModel, text: str, knn: KNNSettings | None = None) -> TextNeighbors:
    """Search with the key of each token of a text, and return the retrieved records.

    Args:
        lm: the model.
        text: the text.
        knn: settings of this call; default ``lm.knn``. Settings with `probes` search that many cells (groups
            of records with near keys); then all records of these cells are returned.
    """
    settings, tokens = select_store_alone(lm, knn), lm.reader.tokenize(text)
    parts = list(score_texts(lm.store, lm.reader, [tokens], settings, with_record_ids=True))
    count = sum(map(len, parts))
    shape = (count, max((part.evidence.distances.shape[1] for part in parts), default=0))
    first = len(tokens) - count
    result = TextNeighbors(
        np.arange(first, len(tokens)),
        tokens[first:].astype(np.int64),
        np.full(shape, -1),
        np.full(shape, -1),
        np.full(shape, np.inf, np.float32),
        np.zeros(shape, np.float32),
    )
    for part in parts:
        ids, retrieved, distances, weights = rank_records(part, settings)
        places = (part.positions - first)[:, None], np.arange(ids.shape[1])
        result.ids[places], result.retrieved[places] = ids, retrieved
        result.distances[places], result.weights[places] = distances, weights
    return result


def compute_p_knn(lm: ReadingModel, text: str, knn: KNNSettings | None = None) -> NDArray[np.float32]:
    """Compute the distribution of the next token by the retrieved records (p_kNN), for each token of a text.

    Args:
        lm: the model.
        text: the text.
        knn: settings of this call; default ``lm.knn``.

    Returns:
        Float32, shape (n, vocabulary). A row sums to 1, or is 0 if nothing was found.
    """
    found = find_neighbors(lm, text, knn)
    probs = np.zeros((len(found.tokens), lm.store.identity.vocab_size), np.float32)
    rows, columns = np.nonzero(found.ids >= 0)
    np.add.at(probs, (rows, found.retrieved[rows, columns]), found.weights[rows, columns])
    return probs


def export(
    lm: ReadingModel,
    documents: Iterable[object],
    path: str | PathLike[str],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    progress: Progress | None = None,
) -> int:
    """Write the store's predictions for each token of documents to a Parquet file, e.g. to train on.

    The columns are:

    - ``document``, ``position`` and ``token``: the gold token;
    - ``p_lm``, ``p_knn`` and ``lambda``: its probabilities by the model and by the store, and the weight λ;
    - ``knn_tokens`` and ``knn_probs``: the distribution p_kNN, the most probable token first, without tokens
      of probability 0;
    - ``sources``: a list with the document, domain, position and share of each of the nearest records.

    Args:
        lm: the model.
        documents: the documents, in any form that `add` takes.
        path: the file; an existing file is replaced when the new one is complete.
        knn: settings of this call; default ``lm.knn``. Components other than the keys are ignored.
        neighbors: largest number of sources for each token, >= 0.
        progress: progress display, which receives the number of written rows; None for no display.

    Returns:
        The number of rows.

    Raises:
        ConfigError: pyarrow is not installed.
        InputError: a document cannot be used.
    """
    try:
        import pyarrow as pa  # an optional dependency
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        install = "pip install 'knnstore[parquet]'"
        raise ConfigError(f"Parquet needs pyarrow. Install it with: {install}") from error
    whole, number, text = pa.int64(), pa.float32(), pa.string()
    source = pa.struct([("document", text), ("domain", text), ("position", whole), ("share", number)])
    schema = pa.schema(
        [
            ("document", text),
            ("position", whole),
            ("token", pa.int32()),
            ("p_lm", number),
            ("p_knn", number),
            ("lambda", number),
            ("knn_tokens", pa.list_(pa.int32())),
            ("knn_probs", pa.list_(number)),
            ("sources", pa.list_(source)),
        ]
    )
    settings, bar, row_count = select_store_alone(lm, knn), progress or Progress(), 0
    with replace_file(Path(path)) as file, ParquetWriter(file.buffer, schema) as writer:
        for chunk in chunk_documents(lm.reader.document_tokenizer.read(documents)):
            texts, sources = lm.reader.tokenize_documents(chunk), lm.reader.tokenize_sources(chunk)
            for scores in score_texts(
                lm.store, lm.reader, texts, settings, sources=sources, with_record_ids=True
            ):
                rows = list(_export_rows(lm, scores, settings, chunk, neighbors))
                writer.write_table(pa.Table.from_pylist(rows, schema))
                row_count += len(rows)
                bar.advance(len(rows))
    return row_count


def _export_rows(
    lm: ReadingModel,
    scores: TokenScores,
    settings: KNNSettings,
    documents: list[TextDocument],
    neighbors: int,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each scored token, a dict with the columns of `export`.

    Args:
        lm: the model.
        scores: the scored tokens, with the retrieved records.
        settings: the settings with which the tokens were scored.
        documents: the documents that ``scores.documents`` has indices into.
        neighbors: largest number of sources in a row.
    """
    mixture = build_mixture(settings, scores.evidence)
    p_lm, p_knn = scores.lm_log_probs.exp().tolist(), mixture.knn_probs(scores.targets).tolist()
    ids, retrieved, _, weights = rank_records(scores, settings)
    for row, position in enumerate(scores.positions.tolist()):
        is_found = ids[row] >= 0
        tokens, columns = np.unique(retrieved[row][is_found], return_inverse=True)
        probs = np.bincount(columns, weights[row][is_found], len(tokens))
        order = np.argsort(-probs, kind="stable")
        nearest = np.flatnonzero(is_found)[:neighbors]
        yield {
            "document": documents[scores.documents[row]].id,
            "position": position,
            "token": int(scores.targets[row]),
            "p_lm": p_lm[row],
            "p_knn": p_knn[row],
            "lambda": float(mixture.lam[row]),
            "knn_tokens": tokens[order],
            "knn_probs": probs[order],
            "sources": [
                {
                    "document": place.document,
                    "domain": place.domain,
                    "position": place.position,
                    "share": share,
                }
                for place, share in zip(
                    lm.store.provenance(ids[row, nearest]), weights[row, nearest].tolist(), strict=True
                )
                if place is not None
            ],
        }


def select_store_alone(lm: ReadingModel, knn: KNNSettings | None) -> KNNSettings:
    """Return the settings in force, with the store's keys as the only component.

    Args:
        lm: the model.
        knn: settings of a call; None uses ``lm.knn``.
    """
    settings = resolve(lm.store, knn or lm.knn)
    return replace(settings, cache=None, ngrams=None, others={}, gate=None, unset=frozenset())


def rank_records(
    scores: TokenScores, settings: KNNSettings
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Return the records that were retrieved for n scored tokens, nearest first.

    Args:
        scores: the scored tokens, with the retrieved records.
        settings: the settings with which the tokens were scored.

    Returns:
        Four arrays of shape (n, m): record ids, their tokens, their distances, and their weights in p_kNN.
        Missing records have id and token -1 and weight 0.
    """
    distances, tokens = scores.evidence.distances.numpy(), scores.evidence.tokens
    assert tokens is not None
    weights = build_mixture(settings, scores.evidence).component_weights(0).numpy()
    order = np.argsort(distances, axis=1, kind="stable")
    columns = scores.evidence.ids, tokens.numpy(), distances, weights
    ids, *others = (np.take_along_axis(column, order, 1) for column in columns)
    return ids, np.where(ids >= 0, others[0], -1), others[1], np.where(ids >= 0, others[2], 0)
