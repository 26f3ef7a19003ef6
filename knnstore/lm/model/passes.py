"""One forward pass: what it leaves to be mixed into, and which of its positions are predicted from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from knnstore.lm.keys import keep_positions
from knnstore.lm.mixing import Recent
from knnstore.lm.retrieval import PointerStates, TextPass, WrittenNGrams, WrittenOwnNGrams


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
    own_ngrams: WrittenOwnNGrams | None = None
    """What their own n-grams are before each; None where these do not count."""
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


@dataclass(frozen=True)
class ForwardPass:
    """What one pass of the base model over the last t positions of b texts leaves to be mixed into."""

    logits: Tensor
    """Shape (b, kept, v)."""
    keys: Tensor
    """Shape (b, t, d)."""
    input_ids: Tensor | None
    """Shape (b, t); this and the next four are arguments of `KNNLMForCausalLM.forward`."""
    attention_mask: Tensor | None
    sequence_ids: Tensor | None
    logits_to_keep: int | Tensor
    pointer_states: PointerStates | None
    prefix: int | None
    """The token that comes before every document; None where none does, or nothing asks for it."""
    goes_on: bool
    """Whether further passes may follow that have these texts behind them."""

    def rows(self, rows: Sequence[int]) -> "ForwardPass":
        """The pass over some of the texts."""
        at = torch.tensor(rows, device=self.logits.device)
        mask = self.attention_mask
        return replace(
            self,
            logits=self.logits[at],
            keys=self.keys[at],
            input_ids=None if self.input_ids is None else self.input_ids[at],
            attention_mask=mask[at] if isinstance(mask, Tensor) and mask.ndim == 2 else mask,
            sequence_ids=None if self.sequence_ids is None else self.sequence_ids[at],
        )
