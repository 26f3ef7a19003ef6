"""What retrieval makes of the logits of one forward pass."""

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Neighbors, tokens_of
from knnstore.errors import ConfigError
from knnstore.lm.keys import keep_positions
from knnstore.lm.mixing import Continuation, Recent, Retrieved, entropy_of
from knnstore.lm.retrieval import (
    PointerStates,
    TextPass,
    WrittenNGrams,
    mixture_of,
    reachable,
    retrieve,
    retrieve_for_pass,
    sequence_ids_of,
)
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 24
"""How many log-probabilities are mixed at once: 64 MiB of float32."""


@dataclass
class Positions:
    """The positions of a forward pass that are predicted from, in any shape."""

    keys: Tensor
    """Shape (..., d)."""
    attended: Tensor
    """Whether a position is part of a text and not padding: bool, shape (...)."""
    all_keys: Tensor
    """Of every position of the pass, shape (b, t, d)."""
    kept: Tensor
    """Which of the b * t these are, int64, shape (...)."""
    mask: Tensor | None
    """0 for padding, shape (b, t); None where there is none."""
    recent: Recent | None = None
    """What each finds in its own text; None without a cache."""
    ngrams: WrittenNGrams | None = None
    """What n-grams are before each; None where none count."""
    text_pass: TextPass | None = None
    """What pointers go by; None without them."""

    @classmethod
    def of(cls, keys: Tensor, attention_mask: Tensor | None, logits_to_keep: int | Tensor) -> Self:
        """Choose from the keys of a pass, shape (b, t, d); the other arguments are those of `forward`."""
        batch, length = keys.shape[:2]
        at = torch.arange(batch * length, device=keys.device).reshape(batch, length, 1)
        kept = keep_positions(at, logits_to_keep)[..., 0]
        mask, attended = None, torch.ones_like(kept, dtype=torch.bool)
        if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            mask = attention_mask[:, -length:].to(keys.device)
            attended = mask.flatten()[kept] != 0
        return cls(keys.flatten(0, 1)[kept], attended, keys, kept, mask)

    def count(
        self, store: Reader, settings: KNNSettings, sequence_ids: Tensor | None, prefix: int | None
    ) -> None:
        """Find the n-grams that the texts have at their ends; arguments are those of `WrittenNGrams.of`."""
        assert sequence_ids is not None
        new, kept = self.all_keys.shape[1], self.kept.flatten()
        self.ngrams = WrittenNGrams.of(store, settings, sequence_ids, new, kept, prefix)

    def point(
        self, sequence_ids: Tensor | None, input_ids: Tensor | None, states: PointerStates | None
    ) -> None:
        """Let pointers go on from the pass before, if that is known, else begin in this one."""
        read = sequence_ids
        if read is None:
            read, states = None if input_ids is None else sequence_ids_of(input_ids, self.mask), None
        batch, length = self.all_keys.shape[:2]
        self.text_pass = TextPass.of(read, batch, length, self.kept.cpu(), states)


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
