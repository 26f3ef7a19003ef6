"""Neighbors and distances of an index, chosen apart."""

import numpy as np
import pytest
import torch
from knnstore_research.key_probing import nearest_keys
from knnstore_research.rough_search import RoughIndex, replace_neighbors

from knnstore.datastore import Metric
from tests.lm.scored import scored_text

pytest.importorskip("faiss")


@pytest.mark.parametrize("metric", Metric)
def test_an_index_finds_the_nearest_of_its_decoded_keys(metric) -> None:
    rng = np.random.default_rng(0)
    keys, queries = (rng.normal(size=(count, 16)).astype(np.float32) for count in (4000, 9))
    index = RoughIndex(keys, metric, "IVF16,PQ4")
    rows = index.find_rows(queries, 400)  # visits all lists
    _, expected = nearest_keys(torch.from_numpy(queries), torch.from_numpy(index.decoded), 400, metric)
    shared = [len(set(row) & set(other)) for row, other in zip(rows.tolist(), expected.tolist(), strict=True)]
    assert min(shared) >= 398  # of equally far ones either
    assert float(np.abs(index.decoded - keys).mean()) > 0.1, "codes are rough"


def test_the_neighbors_of_a_text_are_replaced_in_order_of_their_distances() -> None:
    rng = np.random.default_rng(1)
    keys = torch.from_numpy(rng.normal(size=(30, 4)).astype(np.float32))
    queries, tokens = keys[:5] + 0.01, torch.arange(30) % 3
    rows = torch.tensor([[7, 0, 3], [1, 2, -1], [2, 9, 5], [-1, -1, 3], [8, 4, 6]])
    nothing = torch.full((5, 1), torch.inf)
    scored = scored_text(
        torch.zeros(5),
        torch.zeros(5),
        nothing,
        nothing < 0,
        torch.zeros(5, dtype=torch.int64),
        keys=queries,
        targets=tokens[:5],
    )
    found = replace_neighbors(scored, rows, tokens, keys.numpy(), Metric.L2)
    expected = (queries[:, None] - keys[rows]).square().sum(2).where(rows >= 0, torch.inf)
    order = expected.argsort(1)
    torch.testing.assert_close(found.distances, expected.gather(1, order))
    hits = (tokens[rows] == tokens[:5, None]) & (rows >= 0)
    is_found = found.distances.isfinite()
    assert torch.equal(found.sums.hits & is_found, hits.gather(1, order))
    assert bool(found.sums.hits[:, 0].all()), "each token's own key is the nearest"
