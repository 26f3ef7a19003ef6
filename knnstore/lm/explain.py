"""Why a token is likely: the two models' probabilities and the places that retrieval found."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Ids
from knnstore.lm.encoder import Encoder
from knnstore.lm.interpolation import gold_knn_probs, mix_gold
from knnstore.lm.scoring import BATCH_TOKENS, score_batch
from knnstore.lm.settings import KNNSettings
from knnstore.lm.windows import pack, prefix_of
from knnstore.store import KNNStore, tokens_of


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
    """The nearest records, nearest first."""


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
        settings: k, temperature, mixer and selection.
        neighbors: how many sources to name for each token.
        start: the first position to explain.

    Returns:
        An entry for each predicted token from `start` on, in order.
    """
    explained: dict[int, TokenExplanation] = {}
    for batch in pack(
        [tokens],
        prefix=prefix_of(tokenizer),
        max_length=store.identity.max_length,
        stride=store.identity.stride,
        batch_tokens=BATCH_TOKENS,
    ):
        scores = score_batch(store, encoder, batch, settings.k, settings.selection)
        weights, lambdas, _ = settings.weigh(scores.retrieved())
        found = weights.sum(1) > 0
        p_knn = gold_knn_probs(weights, scores.tokens, scores.gold)
        lam = lambdas.where(found, 0.0)
        p = mix_gold(scores.lm_log_probs, p_knn, found, lam).exp()
        for row, position in enumerate(batch.positions.tolist()):
            if position < start:
                continue
            token = int(batch.gold[row])
            explained[position] = TokenExplanation(
                position=position,
                token=token,
                text=_text(tokenizer, [token]),
                p_lm=float(scores.lm_log_probs[row].exp()),
                p_knn=float(p_knn[row]),
                lam=float(lam[row]),
                p=float(p[row]),
                neighbors=_sources(
                    store,
                    tokenizer,
                    scores.ids[row, :neighbors],
                    scores.distances[row, :neighbors].tolist(),
                    weights[row, :neighbors].tolist(),
                ),
            )
    return [explained[position] for position in sorted(explained)]


def _sources(
    store: KNNStore,
    tokenizer: PreTrainedTokenizerBase,
    ids: Ids,
    distances: Sequence[float],
    shares: Sequence[float],
) -> tuple[Source, ...]:
    traced = zip(store.provenance(ids), tokens_of(ids).tolist(), distances, shares, strict=True)
    return tuple(
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
    )


def _text(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
