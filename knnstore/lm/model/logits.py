"""What retrieval makes of the logits of one forward pass."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Keys, Neighbors, tokens_of
from knnstore.errors import ConfigError
from knnstore.lm.mixing import (
    DISTINCT_AMONG,
    Continuation,
    Likelihoods,
    Recent,
    Retrieved,
    VisitedTokens,
    entropy_of,
    nearest_of,
)
from knnstore.lm.model.passes import ForwardPass, Positions
from knnstore.lm.reading import Encoder
from knnstore.lm.retrieval import (
    TextKeys,
    TextPass,
    WrittenNGrams,
    WrittenOwnNGrams,
    WrittenTexts,
    mixture_of,
    reachable,
    retrieve,
    retrieve_for_pass,
    sequence_ids_of,
    visit,
    visits_cells,
)
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 24
"""How many log-probabilities are mixed at once: 64 MiB of float32."""


class LogitMixer:
    """Mixes what is retrieved into the logits of forward passes, with settings for all texts or for each.

    Args:
        store: where to retrieve from.
        heads: substitutes of the store.
        encoder: makes the keys of texts again where they were forgotten.
    """

    def __init__(self, store: Reader, heads: Heads, encoder: Encoder) -> None:
        self._store = store
        self._heads = heads
        self._text_keys = TextKeys(encoder, store.identity.metric)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, read: ForwardPass, each: Sequence[KNNSettings]) -> Tensor:
        """Mix with one settings for all texts, or with those of each; equal objects are searched for at once.

        Returns:
            As `mix_logits`; where the settings differ float32, shape (b, kept, v).

        Raises:
            ConfigError: there are neither one nor as many settings as texts; or the texts are not known, and
                something in the settings goes by them.
        """
        if len(each) not in (1, len(read.keys)):
            raise ConfigError(f"{len(each)} settings were given for {len(read.keys)} texts")
        groups: dict[int, list[int]] = {}
        for row, settings in enumerate(each):
            groups.setdefault(id(settings), []).append(row)
        if len(groups) == 1:
            return self.mix_alike(read, each[0])
        mixed = read.logits.to(torch.float32, copy=True)
        for rows in groups.values():
            mixed[rows] = self.mix_alike(read.rows(rows), each[rows[0]]).float()
        return mixed

    def mix_alike(self, read: ForwardPass, settings: KNNSettings) -> Tensor:
        """Mix with the same settings for all texts; see `mix_logits`."""
        if settings.is_model_alone:
            return read.logits
        positions = self._positions(read, settings)
        return mix_logits(self._store, self._heads, read.logits, positions, settings)

    def likelihoods(
        self, parts: Sequence[ForwardPass], gold: Tensor, settings: KNNSettings, count: int
    ) -> Likelihoods:
        """Say what the mixture gives to one token, and to the likeliest, at all positions of some texts.

        Args:
            parts: of one text each, with logits at all positions, t_i of them.
            gold: the token, int64, shape (sum of t_i,).
            settings: of all; without pointers.
            count: of the likeliest tokens, at most the whole vocabulary.
        """
        count = min(count, parts[0].logits.shape[-1])
        log_probs = torch.cat([part.logits[0].float().log_softmax(-1) for part in parts])
        if settings.is_model_alone:
            return Likelihoods.of(log_probs, gold, count)
        keys = torch.cat([part.keys[0] for part in parts]).to(log_probs.device).float()
        at = [self._positions(part, settings) for part in parts]
        lm_max = log_probs.amax(-1)
        entropy = None if settings.needs_nearest_only and settings.skip is None else entropy_of(log_probs)
        searched = torch.full_like(lm_max, settings.retrieves, dtype=torch.bool)
        if settings.skip is not None:
            assert entropy is not None
            searched &= settings.skip.searched(keys, lm_max, entropy)
        said = [
            _continued(one.ngrams, slice(None), part.logits[0], settings)
            for one, part in zip(at, parts, strict=True)
        ]
        own = [one.own_ngrams.rows(slice(None), keys.device) for one in at if one.own_ngrams is not None]
        recent = [one.recent for one in at if one.recent is not None]
        following = [one for one in said if one is not None]
        retrieved = Retrieved(
            **_looked_up(self._store, keys, gold, searched, settings, log_probs),
            lm_max=lm_max,
            keys=keys,
            lm_entropy=entropy,
            continuation=Continuation.joined(following) if following else None,
            own=Continuation.joined(own) if own else None,
            recent=Recent.joined(recent).to(keys.device) if recent else None,
        )
        below = self._heads.mix(settings.substitute, log_probs, keys)
        return mixture_of(settings, retrieved).likelihoods(below, gold, count)

    def keep_keys(self, part: ForwardPass, settings: KNNSettings) -> None:
        """Let the keys of a part of a text be found by what comes after it, where settings ask for them."""
        if settings.cache is not None:
            cache = replace(settings.cache, ngrams=None)
            self._positions(part, replace(settings, ngrams=None, cache=cache))

    def _positions(self, read: ForwardPass, settings: KNNSettings) -> Positions:
        """What the positions of a pass are mixed by."""
        found, texts = Positions.of(read), read.sequence_ids
        batch, length = read.keys.shape[:2]
        if settings.needs_text and texts is None:
            raise ConfigError(
                "a continuous cache and n-grams need token ids: give input_ids, or settings without them"
            )
        if settings.cache is not None and texts is not None:
            size = settings.cache.size
            kept = read.kept.flatten()
            found.recent = self._text_keys.look_back(texts, read.keys, kept, size, goes_on=read.goes_on)
        if texts is not None and (settings.ngrams or settings.own_ngrams):
            written, kept = WrittenTexts.of(texts, length, read.prefix), read.kept.flatten()
            found.ngrams = WrittenNGrams.of(self._store, settings, written, kept)
            found.own_ngrams = WrittenOwnNGrams.of(settings, written, kept)
        if settings.pointers is not None:
            states = read.pointer_states
            if texts is None:  # no pass before this one is known: pointers begin here
                states = None
                texts = None if read.input_ids is None else sequence_ids_of(read.input_ids, read.mask)
            found.text_pass = TextPass.of(texts, batch, length, read.kept.cpu(), states)
        return found


def mix_logits(
    store: Reader, heads: Heads, logits: Tensor, positions: Positions, settings: KNNSettings
) -> Tensor:
    """Mix into a model's logits, shape (..., v), what is retrieved at their positions, shape (...).

    Returns:
        log p of the mixture, float32, shape (..., v); the very `logits` when nothing was found.
    """
    keys, attended, recent = positions.keys.flatten(0, -2), positions.attended, positions.recent
    asked = keys if attended is None else keys[attended.flatten()]
    queries = asked.float().cpu().numpy()
    found = _found(store, logits, queries, positions, settings)
    is_found = settings.substitute is not None or positions.ngrams is not None
    is_found = is_found or bool(np.isfinite(found.distances).any())
    if not len(queries) or not (is_found or (recent is not None and bool(recent.distances.isfinite().any()))):
        return logits
    if attended is not None:
        found = found.spread(attended.flatten().cpu().numpy())
    distances, tokens, log_weights = _tensors(found, logits.device, logits.shape[-1])
    flat_keys, flat_logits = keys.to(logits.device), logits.flatten(0, -2)
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
            lm_entropy=None if settings.needs_nearest_only else entropy_of(log_probs),
            log_weights=None if log_weights is None else log_weights[at],
            continuation=_continued(positions.ngrams, at, log_probs, settings),
            own=None if positions.own_ngrams is None else positions.own_ngrams.rows(at, log_probs.device),
            recent=None if recent is None else recent.rows(at).to(logits.device),
        )
        below = heads.mix(settings.substitute, log_probs, flat_keys[at].float())
        parts.append(mixture_of(settings, retrieved).distribution(below))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(logits.shape)


def _looked_up(
    store: Reader, keys: Tensor, gold: Tensor, searched: Tensor, settings: KNNSettings, log_probs: Tensor
) -> dict[str, Any]:
    """What is found for queries, as fields of `Retrieved`; whole cells are not taken apart."""
    rows, device, vocabulary = searched.cpu().numpy(), keys.device, log_probs.shape[1]
    queries = keys.cpu().numpy()
    if not (rows.any() and visits_cells(store, settings)):
        found = retrieve(store, queries, settings, rows)
        distances, tokens, log_weights = _tensors(found, device, vocabulary)
        return {"distances": distances, "tokens": tokens, "log_weights": log_weights}
    asked = visit(store, queries[rows], gold[searched].cpu(), settings)
    visited = [one.spread(rows, gold.cpu()) for one in asked]
    distances, tokens = nearest_of(visited, DISTINCT_AMONG if not settings.needs_nearest_only else 0)
    by_token = [VisitedTokens(one, vocabulary, device) for one in visited]
    return {"distances": distances.to(device), "tokens": tokens.to(device), "visited": by_token}


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
    searched = None
    if settings.skip is not None and settings.retrieves:
        keys, predicted = positions.keys.flatten(0, -2), logits.flatten(0, -2)
        if positions.attended is not None:
            attended = positions.attended.flatten()
            keys, predicted = keys[attended], predicted[attended.to(logits.device)]
        searched = settings.skip.searched_of(keys, predicted, _rows_at_once(logits))
    if positions.text_pass is None or not settings.retrieves:
        return retrieve(store, queries, settings, searched)
    settings = replace(settings, k=reachable(store, settings))

    def search(rows: NDArray[np.int64]) -> Neighbors:
        return retrieve(store, queries[rows], settings, None if searched is None else searched[rows])

    kept = positions.text_pass.kept
    asked = np.ones(kept.shape, bool) if positions.attended is None else positions.attended.cpu().numpy()
    return retrieve_for_pass(store, queries, positions.text_pass, asked, settings, search)


def _tensors(found: Neighbors, device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Distances, tokens and log weights of n queries' neighbors, each of shape (n, k)."""
    tokens = np.where(found.ids >= 0, tokens_of(found.ids), 0)
    if tokens.max() >= vocabulary:
        raise ConfigError(
            f"the store holds token {tokens.max()}, the model's vocabulary has {vocabulary}; "
            "use the model that the store was made with"
        )
    weights = None if found.log_weights is None else torch.from_numpy(found.log_weights).to(device)
    return torch.from_numpy(found.distances).to(device), torch.from_numpy(tokens).to(device), weights


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _CHUNK_VALUES // logits.shape[-1])
