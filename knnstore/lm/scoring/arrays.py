"""What retrieval finds for a text, as arrays: keys, neighbors, p_kNN."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knnstore.datastore import Keys
from knnstore.lm.mixture import mixture_of
from knnstore.lm.scoring.held_out import score_texts
from knnstore.lm.scoring.scores import TokenScores
from knnstore.lm.scoring.token_table import table_of
from knnstore.lm.settings import KNNSettings, ReadingModel, resolve


@dataclass(frozen=True, slots=True, repr=False)
class TextNeighbors:
    """The records that were retrieved for the n tokens of a text, nearest first.

    A text's first token is predicted only where the model's tokenizer has a token to begin with.
    """

    positions: NDArray[np.int64]
    """Of each token in the text, shape (n,), ascending."""
    tokens: NDArray[np.int64]
    """The text's own, shape (n,)."""
    ids: NDArray[np.int64]
    """Record ids, shape (n, m), -1 where fewer were found; `lm.store.provenance` says where they are from."""
    retrieved: NDArray[np.int64]
    """The token that each record predicts, shape (n, m), -1 where there is none."""
    distances: NDArray[np.float32]
    """Squared for l2, negated inner products for ip, shape (n, m), +inf where there is none."""
    weights: NDArray[np.float32]
    """What each has of p_kNN, shape (n, m); they sum to 1 where something was found."""

    def to_pandas(self) -> Any:
        """A DataFrame of pandas with a row for each record of each token."""
        rows, ranks = np.nonzero(self.ids >= 0)
        columns = {"position": self.positions[rows], "token": self.tokens[rows], "rank": ranks}
        for name in ("ids", "retrieved", "distances", "weights"):
            columns[name] = getattr(self, name)[rows, ranks]
        return table_of([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])

    def __repr__(self) -> str:
        return f"TextNeighbors({len(self.tokens)} tokens, up to {self.ids.shape[1]} neighbors)"


def keys(lm: ReadingModel, text: str) -> Keys:
    """The key from which each token of a text is predicted.

    Returns:
        Float32, shape (n, dim), in the order of the text: what a search among the store's records asks with.
    """
    reader = lm.reader
    tokens = reader.tokens(text)
    first = 0 if reader.prefix is not None else 1
    found = np.zeros((max(0, len(tokens) - first), lm.store.identity.dim), np.float32)
    for batch in reader.batches([tokens]):
        found[batch.positions - first] = reader.encoder.encode(batch.input_ids, batch.at).keys.cpu().numpy()
    return found


def neighbors(lm: ReadingModel, text: str, knn: KNNSettings | None = None) -> TextNeighbors:
    """The records that are retrieved for each token of a text, without continuous cache and n-grams.

    Args:
        lm: the model.
        text: the text.
        knn: settings of this call; default ``lm.knn``. With `probes` the records are all those of the cells
            that are visited.
    """
    settings, tokens = store_alone(lm, knn), lm.reader.tokens(text)
    parts = list(score_texts(lm.store, lm.reader, [tokens], settings, with_sources=True))
    count = sum(map(len, parts))
    shape, first = (
        (count, max((part.evidence.distances.shape[1] for part in parts), default=0)),
        len(tokens) - count,
    )
    found = TextNeighbors(
        np.arange(first, len(tokens)),
        tokens[first:].astype(np.int64),
        np.full(shape, -1),
        np.full(shape, -1),
        np.full(shape, np.inf, np.float32),
        np.zeros(shape, np.float32),
    )
    for part in parts:
        ids, retrieved, distances, weights = weighed(part, settings)
        at = (part.positions - first)[:, None], np.arange(ids.shape[1])
        found.ids[at], found.retrieved[at] = ids, retrieved
        found.distances[at], found.weights[at] = distances, weights
    return found


def p_knn(lm: ReadingModel, text: str, knn: KNNSettings | None = None) -> NDArray[np.float32]:
    """What the store alone predicts for each token of a text; the arguments are those of `neighbors`.

    Returns:
        Float32, shape (n, vocabulary); rows sum to 1, or are 0 where nothing was found.
    """
    found = neighbors(lm, text, knn)
    probs = np.zeros((len(found.tokens), lm.store.identity.vocab_size), np.float32)
    rows, columns = np.nonzero(found.ids >= 0)
    np.add.at(probs, (rows, found.retrieved[rows, columns]), found.weights[rows, columns])
    return probs


def store_alone(lm: ReadingModel, knn: KNNSettings | None) -> KNNSettings:
    """Return settings in which the store's keys are the only component."""
    settings = resolve(lm.store, knn or lm.knn)
    return replace(settings, cache=None, ngrams=None, others={}, gate=None, unset=frozenset())


def weighed(
    scores: TokenScores, settings: KNNSettings
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """Record ids, their tokens, distances and weights of some tokens, each of shape (n, m), nearest first."""
    distances, tokens = scores.evidence.distances.numpy(), scores.evidence.tokens
    assert tokens is not None
    weights = mixture_of(settings, scores.evidence).weights_in(0).numpy()
    order = np.argsort(distances, axis=1, kind="stable")
    columns = scores.evidence.ids, tokens.numpy(), distances, weights
    ids, *others = (np.take_along_axis(column, order, 1) for column in columns)
    return ids, np.where(ids >= 0, others[0], -1), others[1], np.where(ids >= 0, others[2], 0)
