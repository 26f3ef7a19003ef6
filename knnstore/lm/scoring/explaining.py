"""Why a token is likely: the two models' probabilities and the places that retrieval found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Ids, tokens_of
from knnstore.lm.reading import Encoder, prefix_of
from knnstore.lm.scoring.held_out import score_texts
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import KNNStore

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
    distance: float
    """Squared for l2, the negated inner product for ip."""
    document: str
    domain: str
    """`THIS_TEXT` and empty where the explained text itself is the source, by the continuous cache."""
    position: int
    """Index of the token in the document."""
    context: str
    """What stands before it there."""
    continuation: str
    """What stands after it there."""


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
    """The nearest records, nearest first; with a continuous cache those of the largest shares."""
    p_sub: float | None = None
    """Of the substitute; None where the settings have none."""


def explain_tokens(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    tokens: NDArray[np.integer[Any]],
    settings: KNNSettings,
    *,
    neighbors: int = 8,
    start: int = 0,
) -> list[TokenExplanation]:
    """Explain the tokens of a text, each predicted from those before it.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        tokens: the text, shape (n,).
        settings: k, temperature, mixer, selection and cache.
        neighbors: how many sources to name for each token.
        start: the first position to explain.

    Returns:
        An entry for each predicted token from `start` on, in order.
    """
    explained: dict[int, TokenExplanation] = {}
    heads = Heads(store, encoder.model.device)
    for scores in score_texts(store, encoder, [tokens], prefix_of(tokenizer), settings):
        weighed = settings.weigh(scores.retrieved())
        p_knn = weighed.knn_probs(scores.gold)
        lam = weighed.lam.where(weighed.weights.sum(1) > 0, 0.0)
        model = heads.mix_gold(settings.substitute, scores.lm_log_probs, scores.keys, scores.gold)
        p = weighed.mixed_gold(model, p_knn).exp()
        p_sub = None
        if settings.substitute is not None:
            p_sub = heads(settings.substitute).gold_log_probs(scores.keys, scores.gold).exp()
        for row, position in enumerate(scores.positions.tolist()):
            if position < start:
                continue
            token, weights = int(scores.gold[row]), weighed.weights[row]
            nearest = scores.distances[row].sort(stable=True).indices[:neighbors]
            sources = _stored(
                store,
                tokenizer,
                scores.ids[row, nearest.numpy()],
                scores.distances[row, nearest].tolist(),
                weights[nearest].tolist(),
            )
            if scores.recent is not None:
                shares = weights[scores.ids.shape[1] :]
                here = _here(tokenizer, tokens, position, scores.recent.distances[row], shares, neighbors)
                sources = sorted([*sources, *here], key=lambda source: -source.share)[:neighbors]
            explained[position] = TokenExplanation(
                position=position,
                token=token,
                text=_text(tokenizer, [token]),
                p_lm=float(scores.lm_log_probs[row].exp()),
                p_knn=float(p_knn[row]),
                lam=float(lam[row]),
                p=float(p[row]),
                neighbors=tuple(sources),
                p_sub=None if p_sub is None else float(p_sub[row]),
            )
    return [explained[position] for position in sorted(explained)]


def _stored(
    store: KNNStore,
    tokenizer: PreTrainedTokenizerBase,
    ids: Ids,
    distances: Sequence[float],
    shares: Sequence[float],
) -> list[Source]:
    """Name records of the store."""
    traced = zip(store.provenance(ids), tokens_of(ids).tolist(), distances, shares, strict=True)
    return [
        Source(
            token=token,
            text=_text(tokenizer, [token]),
            share=share,
            distance=distance,
            document=place.document,
            domain=place.domain,
            position=place.position,
            context=_text(tokenizer, place.context.tolist()),
            continuation=_text(tokenizer, place.continuation.tolist()),
        )
        for place, token, distance, share in traced
        if place is not None
    ]


def _here(
    tokenizer: PreTrainedTokenizerBase,
    tokens: NDArray[np.integer[Any]],
    position: int,
    distances: Tensor,
    shares: Tensor,
    count: int,
) -> list[Source]:
    """Name the places of the text itself that have most of one token's p_kNN.

    Args:
        tokenizer: the model's.
        tokens: the text.
        position: of the token.
        distances: to the places before it, shape (m,), the last is its neighbour.
        shares: of p_kNN, shape (m,).
        count: how many to name.
    """
    named = []
    for column in shares.sort(descending=True, stable=True).indices[:count].tolist():
        at = position - len(shares) + column
        if distances[column].isfinite():
            named.append(
                Source(
                    token=int(tokens[at]),
                    text=_text(tokenizer, [int(tokens[at])]),
                    share=float(shares[column]),
                    distance=float(distances[column]),
                    document=THIS_TEXT,
                    domain="",
                    position=at,
                    context=_text(tokenizer, tokens[max(0, at - _BEFORE) : at].tolist()),
                    continuation=_text(tokenizer, tokens[at + 1 : min(at + 1 + _AFTER, position)].tolist()),
                )
            )
    return named


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
