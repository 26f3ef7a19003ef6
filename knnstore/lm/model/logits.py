"""Mixing what the store knows into the logits of one forward pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Likelihoods
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.row_mixer import RowMixer, Rows
from knnstore.lm.settings import KNNSettings
from knnstore.store import Reader


class LogitMixer:
    """Mixes what is retrieved into the logits of forward passes, with settings for all texts or for each.

    Args:
        store: where to retrieve from.
    """

    def __init__(self, store: Reader) -> None:
        self._rows = RowMixer(store)

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
        if len(each) > 1:
            each = [settings for settings in each for _ in range(read.logits.shape[1])]
        needs_text = any(settings.needs_text for settings in each)
        logits = read.logits.flatten(0, -2)
        rows = Rows(logits, read.kept_keys, _contexts(read) if needs_text else None, read.attended)
        mixed: Tensor = self._rows.mix(rows, each)
        return read.logits if mixed is logits else mixed.reshape(read.logits.shape)

    def likelihoods(
        self, parts: Sequence[ForwardPass], targets: Tensor, settings: KNNSettings, count: int
    ) -> Likelihoods:
        """Compute what the mixture gives to one token, and to the likeliest, at all positions of some texts.

        Args:
            parts: forward passes of one text each, with logits at all t_i positions.
            targets: the token, int64, shape (sum of t_i,).
            settings: the settings for all texts.
            count: number of most probable tokens, at most the vocabulary.
        """
        each = [_contexts(part) for part in parts] if settings.needs_text else []
        known = [one for one in each if one is not None]
        rows = Rows(
            torch.cat([part.logits[0] for part in parts]),
            torch.cat([part.keys[0] for part in parts]),
            Contexts.joined(known) if len(known) == len(parts) else None,
        )
        return self._rows.likelihoods(rows, targets, settings, count)


def _contexts(read: ForwardPass) -> Contexts | None:
    """Return the positions of a pass in their texts; None where the texts are not known."""
    return None if read.batch is None or not read.batch.has_all_tokens else read.contexts
