"""One forward pass: what it leaves to be mixed into, and which of its positions are predicted from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    attended: Tensor | None
    """Whether a position is part of a text and not padding: bool, shape (...); None where all are."""
    recent: Recent | None = None
    """What each finds in its own text; None without a cache."""
    ngrams: WrittenNGrams | None = None
    """What n-grams are before each; None where none count."""
    own_ngrams: WrittenOwnNGrams | None = None
    """What their own n-grams are before each; None where these do not count."""
    text_pass: TextPass | None = None
    """What pointers go by; None without them."""

    @classmethod
    def of(cls, read: "ForwardPass") -> Self:
        """Choose those of a pass."""
        attended = None
        if read.mask is not None and not read.mask.all():
            attended = keep_positions((read.mask != 0)[..., None], read.logits_to_keep)[..., 0]
            attended = None if attended.all() else attended
        return cls(keep_positions(read.keys, read.logits_to_keep), attended)


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

    @cached_property
    def mask(self) -> Tensor | None:
        """0 for padding, shape (b, t); None where there is none."""
        if not isinstance(self.attention_mask, Tensor) or self.attention_mask.ndim != 2:
            return None
        return self.attention_mask[:, -self.keys.shape[1] :].to(self.keys.device)

    @cached_property
    def kept(self) -> Tensor:
        """Which of the b * t positions are predicted from, int64, any shape."""
        batch, length = self.keys.shape[:2]
        at = torch.arange(batch * length, device=self.keys.device).reshape(batch, length, 1)
        return keep_positions(at, self.logits_to_keep)[..., 0]

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
