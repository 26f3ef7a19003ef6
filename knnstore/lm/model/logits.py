"""Mixing the predictions of the store into the logits of one forward pass (`LogitMixer`)."""

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
    """Mixes the predictions of the store into the logits of forward passes.

    Args:
        store: the store that is searched.
    """

    def __init__(self, store: Reader) -> None:
        self._rows = RowMixer(store)

    def mix(self, read: ForwardPass, each: Sequence[KNNSettings]) -> Tensor:
        """Return the log-probabilities of the mixture at the kept positions of a forward pass.

        The kept positions are the positions whose logits were computed.

        Args:
            read: the forward pass of b texts.
            each: one element, the settings for all texts; or b elements, the settings of each text.

        Returns:
            Log-probabilities, shape (b, kept, v). If nothing was retrieved at any position, the object
            `read.logits` itself, whose values are logits, not log-probabilities.

        Raises:
            ConfigError: `each` has neither one nor b elements, or the settings need the earlier text and it
                is not known.
        """
        if len(each) not in (1, len(read.keys)):
            raise ConfigError(
                f"{len(each)} settings were given for {len(read.keys)} texts: give one, or one for each text"
            )
        if len(each) > 1:
            each = [settings for settings in each for _ in range(read.logits.shape[1])]
        needs_text = any(settings.needs_text for settings in each)
        logits = read.logits.flatten(0, -2)
        rows = Rows(logits, read.kept_keys, _get_contexts(read) if needs_text else None, read.attended)
        mixed: Tensor = self._rows.mix(rows, each)
        return read.logits if mixed is logits else mixed.reshape(read.logits.shape)

    def score_targets(
        self, parts: Sequence[ForwardPass], targets: Tensor, settings: KNNSettings, count: int
    ) -> Likelihoods:
        """Compute the mixture's log-probabilities of the target tokens and of the most probable tokens.

        Args:
            parts: forward passes of one text each, with logits at all t_i positions.
            targets: the target token of each position of all passes, int64, shape (sum of t_i,).
            settings: the settings for all texts.
            count: number of most probable tokens; at most the size of the vocabulary is returned.

        Returns:
            The log-probabilities at all positions, in the order of the passes.
        """
        contexts = [_get_contexts(part) for part in parts] if settings.needs_text else []
        known = [context for context in contexts if context is not None]
        rows = Rows(
            torch.cat([part.logits[0] for part in parts]),
            torch.cat([part.keys[0] for part in parts]),
            Contexts.concatenate(known) if len(known) == len(parts) else None,
        )
        return self._rows.score_targets(rows, targets, settings, count)


def _get_contexts(read: ForwardPass) -> Contexts | None:
    """Return the contexts (earlier text) of the kept positions of a pass.

    Returns None if a token of the earlier text is not known.
    """
    return None if read.batch is None or not read.batch.has_all_tokens else read.contexts
