"""A batch of positions whose next tokens are predicted: the input of all components."""

from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from knnstore.lm.contexts import Contexts


@dataclass(frozen=True)
class Batch:
    """n positions whose next tokens are predicted.

    One batch is made for each decoding step, and for each chunk of a text that is scored.
    """

    keys: Tensor
    """Query vectors for the store's search, one for each position, float32, shape (n, d)."""
    lm_max: Tensor
    """Natural logarithm of the probability that the model alone gives to its most probable next token,
    float32, shape (n,)."""
    lm_entropy: Tensor | None
    """Entropy of the model's own next-token distribution in nats, float32, shape (n,); None if no setting
    uses the entropy."""
    vocabulary: int
    """Number of tokens that the model predicts, v."""
    contexts: Contexts | None = None
    """The text before each position; None if no component in use needs the text."""
    targets: Tensor | None = None
    """The target tokens, int64, shape (n,), when a text is scored; None when tokens are generated."""
    is_text: Tensor | None = None
    """False at padding positions, bool, shape (n,), on the CPU; None means no padding."""

    def __len__(self) -> int:
        return len(self.lm_max)

    def select_rows(self, rows: slice) -> Self:
        """Return a new batch with only the positions in the slice `rows`; a field that is None stays None."""

        def select_from_column(column: Tensor | None) -> Tensor | None:
            return None if column is None else column[rows]

        return replace(
            self,
            keys=self.keys[rows],
            lm_max=self.lm_max[rows],
            lm_entropy=select_from_column(self.lm_entropy),
            contexts=None if self.contexts is None else self.contexts.select_rows(rows),
            targets=select_from_column(self.targets),
            is_text=select_from_column(self.is_text),
        )
