"""The continuous cache: what was read a moment ago in the same text, retrieved like records of a store.

    p_cache(y) ∝ Σ_{i < t: x_i+1 = y} exp(-d(key_i, key_t) / T)        over the last M tokens before t

(Grave et al. 2017, https://arxiv.org/abs/1612.04426.) Keys and distances are those of the store, so squared
Euclidean where theirs is an inner product, unless the store measures that too. A key is of use from
where the token that it predicts has been read, and no longer than its document lasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnstore.datastore import Metric, pairwise
from knnstore.lm.mixing import LEAST_PROBABILITY, Recent, RecentGold, halving
from knnstore.lm.reading import Tokens

_BLOCK_ROWS = 256
"""Queries that are compared with what precedes them at once; the longer, the more is computed in vain."""


def look_back(
    keys: Tensor, tokens: Tensor, at: Tensor, starts: Tensor, size: int, metric: Metric | str
) -> Recent:
    """Compare some keys with those before them.

    Args:
        keys: of one text after another, float32, shape (m, d).
        tokens: that each key predicts, int64, shape (m,); not read where nothing comes after it.
        at: the queries: rows of `keys`, int64, shape (n,), ascending.
        starts: the first row of each query's text, int64, shape (n,).
        size: how many rows back a query reaches at most.
        metric: how distances are measured.
    """
    reach = int((at - starts).max()) if len(at) else 0
    width = min(size, max(reach, 1))
    before = at[:, None] + torch.arange(-width, 0, device=at.device)
    distances = torch.full(before.shape, torch.inf, device=keys.device)
    done = 0
    for count in torch.unique_consecutive(at // _BLOCK_ROWS, return_counts=True)[1].tolist():
        rows = slice(done, done + count)
        first = max(0, int(at[done]) - width)
        reached = keys[first : int(at[done + count - 1]) + 1]
        compared = pairwise(keys[at[rows]], reached, metric)
        distances[rows] = compared.gather(1, (before[rows] - first).clamp(min=0))
        done += count
    distances.masked_fill_(before < starts[:, None], torch.inf)
    return Recent(distances, tokens[before.clamp(min=0)])


class ReadText:
    """Follows documents as they are scored, batch after batch.

    Args:
        size: how many tokens back it reaches.
        metric: how distances are measured.
        temperatures: at which alone it will be asked what the token that came has; None keeps what was found.
    """

    def __init__(self, size: int, metric: Metric | str, temperatures: Sequence[float] | None = None) -> None:
        self._size = size
        self._metric = metric
        self._temperatures = temperatures
        self._last: tuple[Tensor, Tensor, int, int] | None = None

    def follow(self, keys: Tensor, gold: Tensor, documents: Tokens, positions: Tokens) -> Recent | RecentGold:
        """Look back from each token of a batch, then remember its end.

        Args:
            keys: float32, shape (n, d).
            gold: the tokens predicted there, int64, shape (n,).
            documents: of each token, shape (n,); each document's tokens are together and in order,
                and only the last document may go on in the next batch.
            positions: in the document, shape (n,).
        """
        owners, places = torch.from_numpy(documents), torch.from_numpy(positions)
        count = 0
        if self._last is not None and self._last[2] == owners[0]:
            old_keys, old_gold, document, next_position = self._last
            count = len(old_gold)
            keys, gold = torch.cat([old_keys, keys]), torch.cat([old_gold, gold])
            owners = torch.cat([owners.new_full((count,), document), owners])
            places = torch.cat([torch.arange(next_position - count, next_position), places])
        assert ((places.diff() == 1) | (owners.diff() != 0)).all(), "tokens of a document out of order"
        reading = Reading(keys, gold, owners, self._metric)
        fresh = torch.arange(count, len(owners))
        found: Recent | RecentGold
        if self._temperatures is None:
            found = reading.look_back(fresh, self._size)
        else:
            found = reading.gold_before(fresh, self._size, self._temperatures)
        kept = slice(-min(int((owners == owners[-1]).sum()), self._size), None)
        self._last = (keys[kept].clone(), gold[kept].clone(), int(owners[-1]), int(places[-1]) + 1)
        return found


@dataclass(frozen=True, slots=True)
class Reading:
    """Whole documents, one after another, after one pass of the model: n tokens."""

    keys: Tensor
    """float32, shape (n, d)."""

    gold: Tensor
    """The tokens, int64, shape (n,)."""

    documents: Tensor
    """Of each token; those of a document are together and in order; int64, shape (n,)."""

    metric: Metric | str
    """How distances are measured."""

    def look_back(self, tokens: Tensor, size: int) -> Recent:
        """Look back from some tokens.

        Args:
            tokens: their indices, int64, shape (m,), ascending.
            size: how many tokens back to reach at most.
        """
        return look_back(self.keys, self.gold, tokens, self._starts()[tokens], size, self.metric)

    def gold_before(self, tokens: Tensor, size: int, temperatures: Sequence[float]) -> RecentGold:
        """Look back from some tokens, a few at a time, and keep what each gives to the token that came."""
        starts, parts, ascending = self._starts(), list[RecentGold](), tuple(sorted(temperatures))
        for some in torch.split(tokens, _BLOCK_ROWS):
            recent = look_back(self.keys, self.gold, some, starts[some], size, self.metric)
            row, column = (recent.tokens == self.gold[some, None]).nonzero(as_tuple=True)
            nearest, probs = recent.nearest, torch.empty(len(some), len(ascending))
            gaps = nearest.where(nearest.isfinite(), 0)[:, None] - recent.distances
            for chain in halving(ascending):
                powers = (gaps / chain[0]).exp_()
                for temperature in chain:
                    if temperature != chain[0]:
                        powers.square_()
                    gold = torch.zeros(len(some)).index_add_(0, row, powers[row, column])
                    shares = gold / powers.sum(1).clamp_(min=LEAST_PROBABILITY)
                    probs[:, ascending.index(temperature)] = shares.clamp_(max=1.0)
            parts.append(RecentGold(nearest, recent.counts, probs, ascending))
        return RecentGold.joined(parts)

    def _starts(self) -> Tensor:
        """The first token of each token's document."""
        rows = torch.arange(len(self.documents))
        begins = torch.cat([torch.tensor([True]), self.documents.diff() != 0])
        return rows.where(begins, 0).cummax(0).values
