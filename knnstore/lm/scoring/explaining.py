"""Why a token is likely: the two models' probabilities and the places that retrieval found."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import record_ids
from knnstore.lm.reading import TextReader
from knnstore.lm.retrieval import ReadNGrams, mixture_of
from knnstore.lm.scoring.held_out import score_texts
from knnstore.lm.settings import KNNSettings, ReadingModel, completed
from knnstore.lm.substitute import Heads
from knnstore.store import Provenance, Reader

THIS_TEXT = "(this text)"
"""Stands for a document where a token was found in the explained text itself."""

_BEFORE, _AFTER = 16, 8  # tokens of context, as the store gives


@dataclass(frozen=True, slots=True)
class Source:
    """One retrieved record."""

    token: int
    """The token that it predicts."""
    text: str
    share: float
    """Its part of p_kNN, between 0 and 1."""
    distance: float | None
    """Squared for l2, the negated inner product for ip; None where an n-gram was found, by its tokens."""
    document: str
    domain: str
    """`THIS_TEXT` and empty where the explained text itself is the source, by the continuous cache."""
    position: int
    """Index of the token in the document."""
    context: str
    """What stands before it there."""
    continuation: str
    """What stands after it there."""
    matched: int = 0
    """Tokens of the context that an n-gram has before it there; the beginning of a document is one."""


@dataclass(frozen=True, slots=True)
class TokenExplanation:
    """One token of a text, and where its probability comes from."""

    position: int
    token: int
    text: str
    p_lm: float
    p_knn: float
    lam: float
    """λ in force for this token; 0 when nothing was retrieved."""
    p: float
    """The mixture."""
    neighbors: tuple[Source, ...]
    """The nearest records, nearest first; with a continuous cache or n-grams those of the largest shares. Of
    n-grams there are places of the token itself alone."""
    shares: Mapping[str, float]
    """What weight each component of the mixture has here, by name; with that of the ``model``, below which a
    substitute is, they sum to 1."""
    p_sub: float | None = None
    """Of the substitute; None where the settings have none."""


def explain(
    lm: ReadingModel, text: str, knn: KNNSettings | None = None, *, neighbors: int = 8, after: str = ""
) -> list[TokenExplanation]:
    """Say for each token of a text how likely both models find it, and why.

    Args:
        lm: the model.
        text: the text to explain.
        knn: settings of this call; default ``lm.knn``.
        neighbors: how many sources to name for each token.
        after: a text that comes before and is not explained, e.g. the prompt.

    Returns:
        An entry for each predicted token, in order.
    """
    reader = lm.reader
    start = len(reader.tokens(after))
    return explain_tokens(lm, reader.tokens(after + text), knn, neighbors=neighbors, start=start)


def explain_tokens(
    lm: ReadingModel,
    tokens: NDArray[np.uint32],
    knn: KNNSettings | None = None,
    *,
    neighbors: int = 8,
    start: int = 0,
) -> list[TokenExplanation]:
    """Do what `explain` does for a text given by its tokens, shape (n,), from one of them on."""
    settings, store, reader = completed(lm.store, knn or lm.knn), lm.store, lm.reader
    explained: dict[int, TokenExplanation] = {}
    heads = Heads(store, reader.encoder.model.device)
    ngrams = ReadNGrams.of(store, [tokens], settings)
    for scores in score_texts(store, reader, [tokens], settings, apart=True):
        mixture = mixture_of(settings, scores.retrieved())
        p_knn, weights = mixture.knn_probs(scores.gold), mixture.weights_in(0)
        below = heads.mix_gold(settings.substitute, scores.lm_log_probs, scores.keys, scores.gold)
        p, p_sub = mixture.gold(below, scores.gold).exp(), None
        if settings.substitute is not None:
            p_sub = heads(settings.substitute).gold_log_probs(scores.keys, scores.gold).exp()
        for row, position in enumerate(scores.positions.tolist()):
            if position < start:
                continue
            token = int(scores.gold[row])
            nearest = scores.distances[row].sort(stable=True).indices[:neighbors]
            traced = zip(
                store.provenance(scores.ids[row, nearest.numpy()]),
                scores.distances[row, nearest].tolist(),
                weights[row, nearest].tolist(),
                strict=True,
            )
            sources = [_source(reader, place, *rest) for place, *rest in traced if place is not None]
            if ngrams is not None:
                share = float(mixture.share_in(1)[row])
                sources += _places_of(store, reader, ngrams, position, token, share, neighbors)
            if scores.recent is not None:
                shares = mixture.weights_in(len(mixture.components) - 1)[row]
                here = _here(tokens, position, scores.recent.distances[row], shares, neighbors)
                sources += [_source(reader, *found) for found in here]
            if settings.needs_text:
                sources = sorted(sources, key=lambda source: -source.share)[:neighbors]
            explained[position] = TokenExplanation(
                position=position,
                token=token,
                text=reader.text([token]),
                p_lm=float(scores.lm_log_probs[row].exp()),
                p_knn=float(p_knn[row]),
                lam=float(mixture.lam[row]),
                p=float(p[row]),
                neighbors=tuple(sources),
                shares=mixture.shares_at(row),
                p_sub=None if p_sub is None else float(p_sub[row]),
            )
    return [explained[position] for position in sorted(explained)]


def _places_of(
    store: Reader, reader: TextReader, ngrams: ReadNGrams, position: int, token: int, share: float, count: int
) -> list[Source]:
    """The places where n-grams that end in one token were found, of which all of p_kNN is a share."""
    found = ngrams.occurrences(position, count)
    ids = record_ids(np.array([one.position for one in found], np.int64), np.full(len(found), token))
    return [
        replace(_source(reader, place, None, share * one.share), matched=one.matched)
        for place, one in zip(store.provenance(ids), found, strict=True)
        if place is not None
    ]


def _here(
    tokens: NDArray[np.uint32], position: int, distances: Tensor, shares: Tensor, count: int
) -> Iterator[tuple[Provenance, float, float]]:
    """Find the places of the text itself that have most of one token's p_kNN, as `_source` takes them.

    Distances and shares are of the places before it, shape (m,), the last is its neighbor.
    """
    for column in shares.sort(descending=True, stable=True).indices[:count].tolist():
        at = position - len(shares) + column
        if distances[column].isfinite():
            before = tokens[max(0, at - _BEFORE) : at]
            behind = tokens[at + 1 : min(at + 1 + _AFTER, position)]
            place = Provenance(THIS_TEXT, "", at, int(tokens[at]), before, behind)
            yield place, float(distances[column]), float(shares[column])


def _source(reader: TextReader, place: Provenance, distance: float | None, share: float) -> Source:
    return Source(
        token=place.token,
        text=reader.text([place.token]),
        share=share,
        distance=distance,
        document=place.document,
        domain=place.domain,
        position=place.position,
        context=reader.text(place.context.tolist()),
        continuation=reader.text(place.continuation.tolist()),
    )
