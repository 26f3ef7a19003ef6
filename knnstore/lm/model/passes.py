"""The result of one forward pass of the base model (`ForwardPass`), as input of the mixture."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.contexts import Contexts
from knnstore.lm.keys import select_positions_to_keep
from knnstore.lm.text_state import TextBatch


@dataclass(frozen=True)
class ForwardPass:
    """Result of a forward pass of the base model over the last t positions of b texts.

    The kept positions are the positions whose logits were computed.
    """

    logits: Tensor
    """Logits of the kept positions, shape (b, kept, v)."""
    keys: Tensor
    """Keys of all positions, shape (b, t, d)."""
    is_text: NDArray[np.bool_] | None
    """False at padding, shape (b, t); None means no padding."""
    batch: TextBatch | None
    """The texts up to the end of the pass; None if the texts are not known."""
    logits_to_keep: int | Tensor
    """Number of last positions that are kept (0 means all), or the kept positions themselves."""
    prefix: Sequence[int]
    """The tokens that precede every document; empty if documents have no prefix, or no setting needs it."""

    @cached_property
    def kept_positions(self) -> NDArray[np.int64]:
        """Indices of the positions whose logits were computed, among all b * t positions; shape (n,)."""
        batch, length = self.keys.shape[:2]
        at = torch.arange(batch * length).reshape(batch, length, 1)
        wanted = self.logits_to_keep
        return (
            select_positions_to_keep(at, wanted if isinstance(wanted, int) else wanted.cpu()).numpy().ravel()
        )

    @property
    def kept_keys(self) -> Tensor:
        """Keys of the positions whose logits were computed, shape (n, d), n = b * kept."""
        return select_positions_to_keep(self.keys, self.logits_to_keep).reshape(-1, self.keys.shape[-1])

    @property
    def attended(self) -> NDArray[np.bool_] | None:
        """False at padding, for the positions whose logits were computed, shape (n,).

        None if none of these positions is padding.
        """
        if self.is_text is None:
            return None
        attended: NDArray[np.bool_] = self.is_text.ravel()[self.kept_positions]
        return None if attended.all() else attended

    @property
    def contexts(self) -> Contexts:
        """Contexts of the positions whose logits were computed.

        The context of a position is the tokens of its text up to this position, including the token at the
        position. `batch` must not be None.
        """
        assert self.batch is not None
        return Contexts.from_pass(self.batch, self.prefix, self.kept_positions)
