"""Mixing what the store knows into the logits of one forward pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Neighbors
from knnstore.errors import ConfigError
from knnstore.lm.batch import Batch
from knnstore.lm.components import Form, look_up, mixture_of, reachable, search_records
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Likelihoods, entropy_of
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.retrieval import retrieve_for_pass
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import Reader

_CHUNK_VALUES = 1 << 25
"""Log-probabilities that are mixed at once: 128 MiB of float32."""


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
        logits, contexts, is_text = read.logits.flatten(0, -2), _contexts(read, settings), read.attended
        keys = read.kept_keys.to(logits.device).float()
        neighbors = searched = None
        if settings.pointers is not None and settings.retrieves:
            neighbors, searched = self._follow_pointers(read, logits, settings)
        is_anything_found = settings.substitute is not None
        parts, step = [], max(1, _CHUNK_VALUES // logits.shape[1])
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            log_probs = logits[rows].float().log_softmax(-1)
            batch = Batch(
                keys[rows],
                log_probs.amax(-1),
                _entropy(log_probs, settings),
                logits.shape[1],
                contexts=None if contexts is None else contexts.select_rows(rows),
                is_text=None if is_text is None else torch.from_numpy(is_text[rows]),
                neighbors=None if neighbors is None else neighbors.rows(np.arange(len(logits))[rows]),
                searched=None if searched is None else torch.from_numpy(searched[rows]),
            )
            mixture = mixture_of(settings, look_up(self._store, settings, batch, Form.DISTRIBUTION))
            is_anything_found = is_anything_found or any(
                bool(one.is_found.any()) for one in mixture.components
            )
            below = self._heads.mix(settings.substitute, log_probs, keys[rows])
            parts.append(mixture.distribution(below))
        if not is_anything_found:
            return read.logits
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(read.logits.shape)

    def likelihoods(
        self, parts: Sequence[ForwardPass], targets: Tensor, settings: KNNSettings, count: int
    ) -> Likelihoods:
        """Compute what the mixture gives to one token, and to the likeliest, at all positions of some texts.

        Args:
            parts: of one text each, with logits at all positions, t_i of them.
            targets: the token, int64, shape (sum of t_i,).
            settings: of all; without pointers.
            count: of the likeliest tokens, at most the whole vocabulary.
        """
        count = min(count, parts[0].logits.shape[-1])
        log_probs = torch.cat([part.logits[0].float().log_softmax(-1) for part in parts])
        if settings.is_model_alone:
            return Likelihoods.of(log_probs, targets, count)
        keys = torch.cat([part.keys[0] for part in parts]).to(log_probs.device).float()
        each = [_contexts(part, settings) for part in parts]
        batch = Batch(
            keys,
            log_probs.amax(-1),
            _entropy(log_probs, settings),
            log_probs.shape[1],
            contexts=None if None in each else Contexts.joined([one for one in each if one is not None]),
            targets=targets,
        )
        mixture = mixture_of(settings, look_up(self._store, settings, batch, Form.DISTRIBUTION))
        below = self._heads.mix(settings.substitute, log_probs, keys)
        return mixture.likelihoods(below, targets, count)

    def _follow_pointers(
        self, read: ForwardPass, logits: Tensor, settings: KNNSettings
    ) -> tuple[Neighbors, NDArray[np.bool_]]:
        """Find neighbors by pointers and searches: each position goes on from the one before it in its text.

        Returns:
            The neighbors of the kept positions, and for which of these the store was searched, shape (n,).
        """
        text_pass, is_text = read.text_pass, read.attended
        attended = np.ones(text_pass.kept.size, np.bool_) if is_text is None else is_text
        keys = read.kept_keys.float()
        wanted = attended
        if settings.skip is not None:
            step = max(1, _CHUNK_VALUES // logits.shape[1])
            wanted = attended & settings.skip.searched_of(keys, logits, step)
        settings = replace(settings, k=reachable(self._store, settings))
        queries, searched = keys[torch.from_numpy(attended)].cpu().numpy(), wanted[attended]

        def search(rows: NDArray[np.int64]) -> Neighbors:
            some = searched[rows]
            return Neighbors.joined(search_records(self._store, queries[rows][some], settings)).spread(some)

        found = retrieve_for_pass(
            self._store, queries, text_pass, attended.reshape(text_pass.kept.shape), settings, search
        )
        return found.spread(attended), wanted


def _entropy(log_probs: Tensor, settings: KNNSettings) -> Tensor | None:
    """Return the entropy of distributions, shape (n,); None where no setting looks at it."""
    return None if settings.needs_nearest_only and settings.skip is None else entropy_of(log_probs)


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
