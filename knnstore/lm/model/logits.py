"""What retrieval makes of the logits of one forward pass."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Neighbors, tokens_of
from knnstore.errors import ConfigError
from knnstore.lm.mixing import Recent, Retrieved, entropy_of, mix
from knnstore.lm.retrieval import TextPass, reachable, retrieve_for_pass, search_some
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import KNNStore

_CHUNK_VALUES = 1 << 24
"""How many log-probabilities are mixed at once: 64 MiB of float32."""


class Positions(NamedTuple):
    """The positions of a forward pass that are predicted from, in any shape."""

    keys: Tensor
    """Shape (..., d)."""
    attended: Tensor
    """Whether a position is part of a text and not padding: bool, shape (...)."""
    recent: Recent | None
    """What each of them finds in its own text; None without a cache."""
    text_pass: TextPass | None
    """What pointers go by; None without them."""


def mix_logits(
    store: KNNStore, heads: Heads, logits: Tensor, positions: Positions, settings: KNNSettings
) -> Tensor:
    """Mix into a model's predictions what is retrieved.

    Args:
        store: where to search.
        heads: has the substitute that the settings name.
        logits: shape (..., v).
        positions: where they are, of the shape (...).
        settings: with anything to mix.

    Returns:
        log p of the mixture, float32, shape (..., v); the very `logits` when nothing was found.
    """
    keys, attended, recent, _ = positions
    queries = keys[attended].float().cpu().numpy()
    found = _found(store, logits, queries, positions, settings)
    is_found = bool(np.isfinite(found.distances).any()) or settings.substitute is not None
    if not len(queries) or not (is_found or (recent is not None and bool(recent.distances.isfinite().any()))):
        return logits
    distances, ids, log_weights = _spread(found, attended.flatten().to(logits.device), logits.shape[-1])
    flat_keys, flat_logits = keys.flatten(0, -2).to(logits.device), logits.flatten(0, -2)
    step = _rows_at_once(logits)
    parts = []
    for start in range(0, len(distances), step):
        at = slice(start, start + step)
        log_probs = flat_logits[at].float().log_softmax(-1)
        weighed = settings.weigh(
            Retrieved(
                distances[at],
                log_probs.amax(-1),
                tokens=ids[at],
                keys=flat_keys[at].float(),
                lm_entropy=entropy_of(log_probs),
                log_weights=None if log_weights is None else log_weights[at],
                recent=None if recent is None else recent.rows(at).to(logits.device),
            )
        )
        assert weighed.tokens is not None
        log_probs = heads.mix(settings.substitute, log_probs, flat_keys[at].float())
        parts.append(mix(log_probs, weighed.weights, weighed.tokens, weighed.lam))
    return torch.cat(parts).reshape(logits.shape)


def _found(
    store: KNNStore, logits: Tensor, queries: Keys, positions: Positions, settings: KNNSettings
) -> Neighbors:
    """The neighbours of the positions that are attended."""
    if not settings.retrieves:
        return Neighbors.nothing(len(queries), 1)
    k = reachable(store, settings.k, settings.selection, settings.mixer)
    settings = replace(settings, k=k)
    attended = positions.attended
    searched = np.ones(len(queries), bool)
    if settings.skip is not None:
        predicted = logits[attended.to(logits.device)]
        searched = settings.skip.searched_of(positions.keys[attended], predicted, _rows_at_once(logits))

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return search_some(
            store, queries[rows], searched[rows], settings.k, settings.selection, settings.mixer
        )

    if positions.text_pass is None:
        return search(np.arange(len(queries)))
    asked = attended.cpu().numpy()
    return retrieve_for_pass(store, queries, positions.text_pass, asked, settings, search)


def _spread(found: Neighbors, rows: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Distances, tokens and log weights of the neighbours, in the rows that were searched for.

    Args:
        found: of the rows that are True.
        rows: bool, shape (n,), on the device that the tensors are to be on.
        vocabulary: how many tokens the model knows.

    Returns:
        Each of shape (n, k).
    """
    tokens = np.where(found.ids >= 0, tokens_of(found.ids), 0)
    if tokens.max() >= vocabulary:
        raise ConfigError(
            f"the store holds token {tokens.max()}, the model's vocabulary has {vocabulary}; "
            "use the model that the store was made with"
        )
    distances = torch.full((len(rows), found.ids.shape[1]), torch.inf, device=rows.device)
    ids = torch.zeros(distances.shape, dtype=torch.long, device=rows.device)
    distances[rows] = torch.from_numpy(found.distances).to(rows.device)
    ids[rows] = torch.from_numpy(tokens).to(rows.device)
    if found.log_weights is None:
        return distances, ids, None
    log_weights = torch.zeros_like(distances)
    log_weights[rows] = torch.from_numpy(found.log_weights).to(rows.device)
    return distances, ids, log_weights


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _CHUNK_VALUES // logits.shape[-1])
