"""One forward pass: what it leaves to be mixed into, and which of its positions are predicted from."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import keep_positions
from knnstore.lm.text_state import TextBatch


@dataclass(frozen=True)
class ForwardPass:
    """What one pass of the base model over the last t positions of b texts leaves to be mixed into."""

    logits: Tensor
    """Shape (b, kept, v)."""
    keys: Tensor
    """Shape (b, t, d)."""
    is_text: NDArray[np.bool_] | None
    """Which positions are no padding, shape (b, t); None is all."""
    batch: TextBatch | None
    """The texts up to the end of the pass; None where they cannot be followed."""
    logits_to_keep: int | Tensor
    """How many of the last positions are predicted from (0 is all), or which ones."""
    prefix: int | None
    """The token that comes before every document; None where none does, or nothing asks for it."""

    @cached_property
    def kept(self) -> Tensor:
        """Which of the b * t positions are predicted from, int64, shape (b, kept)."""
        batch, length = self.keys.shape[:2]
        at = torch.arange(batch * length, device=self.keys.device).reshape(batch, length, 1)
        return keep_positions(at, self.logits_to_keep)[..., 0]

    @property
    def kept_keys(self) -> Tensor:
        """Keys of the positions that are predicted from, shape (n, d), n = b * kept."""
        return self.keys.flatten(0, 1)[self.kept.flatten()]

    @property
    def attended(self) -> NDArray[np.bool_] | None:
        """Which positions that are predicted from are no padding, shape (n,); None is all."""
        if self.is_text is None:
            return None
        attended: NDArray[np.bool_] = self.is_text.ravel()[self.kept.flatten().cpu().numpy()]
        return None if attended.all() else attended

    @property
    def contexts(self) -> Contexts:
        """The positions that are predicted from, in their texts, which must be followed."""
        assert self.batch is not None
        return Contexts.of_pass(self.batch, self.prefix, self.kept.flatten())
