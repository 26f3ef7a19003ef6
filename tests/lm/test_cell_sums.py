"""Sums over the cells that queries visit, against sums over all pairs one by one."""

import numpy as np
import pytest
import torch

from knnstore.lm.mixing import CellSums, ProbedCells, group_into_halving_chains

RNG = np.random.default_rng(9)
QUERIES, TOKENS = 12, 5


def cells(count: int) -> list[ProbedCells]:
    """Some alone, some beside each other, where queries and records may be missing."""
    made = []
    for number in range(count):
        beside, m, r = 1 + number % 2, RNG.integers(1, 7), RNG.integers(2, 90)
        queries = np.stack([RNG.permutation(QUERIES)[:m] for _ in range(beside)])
        distances = RNG.random((beside, m, r)) * 60
        if beside > 1:
            queries[1, -1], distances[1, -1], distances[0, :, 0] = -1, np.inf, np.inf
        tokens = torch.from_numpy(RNG.integers(0, TOKENS, (beside, r)))
        asked, away = torch.from_numpy(queries), torch.from_numpy(distances.astype(np.float32))
        made.append(ProbedCells(asked, tokens, away))
    return made


def met_by(query: int, some: list[ProbedCells]) -> np.ndarray:
    """Distance and token of all that one query met, shape (2, r)."""
    rows = [
        (float(away), int(token))
        for one in some
        for at in range(len(one.queries))
        for row in (one.queries[at] == query).nonzero()[:, 0].tolist()
        for away, token in zip(one.distances[at, row], one.tokens[at], strict=True)
        if away.isfinite()
    ]
    return np.array(rows, np.float64).reshape(-1, 2).T


def test_squares_are_what_separate_exponentials_are() -> None:
    """A gate's temperatures, each twice the one before it: all from the exponential of the largest."""
    some, gold = cells(30), torch.from_numpy(RNG.integers(0, TOKENS, QUERIES))
    temperatures = [7.3 * factor for factor in (0.25, 0.5, 1.0, 2.0, 4.0)]
    visited = CellSums(some, gold)
    visited.precompute_weights(temperatures)
    each = torch.linspace(3, 30, QUERIES)
    for at, of in [(one, visited.weights(one)) for one in temperatures] + [(each, visited.weights(each))]:
        wanted = np.zeros((QUERIES, 2))
        for query in range(QUERIES):
            distances, tokens = met_by(query, some)
            powers = np.exp(-distances / float(torch.as_tensor(at).expand(QUERIES)[query]))
            share = powers[tokens == int(gold[query])].sum() / powers.sum()
            wanted[query] = share, 1 - share
        assert of.numpy() == pytest.approx(wanted, abs=1e-6)
    alone = torch.stack([CellSums(some, gold).weights(one) for one in temperatures])
    assert torch.stack([visited.weights(one) for one in temperatures]).numpy() == pytest.approx(
        alone.numpy(), abs=1e-6
    )
    for of in visited, CellSums(some, gold, TOKENS):  # a vocabulary changes `weights`, not `target_weights`
        assert torch.equal(of.target_weights(torch.tensor([7.3 * 4]))[:, 0], visited.weights(7.3 * 4)[:, 0])


@pytest.mark.parametrize("vocabulary", [None, TOKENS])
@pytest.mark.parametrize("rows", [slice(3, 9), torch.tensor([7, 0, 11]), torch.arange(QUERIES) % 3 == 1])
def test_some_of_the_queries_have_what_they_have_among_all(rows, vocabulary) -> None:
    some, gold = cells(30), torch.from_numpy(RNG.integers(0, TOKENS, QUERIES))
    every = CellSums(some, gold, vocabulary, features=4)
    chosen = every.select_rows(rows)
    assert torch.equal(chosen.nearest, every.nearest[rows])
    assert torch.equal(chosen.distances, every.distances[rows])
    assert torch.equal(chosen.distinct, every.distinct[rows])
    assert chosen.weights(7.3).numpy() == pytest.approx(every.weights(7.3)[rows].numpy(), abs=1e-6)


@pytest.mark.parametrize("k", [1, 8, 16, 64, 500])
def test_the_nearest_are_the_nearest_of_all_cells(k: int) -> None:
    """Also where a query met fewer than k, or none, and where a distance is negative."""
    some, gold = cells(9), torch.zeros(QUERIES + 1, dtype=torch.int64)
    some = [one._replace(distances=one.distances - 30) for one in some]
    distances, tokens = CellSums(some, gold).find_nearest(k)
    for query in range(QUERIES + 1):
        away, of_each = met_by(query, some)
        order = np.argsort(away)[:k]
        assert distances[query, : len(order)].numpy() == pytest.approx(away[order], abs=0)
        assert tokens[query, : len(order)].tolist() == of_each[order].tolist()
        assert distances[query, len(order) :].isinf().all()


def test_each_token_has_what_its_records_weigh() -> None:
    """Each query at a temperature of its own; one that met nothing gives nothing to any token."""
    some, gold = cells(9), torch.zeros(QUERIES + 1, dtype=torch.int64)
    temperatures = torch.linspace(3, 30, QUERIES + 1)
    found = CellSums(some, gold, TOKENS + 2).weights(temperatures)
    for query in range(QUERIES + 1):
        distances, tokens = met_by(query, some)
        powers = np.exp(-distances / float(temperatures[query]))
        wanted = np.bincount(tokens.astype(int), powers, TOKENS + 2)
        assert found[query].numpy() == pytest.approx(wanted / max(powers.sum(), 1e-30), abs=1e-6)


def test_only_halves_share_a_chain() -> None:
    assert group_into_halving_chains([1.0, 6.0, 2.0, 4.0, 3.0, 5.0]) == [[6, 3], [5], [4, 2, 1]]
    assert group_into_halving_chains([]) == []
