"""A batch of positions whose next tokens are to be predicted: all that components may look at."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Neighbors
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
    neighbors: Neighbors | None = None
    """The neighbors of each position, where pointers have found them already."""
    searched: Tensor | None = None
    """For which of `neighbors` the store was searched, bool, shape (n,)."""

    def with_neighbors(self, neighbors: Neighbors, searched: NDArray[np.bool_]) -> Self:
        """Return the batch with neighbors that were found already; see the fields."""
        return replace(self, neighbors=neighbors, searched=torch.from_numpy(searched))

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
            neighbors=None if self.neighbors is None else self.neighbors.rows(np.arange(len(self))[rows]),
            searched=chosen(self.searched),
        )
