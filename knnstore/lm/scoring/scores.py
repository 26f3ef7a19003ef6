"""What is known of the tokens of held-out text before λ is chosen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from knnstore.datastore import Ids, Neighbors, tokens_of
from knnstore.lm.mixing import Recent, Retrieved


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
    """The neighbours' records, shape (n, k), -1 where one is missing."""
    distances: Tensor
    """To the neighbours, float32, shape (n, k), +inf where one is missing."""
    tokens: Tensor
    """Of the neighbours, int64, shape (n, k)."""
    gold: Tensor
    """The tokens themselves, int64, shape (n,)."""
    keys: Tensor
    """What was searched for, float32, shape (n, d)."""
    documents: NDArray[np.int64]
    """Index of each token's document, in the order given; shape (n,)."""
    positions: NDArray[np.int64]
    """Of each token in its document, shape (n,)."""
    log_weights: Tensor | None = None
    """Of the neighbours, float32, shape (n, k); see `Retrieved`."""
    recent: Recent | None = None
    """What stands before each token in its document; None without a cache."""

    def retrieved(self) -> Retrieved:
        """What a mixer chooses from."""
        return Retrieved(
            self.distances,
            self.lm_max,
            tokens=self.tokens,
            keys=self.keys,
            lm_entropy=self.lm_entropy,
            log_weights=self.log_weights,
            recent=self.recent,
        )

    def rows(self, rows: NDArray[np.int64]) -> "TokenScores":
        """Some of the tokens, shape (m,)."""
        at = torch.from_numpy(rows)
        return TokenScores(
            lm_log_probs=self.lm_log_probs[at],
            lm_max=self.lm_max[at],
            lm_entropy=self.lm_entropy[at],
            searched=self.searched[rows],
            ids=self.ids[rows],
            distances=self.distances[at],
            tokens=self.tokens[at],
            gold=self.gold[at],
            keys=self.keys[at],
            documents=self.documents[rows],
            positions=self.positions[rows],
            log_weights=None if self.log_weights is None else self.log_weights[at],
            recent=None if self.recent is None else self.recent.rows(at),
        )

    def with_neighbors(self, found: Neighbors, searched: NDArray[np.bool_]) -> "TokenScores":
        """The same tokens with other neighbours."""
        return replace(
            self,
            searched=searched,
            ids=found.ids,
            distances=torch.from_numpy(found.distances),
            tokens=torch.from_numpy(tokens_of(found.ids)),
            log_weights=None if found.log_weights is None else torch.from_numpy(found.log_weights),
        )


def together(parts: Sequence["TokenScores"]) -> "TokenScores":
    """Put tokens without neighbours one after another."""
    tensors = ("lm_log_probs", "lm_max", "lm_entropy", "distances", "tokens", "gold", "keys")
    arrays = ("searched", "ids", "documents", "positions")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in tensors}
    joined |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays}
    recents = [part.recent for part in parts if part.recent is not None]
    if recents:
        width = max(recent.tokens.shape[1] for recent in recents)
        short = [width - recent.tokens.shape[1] for recent in recents]
        joined["recent"] = Recent(
            torch.cat(
                [pad(r.distances, (n, 0), value=torch.inf) for r, n in zip(recents, short, strict=True)]
            ),
            torch.cat([pad(r.tokens, (n, 0)) for r, n in zip(recents, short, strict=True)]),
        )
    return replace(parts[0], **joined)
