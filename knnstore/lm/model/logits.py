"""Mixing what the store knows into the logits of one forward pass."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Neighbors
from knnstore.errors import ConfigError
from knnstore.lm.components import reachable, search_records
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Likelihoods
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.retrieval import retrieve_for_pass
from knnstore.lm.row_mixer import RowMixer, Rows
from knnstore.lm.settings import KNNSettings
from knnstore.lm.substitute import Heads
from knnstore.store import Reader


class LogitMixer:
    """Mixes what is retrieved into the logits of forward passes, with settings for all texts or for each.

    Args:
        store: where to retrieve from.
        heads: substitutes of the store.
    """

    def __init__(self, store: Reader, heads: Heads) -> None:
        self._store = store
        self._rows = RowMixer(store, heads)

    def mix(self, read: ForwardPass, each: Sequence[KNNSettings]) -> Tensor:
        """Mix with one settings for all texts, or with those of each; see `RowMixer.mix`.

        Returns:
            Shape (b, kept, v); the very logits of the pass where nothing was found at any position.

        Raises:
            ConfigError: there are neither one nor as many settings as texts; or the texts are not known, and
                the settings need them.
        """
        if len(each) not in (1, len(read.keys)):
            raise ConfigError(f"{len(each)} settings were given for {len(read.keys)} texts")
        texts, kept = read.logits.shape[:2]
        if len(each) > 1:
            each = [settings for settings in each for _ in range(kept)]
        needs_text = any(settings.needs_text for settings in each)
        logits = read.logits.flatten(0, -2)
        rows = Rows(logits, read.kept_keys, _contexts(read) if needs_text else None, read.attended)

        def follow(settings: KNNSettings, numbers: NDArray[np.int64]) -> tuple[Neighbors, NDArray[np.bool_]]:
            own = read if len(numbers) == texts * kept else read.rows(np.unique(numbers // kept).tolist())
            return self._follow_pointers(own, settings)

        mixed: Tensor = self._rows.mix(rows, each, follow)
        return read.logits if mixed is logits else mixed.reshape(read.logits.shape)

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
        each = [_contexts(part) for part in parts] if settings.needs_text else []
        known = [one for one in each if one is not None]
        rows = Rows(
            torch.cat([part.logits[0] for part in parts]),
            torch.cat([part.keys[0] for part in parts]),
            Contexts.joined(known) if len(known) == len(parts) else None,
        )
        return self._rows.likelihoods(rows, targets, settings, count)

    def _follow_pointers(
        self, read: ForwardPass, settings: KNNSettings
    ) -> tuple[Neighbors, NDArray[np.bool_]]:
        """Find neighbors by pointers and searches: each position goes on from the one before it in its text.

        Returns:
            The neighbors of the kept positions, and for which of these the store was searched, shape (n,).
        """
        text_pass, is_text = read.text_pass, read.attended
        attended = np.ones(text_pass.kept.size, np.bool_) if is_text is None else is_text
        keys = read.kept_keys.float()
        settings = replace(settings, k=reachable(self._store, settings))
        queries = keys[torch.from_numpy(attended)].cpu().numpy()

        def search(rows: NDArray[np.int64]) -> Neighbors:
            return Neighbors.joined(search_records(self._store, queries[rows], settings))

        found = retrieve_for_pass(
            self._store, queries, text_pass, attended.reshape(text_pass.kept.shape), settings, search
        )
        return found.spread(attended), attended


def _contexts(read: ForwardPass) -> Contexts | None:
    """Return the positions of a pass in their texts; None where the texts are not known."""
    return None if read.batch is None or not read.batch.has_all_tokens else read.contexts
