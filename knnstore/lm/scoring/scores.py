"""What is known of the tokens of held-out text before λ is chosen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.datastore import Ids, Neighbors, tokens_of
from knnstore.lm.components import Found
from knnstore.lm.mixing import DISTINCT_AMONG, Retrieved, Visited, nearest_of


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What is known of n tokens before temperature and λ are chosen."""

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    lm_max: Tensor
    """log p_LM of the token that was likeliest there, float32, shape (n,)."""
    lm_entropy: Tensor
    """Entropy of p_LM in nats, float32, shape (n,)."""
    searched: NDArray[np.bool_]
    """For which of them a search was made, shape (n,)."""
    ids: Ids
    """The neighbors' records, shape (n, k), -1 where one is missing."""
    distances: Tensor
    """To the neighbors, float32, shape (n, k), +inf where one is missing."""
    tokens: Tensor
    """Of the neighbors, int64, shape (n, k)."""
    gold: Tensor
    """The tokens themselves, int64, shape (n,)."""
    keys: Tensor
    """What was searched for, float32, shape (n, d)."""
    documents: NDArray[np.int64]
    """Index of each token's document, in the order given; shape (n,)."""
    positions: NDArray[np.int64]
    """Of each token in its document, shape (n,)."""
    log_weights: Tensor | None = None
    """Of the neighbors, float32, shape (n, k); see `Retrieved`."""
    found: Mapping[str, Found] = field(default_factory=dict)
    """What each component but the keys found, by its name; only of those in use."""
    visited: Sequence[Visited] | None = None
    """What was visited, for each search, where records were not kept apart: see `Retrieved`; `ids` has no
    column then."""

    def retrieved(self) -> Retrieved:
        """What a mixer chooses from."""
        return Retrieved(
            self.distances,
            self.lm_max,
            tokens=self.tokens,
            keys=self.keys,
            lm_entropy=self.lm_entropy,
            log_weights=self.log_weights,
            found=self.found,
            visited=self.visited,
        )

    def rows(self, rows: NDArray[np.int64]) -> "TokenScores":
        """Some of the tokens, shape (m,)."""
        assert self.visited is None
        at = torch.from_numpy(rows)

        def chosen(column: Any) -> Any:
            if isinstance(column, Mapping):
                return {name: one.rows(at) for name, one in column.items()}
            return None if column is None else column[at if isinstance(column, Tensor) else rows]

        return TokenScores(**{one.name: chosen(getattr(self, one.name)) for one in fields(self)})

    def with_neighbors(self, found: Neighbors, searched: NDArray[np.bool_]) -> "TokenScores":
        """The same tokens with other neighbors."""
        return replace(
            self,
            searched=searched,
            ids=found.ids,
            distances=torch.from_numpy(found.distances),
            tokens=torch.from_numpy(tokens_of(found.ids)),
            log_weights=None if found.log_weights is None else torch.from_numpy(found.log_weights),
        )

    def with_visited(self, visited: Sequence[Visited], *, nearest_only: bool) -> "TokenScores":
        """The same tokens with the records of cells.

        Args:
            visited: for each search.
            nearest_only: the mixer looks at the nearest distance alone.
        """
        distances, tokens = nearest_of(visited, 0 if nearest_only else DISTINCT_AMONG)
        return replace(self, distances=distances, tokens=tokens, visited=visited)


def together(parts: Sequence[TokenScores]) -> TokenScores:
    """Put tokens one after another, which have as many neighbors each."""

    def joined(columns: list[Any]) -> Any:
        if isinstance(columns[0], Mapping):
            return {name: one.joined([of[name] for of in columns]) for name, one in columns[0].items()}
        if isinstance(columns[0], Tensor):
            return torch.cat(columns)
        return None if columns[0] is None else np.concatenate(columns)

    return TokenScores(
        **{one.name: joined([getattr(part, one.name) for part in parts]) for one in fields(parts[0])}
    )
