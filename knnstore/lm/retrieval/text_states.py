"""The states of the texts that a model is reading, for keys of several states inside `forward`."""

import torch
from torch import Tensor

from knnstore.lm.reading import Encoder, Tokens
from knnstore.lm.retrieval.prefix_states import PADDING, PrefixStates, prefix_names, unpadded

_STATES_KEPT = 1 << 12
_OF_A_PASS = 32  # of each text: its end, and where a step that drafts may fall back to


class TextStates:
    """Remembers the latest states of each text, so that a step can join them to its own.

    Args:
        encoder: says which states make a key; makes those of a text again where they were forgotten.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._states: PrefixStates[Tensor] = PrefixStates(_STATES_KEPT)

    def keys(
        self,
        states: Tensor,
        attention_mask: Tensor | None,
        sequence_ids: Tensor | None,
        *,
        goes_on: bool = True,
    ) -> Tensor:
        """Make keys of the states of a forward pass, and of those of the passes before it.

        Args:
            states: shape (b, t, d).
            attention_mask: shape (b, t), 0 for padding; any other shape is no padding. Read only where
                `sequence_ids` do not say it.
            sequence_ids: the texts, shape (b, past + t), see `knnstore.lm.retrieval.prefix_states`; None
                where the pass begins with them and their tokens are not known.
            goes_on: whether further passes may follow that have these texts behind them.

        Returns:
            The keys as the store has them, float32, shape (b, t, dim); not to be read at padding.
        """
        return self._encoder.projected(self._joined(states, attention_mask, sequence_ids, goes_on))

    def _joined(
        self, states: Tensor, attention_mask: Tensor | None, sequence_ids: Tensor | None, goes_on: bool
    ) -> Tensor:
        joining = self._encoder.joining
        if not joining.discounts:
            return states
        if sequence_ids is None:
            if attention_mask is None or attention_mask.shape != states.shape[:2]:
                return joining(states)
            return joining(states, attention_mask.to(states.device) != 0)
        length, count = states.shape[1], len(joining.discounts)
        attended = (sequence_ids[:, -length:] != PADDING).to(states.device)
        past = unpadded(sequence_ids[:, :-length])
        before = states.new_zeros(len(past), count, states.shape[2])
        known = attended.new_zeros(len(past), count)
        for row, text in enumerate(past):
            if len(text):
                found = self._last(text, count)
                before[row, : len(found)], known[row, : len(found)] = found, True
        if goes_on:
            self._keep(unpadded(sequence_ids), attended, states)
        return joining(torch.cat([before, states], 1), torch.cat([known, attended], 1))[:, count:]

    def _last(self, text: Tokens, count: int) -> Tensor:
        """The last states of what was read of a text, shape (at most count, d)."""
        known = self._states.get(prefix_names(text, max(0, len(text) - count)))
        found = [state for state in known if state is not None]
        if len(found) < len(known):
            return self._encoder.key_states(text[None])[0, -count:]
        return torch.stack(found)

    def _keep(self, texts: list[Tokens], attended: Tensor, states: Tensor) -> None:
        for text, new, row in zip(texts, attended, states, strict=True):
            latest = row[new][-_OF_A_PASS:].clone()  # not a part of all states, which would stay with it
            self._states.put(prefix_names(text, len(text) - len(latest)), list(latest))
