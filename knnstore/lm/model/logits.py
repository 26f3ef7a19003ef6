"""What retrieval makes of the logits of one forward pass."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Neighbors, tokens_of
from knnstore.errors import ConfigError
from knnstore.lm.mixing import Continuation, Retrieved, entropy_of
from knnstore.lm.model.passes import Positions
from knnstore.lm.retrieval import (
    WrittenNGrams,
    mixture_of,
    reachable,
    retrieve,
    retrieve_for_pass,
)
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 24
"""How many log-probabilities are mixed at once: 64 MiB of float32."""


def mix_logits(
    store: Reader, heads: Heads, logits: Tensor, positions: Positions, settings: KNNSettings
) -> Tensor:
    """Mix into a model's logits, shape (..., v), what is retrieved at their positions, shape (...).

    Returns:
        log p of the mixture, float32, shape (..., v); the very `logits` when nothing was found.
    """
    keys, attended, recent = positions.keys, positions.attended, positions.recent
    queries = keys[attended].float().cpu().numpy()
    found = _found(store, logits, queries, positions, settings)
    is_found = bool(np.isfinite(found.distances).any())
    is_found |= settings.substitute is not None or positions.ngrams is not None
    if not len(queries) or not (is_found or (recent is not None and bool(recent.distances.isfinite().any()))):
        return logits
    distances, tokens, log_weights = _spread(found, attended.flatten().to(logits.device), logits.shape[-1])
    flat_keys, flat_logits = keys.flatten(0, -2).to(logits.device), logits.flatten(0, -2)
    step = _rows_at_once(logits)
    parts = []
    for start in range(0, len(distances), step):
        at = slice(start, start + step)
        log_probs = flat_logits[at].float().log_softmax(-1)
        retrieved = Retrieved(
            distances[at],
            log_probs.amax(-1),
            tokens=tokens[at],
            keys=flat_keys[at].float(),
            lm_entropy=None if settings.mixer.needs_nearest_only else entropy_of(log_probs),
            log_weights=None if log_weights is None else log_weights[at],
            continuation=_continued(positions.ngrams, at, log_probs, settings),
            recent=None if recent is None else recent.rows(at).to(logits.device),
        )
        below = heads.mix(settings.substitute, log_probs, flat_keys[at].float())
        parts.append(mixture_of(settings, retrieved).distribution(below))
    return torch.cat(parts).reshape(logits.shape)


def _continued(
    ngrams: WrittenNGrams | None, rows: slice, log_probs: Tensor, settings: KNNSettings
) -> Continuation | None:
    """What n-grams say at some positions, where they are in use; nothing where nothing is counted."""
    if ngrams is not None:
        return ngrams.rows(rows, log_probs.shape[-1], log_probs.device)
    return None if settings.ngrams is None else Continuation.nothing(log_probs)


def _found(
    store: Reader, logits: Tensor, queries: Keys, positions: Positions, settings: KNNSettings
) -> Neighbors:
    """The neighbors of the positions that are attended."""
    k = reachable(store, settings)
    settings = settings if k == settings.k else replace(settings, k=k)
    attended = positions.attended
    searched = np.ones(len(queries), bool)
    if settings.skip is not None and settings.retrieves:
        predicted = logits[attended.to(logits.device)]
        searched = settings.skip.searched_of(positions.keys[attended], predicted, _rows_at_once(logits))

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return retrieve(store, queries[rows], settings, searched[rows])

    if positions.text_pass is None or not settings.retrieves:
        return search(np.arange(len(queries)))
    asked = attended.cpu().numpy()
    return retrieve_for_pass(store, queries, positions.text_pass, asked, settings, search)


def _spread(found: Neighbors, rows: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Distances, tokens and log weights of the neighbors, each of shape (n, k), on the device of `rows`.

    `found` are those of the rows that are True, of shape (n,); the others have none.
    """
    tokens = np.where(found.ids >= 0, tokens_of(found.ids), 0)
    if tokens.max() >= vocabulary:
        raise ConfigError(
            f"the store holds token {tokens.max()}, the model's vocabulary has {vocabulary}; "
            "use the model that the store was made with"
        )

    def spread(values: NDArray[Any], missing: float = 0) -> Tensor:
        given = torch.from_numpy(values).to(rows.device)
        if len(given) == len(rows):
            return given
        return given.new_full((len(rows), given.shape[1]), missing).index_put_((rows,), given)

    log_weights = None if found.log_weights is None else spread(found.log_weights)
    return spread(found.distances, torch.inf), spread(tokens), log_weights


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _CHUNK_VALUES // logits.shape[-1])
