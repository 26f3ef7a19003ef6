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
from knnstore.lm.components import Form, look_up_texts, mixture_of
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import (
    DISTINCT_AMONG,
    Likelihoods,
    Retrieved,
    VisitedTokens,
    entropy_of,
    nearest_of,
)
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.retrieval import reachable, retrieve, retrieve_for_pass, visit, visits_cells
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
    """

    def __init__(self, store: Reader, heads: Heads) -> None:
        self._store = store
        self._heads = heads

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, read: ForwardPass, each: Sequence[KNNSettings]) -> Tensor:
        """Mix with one settings for all texts, or with those of each; equal objects are searched for at once.

        Returns:
            As `mix_alike`; where the settings differ float32, shape (b, kept, v).

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
        """Mix with the same settings for all texts.

        Returns:
            log p of the mixture, float32, shape (b, kept, v); the very logits of the pass where nothing was
            found at any position.
        """
        if settings.is_model_alone:
            return read.logits
        logits, contexts = read.logits.flatten(0, -2), _contexts(read, settings)
        # 1) Search for the neighbors of all positions that are no padding.
        keys, attended = read.kept_keys, read.attended
        queries = (keys if attended is None else keys[torch.from_numpy(attended)]).float().cpu().numpy()
        if not len(queries):
            return read.logits
        neighbors = self._search(read, logits, queries, attended, settings)
        if attended is not None:
            neighbors = neighbors.spread(attended)
        distances, tokens, log_weights = _tensors(neighbors, logits.device, logits.shape[1])
        keys = keys.to(logits.device).float()
        # 2) Look up the other components, and mix, some positions at a time.
        is_anything_found = settings.substitute is not None
        parts, step = [], _rows_at_once(logits)
        for start in range(0, len(distances), step):
            at = slice(start, start + step)
            log_probs = logits[at].float().log_softmax(-1)
            retrieved = Retrieved(
                distances[at],
                log_probs.amax(-1),
                tokens=tokens[at],
                keys=keys[at],
                lm_entropy=None if settings.needs_nearest_only else entropy_of(log_probs),
                log_weights=None if log_weights is None else log_weights[at],
                found=self._look_up(contexts, at, log_probs, settings),
            )
            mixture = mixture_of(settings, retrieved)
            is_anything_found = is_anything_found or any(
                bool(one.is_found.any()) for one in mixture.components
            )
            below = self._heads.mix(settings.substitute, log_probs, keys[at])
            parts.append(mixture.distribution(below))
        if not is_anything_found:
            return read.logits
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(read.logits.shape)

    def likelihoods(
        self, parts: Sequence[ForwardPass], gold: Tensor, settings: KNNSettings, count: int
    ) -> Likelihoods:
        """Compute what the mixture gives to one token, and to the likeliest, at all positions of some texts.

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
        each = [_contexts(part, settings) for part in parts]
        contexts = None if None in each else Contexts.joined([one for one in each if one is not None])
        lm_max = log_probs.amax(-1)
        entropy = None if settings.needs_nearest_only and settings.skip is None else entropy_of(log_probs)
        searched = torch.full_like(lm_max, settings.retrieves, dtype=torch.bool)
        if settings.skip is not None:
            assert entropy is not None
            searched &= settings.skip.searched(keys, lm_max, entropy)
        retrieved = Retrieved(
            **_looked_up(self._store, keys, gold, searched, settings, log_probs),
            lm_max=lm_max,
            keys=keys,
            lm_entropy=entropy,
            found=self._look_up(contexts, slice(None), log_probs, settings),
        )
        below = self._heads.mix(settings.substitute, log_probs, keys)
        return mixture_of(settings, retrieved).likelihoods(below, gold, count)

    def _look_up(
        self, contexts: Contexts | None, rows: slice, log_probs: Tensor, settings: KNNSettings
    ) -> dict[str, Any]:
        """Look up the components that go by the text, at some of the positions."""
        if contexts is None:
            return {}
        asked = contexts.select_rows(rows)
        found = look_up_texts(self._store, settings, asked, Form.DISTRIBUTION, log_probs.shape[1])
        return {name: one.to(log_probs.device) for name, one in found.items()}

    def _search(
        self,
        read: ForwardPass,
        logits: Tensor,
        queries: Keys,
        attended: NDArray[np.bool_] | None,
        settings: KNNSettings,
    ) -> Neighbors:
        """Find the neighbors of the positions that are attended, with the queries of shape (q, d)."""
        searched = None
        if settings.skip is not None and settings.retrieves:
            keys = read.kept_keys
            if attended is not None:
                rows = torch.from_numpy(attended)
                keys, logits = keys[rows], logits[rows.to(logits.device)]
            searched = settings.skip.searched_of(keys, logits, _rows_at_once(logits))
        if settings.pointers is None or not settings.retrieves:
            return retrieve(self._store, queries, settings, searched)
        settings = replace(settings, k=reachable(self._store, settings))

        def search(rows: NDArray[np.int64]) -> Neighbors:
            return retrieve(
                self._store, queries[rows], settings, None if searched is None else searched[rows]
            )

        text_pass = read.text_pass
        asked = (
            np.ones(text_pass.kept.shape, bool)
            if attended is None
            else attended.reshape(text_pass.kept.shape)
        )
        return retrieve_for_pass(self._store, queries, text_pass, asked, settings, search)


def _contexts(read: ForwardPass, settings: KNNSettings) -> Contexts | None:
    """Return the positions of a pass in their texts; None where the settings do not need the texts.

    Raises:
        ConfigError: they need them, and the texts are not known.
    """
    if not settings.needs_text:
        return None
    if read.batch is None or not read.batch.has_all_tokens:
        raise ConfigError(
            "a continuous cache and n-grams need token ids: give input_ids, or settings without them"
        )
    return read.contexts


def _looked_up(
    store: Reader, keys: Tensor, gold: Tensor, searched: Tensor, settings: KNNSettings, log_probs: Tensor
) -> dict[str, Any]:
    """Search for queries; return fields of `Retrieved`, in which whole cells are not taken apart."""
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


def _tensors(found: Neighbors, device: torch.device, vocabulary: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return distances, tokens and log weights of n queries' neighbors, each of shape (n, k)."""
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
