"""A batch of positions whose next tokens are to be predicted: all that components may look at."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from knnstore.lm.contexts import Contexts


@dataclass(frozen=True)
class Batch:
    """n positions. A host of the mixture makes a batch for each step, and for each part of a scored text."""

    keys: Tensor
    """The store's query at each position, float32, shape (n, d)."""
    lm_max: Tensor
    """log p_LM of the token that the model finds likeliest, float32, shape (n,)."""
    lm_entropy: Tensor | None
    """Entropy of p_LM in nats, float32, shape (n,); None where no setting looks at it."""
    vocabulary: int
    """Tokens that the model predicts, v."""
    contexts: Contexts | None = None
    """The positions in their texts; None where no component in use looks at the text."""
    targets: Tensor | None = None
    """The next tokens, int64, shape (n,), where a text is scored."""
    is_text: Tensor | None = None
    """Which positions are no padding, bool, shape (n,), in the processor's memory; None is all."""

    def __len__(self) -> int:
        return len(self.lm_max)

    def select_rows(self, rows: slice) -> Self:
        """Return the batch at some of its positions."""

        def chosen(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return replace(
            self,
            keys=self.keys[rows],
            lm_max=self.lm_max[rows],
            lm_entropy=chosen(self.lm_entropy),
            contexts=None if self.contexts is None else self.contexts.select_rows(rows),
            targets=chosen(self.targets),
            is_text=chosen(self.is_text),
        )
