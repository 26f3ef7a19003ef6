"""Calibrating a store that has cells: each candidate against the evaluation that visits for real."""

import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.documents import TextDocument
from knnstore.lm import DomainWeights, KNNSettings
from knnstore.lm.calibration import candidates, judging
from knnstore.lm.calibration.candidates import choose_probes, compare_candidates, measure_probes
from knnstore.lm.calibration.scored_text import ScoredText, score_once
from knnstore.lm.calibration.searches import FurtherSearches
from knnstore.lm.mixing import CellSums, ProbedCells
from knnstore.store import EVERYTHING
from tests.lm.phrases import documents, phrases

RNG = np.random.default_rng(5)
OF_A, OF_B = phrases(RNG, 20), phrases(RNG, 12, low=30)
HELD_OUT = documents(RNG, OF_A, "h", 8) + documents(RNG, OF_B, "i", 4)


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home of cells with two domains, in each of which there are several."""
    lm = make_lm(max_length=32, stride=16, store="cells", params={"cells": 12})
    lm.add(documents(RNG, OF_A, "a", 8), domain="a")
    lm.add(documents(RNG, OF_B, "b", 6), domain="b")
    lm.store.close()
    return lm.store.home.path


def searched(lm, held_out=HELD_OUT, left_out=MappingProxyType({})) -> FurtherSearches:
    scored = score_once(
        lm.store, lm.reader, held_out, k=1, probes=16, selection=EVERYTHING, left_out=left_out
    )
    return FurtherSearches(lm.store, scored, held_out, EVERYTHING, left_out)


def visited(further: FurtherSearches, *probes: int) -> ScoredText:
    return replace(further.scored, visited=further.search_with_probes(probes))


def ppl(log_probs: torch.Tensor) -> float:
    return math.exp(-float(log_probs.double().mean()))


@pytest.mark.slow
def test_candidates_agree_with_the_evaluation(lm) -> None:
    """All mixers with all probes, and what is in force; what is saved has the probes that were chosen."""
    lm.knn = KNNSettings(temperature=lm.knn.temperature, lam=0.3, probes=16)
    found = lm.calibrate(HELD_OUT)
    candidates = {(one.name, one.settings.probes): one for one in found.comparison.candidates}
    tried, chosen = found.comparison.probes, found.comparison.chosen_probes
    assert list(tried) == [4, 8, 16, 32, 64]
    assert chosen == min(probes for probes, ppl in tried.items() if ppl <= 1.005 * min(tried.values()))
    assert {probes for name, probes in candidates if "domains" not in name} == {chosen, None}
    names = {name for name, _ in candidates}
    assert {"gate", "bins 8 + T", "domains"} <= names
    scored = visited(searched(lm), 4, 8, 16, 32, 64)
    near = 3e-3 if chosen == 16 else 1e-2  # what mixers see of the nearest records is of 16 cells
    for (name, probes), one in candidates.items():
        if probes is not None and "domains" not in name:
            mixed, lam = scored.log_probs(one.settings)
            evaluated = lm.evaluate(HELD_OUT, one.settings)
            assert ppl(mixed) == pytest.approx(evaluated.knn_ppl, rel=near), name
            assert float(lam.mean()) == pytest.approx(evaluated.lam, rel=2 * near, abs=1e-6), name
    assert lm.knn == found.settings
    current = lm.calibrate(HELD_OUT[1:]).comparison.current  # which are not all that it was fitted to
    assert current.settings == found.settings


@pytest.mark.slow
def test_one_pass_over_cells_is_as_a_pass_for_each_number_of_them(lm) -> None:
    further = searched(lm)
    together = further.search_with_probes([1, 2, 3, 7])
    for probes, of in together.items():
        alone = further.search_with_probes([probes])[probes]
        assert torch.equal(of.found, alone.found)
        torch.testing.assert_close(of.knn, alone.knn, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(together[2].knn, together[3].knn, atol=1e-3)


@pytest.mark.slow
def test_probes_are_chosen_on_the_beginnings_of_documents(lm, monkeypatch) -> None:
    """The sample gives what the whole text of the same beginnings gives."""
    monkeypatch.setattr(judging, "MIN_TOKENS", 300)
    monkeypatch.setattr(judging, "MIN_DOCUMENTS", 4)
    monkeypatch.setattr(candidates, "_SAMPLE_TOKENS", 500)
    monkeypatch.setattr(candidates, "_SAMPLE_DOCUMENTS", 6)
    further, probes = searched(lm), [1, 2, 7]
    sample, by_probes = measure_probes(further, probes)
    counts = torch.unique(sample.documents, return_counts=True)
    assert counts[0].tolist() == list(range(0, len(HELD_OUT), math.ceil(len(HELD_OUT) / 6)))
    assert 500 <= len(sample) < len(further.scored)
    texts = [
        lm.reader.tokenize(HELD_OUT[at].text)[:count]
        for at, count in zip(*(of.tolist() for of in counts), strict=True)
    ]
    begun = [TextDocument(f"{at}", lm.reader.decode(tokens.tolist())) for at, tokens in enumerate(texts)]
    assert list(by_probes) == probes
    assert by_probes == pytest.approx(measure_probes(searched(lm, begun), probes)[1], rel=1e-3)
    monkeypatch.setattr(candidates, "_SAMPLE_TOKENS", len(further.scored) // 2 + 1)
    whole, by_whole = measure_probes(further, probes)
    assert len(whole) == len(further.scored)
    assert by_whole == compare_candidates(whole, fits={}).probes
    with monkeypatch.context() as short:  # as of documents that are very uneven
        short.setattr(candidates, "_SAMPLE_TOKENS", 500)
        short.setattr(candidates, "_sample_beginnings", lambda _: torch.arange(20))
        assert len(measure_probes(further, [2])[0]) == len(further.scored)
    uneven = torch.arange(128).repeat_interleave(torch.tensor([15, 300]).repeat(64))
    for tokens, sample_tokens in ((torch.arange(300).repeat_interleave(1000), 500), (uneven, 0)):
        monkeypatch.setattr(candidates, "_SAMPLE_TOKENS", 500)
        found = candidates._sample_beginnings(tokens)
        assert sample_tokens <= len(found) <= 1.2 * 500
        assert found.tolist() == sorted(set(found.tolist()))
    few = replace(further.scored, visited=further.search_with_probes([2]))
    assert compare_candidates(few, fits={}, by_probes={1: 9.0, 2: 5.0}).chosen_probes == 2


@given(st.dictionaries(st.integers(1, 512), st.floats(1, 1e3), min_size=1))
def test_the_fewest_probes_are_chosen_that_are_enough(ppls: dict[int, float]) -> None:
    """None that is fewer is within half a percent of the lowest perplexity."""
    chosen, lowest = choose_probes(ppls), min(ppls.values())
    assert ppls[chosen] <= 1.005 * lowest
    assert all(ppl > 1.005 * lowest for probes, ppl in ppls.items() if probes < chosen)


def test_documents_that_are_left_out_are_in_no_sum(lm) -> None:
    held_out = [*HELD_OUT[:2], *HELD_OUT[8:10]]
    lm.add(held_out[1:3], domain="b")
    duplicates = {one.content_hash: {one.content_hash} for one in held_out[1:3]}
    further = searched(lm, held_out, duplicates)
    scored = visited(further, 3)
    given = KNNSettings(temperature=float(scored.visited[3].temperatures[8]), lam=0.4, probes=3)
    honest = lm.evaluate(held_out, given, leave_out=True).knn_ppl
    assert ppl(scored.log_probs(given).log_probs) == pytest.approx(honest, rel=1e-4)
    assert honest > lm.evaluate(held_out, given).knn_ppl * 1.02


@pytest.mark.slow
def test_domains_visited_apart_agree_with_the_evaluation(lm) -> None:
    further = searched(lm)
    evidence = further.search_each_domain(["a", "b"], 64, 3)
    temperature = float(evidence.temperatures[8])
    given = KNNSettings(64, temperature, DomainWeights(("b", "a"), (0.2, 0.5), (2.0, 1.0)), probes=3)
    found = lm.evaluate(HELD_OUT, given)
    assert ppl(evidence.log_probs(given, torch.arange(len(further.scored))).log_probs) == pytest.approx(
        found.knn_ppl, rel=1e-4
    )
    scored = visited(further, 4)
    kept = compare_candidates(scored, given, fits={}, domains=evidence).current
    assert kept.held_out.ppl == pytest.approx(found.knn_ppl, rel=1e-4)
    for other in (replace(given, probes=None), KNNSettings(k=8, lam=0.4), KNNSettings(lam=0.4, probes=5)):
        assert compare_candidates(scored, other, fits={}, domains=evidence).current is None


def test_p_knn_on_a_grid_is_what_it_is_at_each_temperature() -> None:
    """Also for a query that visits nothing."""
    generator = torch.Generator().manual_seed(0)
    gold = torch.tensor([1, 2, 3, 1])
    cells = [
        ProbedCells(
            torch.tensor([[0, 2]]), torch.tensor([[1, 1, 3, 2]]), torch.rand(1, 2, 4, generator=generator) * 9
        ),
        ProbedCells(
            torch.tensor([[2, 1]]), torch.tensor([[3, 2]]), torch.rand(1, 2, 2, generator=generator) * 9
        ),
    ]  # fmt: skip
    found = CellSums(cells, gold)
    near, tokens = found.find_nearest(3)
    of_two = torch.cat([cells[0].distances[0, 1], cells[1].distances[0, 0]])  # of query 2, in both cells
    least = of_two.sort()
    assert torch.equal(near[2], least.values[:3])
    assert tokens[2].tolist() == torch.tensor([1, 1, 3, 2, 3, 2])[least.indices[:3]].tolist()
    for count in (1, 7):
        temperatures = 0.5 * 2 ** (0.5 * torch.arange(count))
        expected = torch.stack([found.weights(float(one))[:, 0] for one in temperatures], 1)
        torch.testing.assert_close(found.target_weights(temperatures), expected, atol=1e-6, rtol=1e-4)
    assert not expected[3].any()
