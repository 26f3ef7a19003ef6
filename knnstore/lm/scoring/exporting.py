"""What the store predicts for each token of a text, as a file of Parquet: for others to train on."""

from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from knnstore.documents import TextDocument, documents_of
from knnstore.errors import ConfigError
from knnstore.lm.mixture import mixture_of
from knnstore.lm.reading import in_chunks
from knnstore.lm.scoring.arrays import store_alone, weighed
from knnstore.lm.scoring.held_out import score_texts
from knnstore.lm.scoring.scores import TokenScores
from knnstore.lm.scoring.token_table import replacing
from knnstore.lm.settings import KNNSettings, ReadingModel
from knnstore.progress import Progress


def export(
    lm: ReadingModel,
    documents: Iterable[object],
    path: str | PathLike[str],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    progress: Progress | None = None,
) -> int:
    """Write what the store predicts for each token of some documents to a file of Parquet.

    Its columns are ``document``, ``position`` and ``token``, ``p_lm`` and ``p_knn`` (of that token),
    ``lambda``, the whole p_kNN as ``knn_tokens`` and ``knn_probs`` (the tokens that were retrieved, the
    likeliest first; others have none), and ``sources``: document, domain, position and share of the nearest.

    Args:
        lm: the model.
        documents: as in `add`.
        path: the file, replaced once the new one is whole.
        knn: settings of this call; default ``lm.knn``. Only the store's keys count.
        neighbors: how many sources to name for each token, >= 0.
        progress: is told of each batch.

    Returns:
        How many rows it has.

    Raises:
        ConfigError: pyarrow is not installed.
        InputError: a document cannot be used.
    """
    try:
        import pyarrow as pa  # an extra
        from pyarrow.parquet import ParquetWriter
    except ImportError as error:
        install = "pip install 'knnstore[parquet]'"
        raise ConfigError(f"Parquet needs pyarrow. Install it with: {install}") from error
    whole, number, text = pa.int64(), pa.float32(), pa.string()
    source = pa.struct([("document", text), ("domain", text), ("position", whole), ("share", number)])
    schema = pa.schema(
        [
            ("document", text), ("position", whole), ("token", pa.int32()), ("p_lm", number),
            ("p_knn", number), ("lambda", number), ("knn_tokens", pa.list_(pa.int32())),
            ("knn_probs", pa.list_(number)), ("sources", pa.list_(source)),
        ]
    )  # fmt: skip
    settings, shown, rows = store_alone(lm, knn), progress or Progress(), 0
    with replacing(Path(path)) as file, ParquetWriter(file.buffer, schema) as writer:
        for ahead in in_chunks(documents_of(documents)):
            texts = lm.reader.tokenized(ahead)
            for scores in score_texts(lm.store, lm.reader, texts, settings, with_sources=True):
                written = list(_rows(lm, scores, settings, ahead, neighbors))
                writer.write_table(pa.Table.from_pylist(written, schema))
                rows += len(written)
                shown.advance(len(written))
    return rows


def _rows(
    lm: ReadingModel,
    scores: TokenScores,
    settings: KNNSettings,
    documents: list[TextDocument],
    neighbors: int,
) -> Iterator[dict[str, Any]]:
    mixture = mixture_of(settings, scores.evidence)
    p_lm, p_knn = scores.lm_log_probs.exp().tolist(), mixture.knn_probs(scores.targets).tolist()
    ids, retrieved, _, weights = weighed(scores, settings)
    for row, position in enumerate(scores.positions.tolist()):
        there = ids[row] >= 0
        tokens, place = np.unique(retrieved[row][there], return_inverse=True)
        probs = np.bincount(place, weights[row][there], len(tokens))
        likeliest = np.argsort(-probs, kind="stable")
        nearest = np.flatnonzero(there)[:neighbors]
        yield {
            "document": documents[scores.documents[row]].id,
            "position": position,
            "token": int(scores.targets[row]),
            "p_lm": p_lm[row],
            "p_knn": p_knn[row],
            "lambda": float(mixture.lam[row]),
            "knn_tokens": tokens[likeliest],
            "knn_probs": probs[likeliest],
            "sources": [
                {"document": one.document, "domain": one.domain, "position": one.position, "share": share}
                for one, share in zip(
                    lm.store.provenance(ids[row, nearest]), weights[row, nearest].tolist(), strict=True
                )
                if one is not None
            ],
        }
