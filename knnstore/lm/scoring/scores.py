"""Tokens of held-out text: as the model reads them, and with the evidence of the store."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.lm.batch import Batch
from knnstore.lm.contexts import Contexts
from knnstore.lm.mixing import Evidence


@dataclass(frozen=True, slots=True)
class ReadTokens:
    """n tokens that the model has predicted; nothing is looked up yet."""

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the token that was likeliest there, float32, shape (n,)."""
    lm_entropy: Tensor
    """Entropy of p_LM in nats, float32, shape (n,)."""
    targets: Tensor
    """The tokens themselves, int64, shape (n,)."""
    keys: Tensor
    """The store's query at each, float32, shape (n, d)."""
    documents: NDArray[np.int64]
    """Index of each token's document, in the order given; shape (n,)."""
    positions: NDArray[np.int64]
    """Index of each token in its document, shape (n,)."""

    def __len__(self) -> int:
        return len(self.targets)

    def select_rows(self, rows: slice | Tensor) -> "ReadTokens":
        """Return some of the tokens."""
        at = (
            rows.numpy() if isinstance(rows, Tensor) else rows
        )  # numpy takes a tensor of one row for a number
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return ReadTokens(
            **{name: column[rows if isinstance(column, Tensor) else at] for name, column in columns.items()}
        )

    @classmethod
    def joined(cls, parts: Sequence["ReadTokens"]) -> "ReadTokens":
        """Put tokens one after another."""
        if len(parts) == 1:
            return parts[0]
        every = {one.name: [getattr(part, one.name) for part in parts] for one in fields(cls)}
        joined: dict[str, Any] = {
            name: torch.cat(column) if isinstance(column[0], Tensor) else np.concatenate(column)
            for name, column in every.items()
        }
        return cls(**joined)

    def batch(self, vocabulary: int, contexts: Contexts | None) -> Batch:
        """Describe the positions of the tokens, for `look_up`."""
        return Batch(
            self.keys, self.lm_max, self.lm_entropy, vocabulary, contexts=contexts, targets=self.targets
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """n tokens with the evidence for each, before λ and T are chosen."""

    read: ReadTokens
    evidence: Evidence

    def __len__(self) -> int:
        return len(self.read)

    @property
    def lm_log_probs(self) -> Tensor:
        """Log p_LM of each token, float32, shape (n,)."""
        return self.read.lm_log_probs

    @property
    def targets(self) -> Tensor:
        """The tokens themselves, int64, shape (n,)."""
        return self.read.targets

    @property
    def documents(self) -> NDArray[np.int64]:
        """Index of each token's document, shape (n,)."""
        return self.read.documents

    @property
    def positions(self) -> NDArray[np.int64]:
        """Index of each token in its document, shape (n,)."""
        return self.read.positions

    def with_documents(self, documents: NDArray[np.int64]) -> Self:
        """Return the same tokens with other indices of their documents."""
        return replace(self, read=replace(self.read, documents=documents))
