"""The states of the texts that a model is reading, for keys of several states inside `forward`."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from knnstore.lm.reading import Encoder, Tokens
from knnstore.lm.retrieval.prefix_states import PrefixStates, prefix_names, taken_apart

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
        """What the next key takes of the states up to each token, oldest first, shape (count, d)."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        texts, fresh = taken_apart(sequence_ids, length)
        attended, is_padded = torch.from_numpy(fresh).to(states.device), not fresh.all()
        read = [text[: len(text) - more] for text, more in zip(texts, fresh.sum(1).tolist(), strict=True)]
        known = torch.cat([torch.stack([self._before(text, states) for text in read]), states], 1)
        if goes_on:
            for text, row, there in zip(texts, known, attended, strict=True):
                self._keep(text, torch.cat([row[:count], row[count:][there]]) if is_padded else row)
        if not is_padded:
            return joining.after(known)
        back = torch.arange(count, 0, -1, device=states.device)
        is_known = back <= torch.tensor([len(text) for text in read], device=states.device)[:, None]
        return joining(known, torch.cat([is_known, attended], 1))[:, count:]

    def _before(self, text: Tokens, like: Tensor) -> Tensor:
        """What is kept at the end of a text, zeros before its beginning; shape (count, d)."""
        count = len(self._encoder.joining.discounts)
        if not len(text):
            return like.new_zeros(count, like.shape[2])
        (last,) = self._states.get(prefix_names(text, len(text) - 1))
        if last is None:
            last = self._encoder.key_states(text[None])[0, -count:].to(like)
            last = pad(last, (0, 0, count - len(last), 0))
        return last

    def _keep(self, text: Tokens, states: Tensor) -> None:
        """Keep, for each of the last tokens of a text, its state and those before it.

        Args:
            text: all its tokens.
            states: `count` from before the pass, and one of each token of it.
        """
        count = len(self._encoder.joining.discounts)
        most = min(_OF_A_PASS, len(states) - count)
        latest = states[len(states) - most - count + 1 :].clone()  # not a part of all, which would stay
        names = prefix_names(text, len(text) - most)
        self._states.put(names, [latest[at : at + count] for at in range(most)])
