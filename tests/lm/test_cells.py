"""Sums over whole cells: against every neighbor searched for, and against numpy over the cells visited."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from knnstore.catalog import Catalog
from knnstore.datastore import split_visits, tokens_from_ids
from knnstore.errors import ConfigError
from knnstore.lm import BinnedLambda, CacheSettings, DomainWeights, KNNSettings
from knnstore.lm.scoring.token_scores import score_documents
from knnstore.lm.transfers import upload_floats
from knnstore.store import Selection
from tests.lm.phrases import documents, phrases, words

RNG = np.random.default_rng(11)
OF_A, OF_B = phrases(RNG, 12), phrases(RNG, 8, low=30)
ALL = 1 << 12
K_ALL = 4096
HELD_OUT = documents(RNG, OF_A, "h", 3) + documents(RNG, OF_B, "i", 2)


@pytest.fixture(
    scope="module", params=["l2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("ip", "device"))]
)
def filled(make_lm, request):
    """A home of cells with two domains, the second of which is one cell, for each metric, and on a device."""
    metric, device = ("l2", "cpu") if request.param == "device" else (request.param, "none")
    params = {"cells": 16, "device": device}
    lm = make_lm(max_length=32, stride=16, store="cells", params=params, metric=metric)
    lm.add(documents(RNG, OF_A, "a", 8), domain="a", tags=["t"])
    lm.add(documents(RNG, OF_B, "b", 3), domain="b")
    lm.store.close()
    return lm.store.home.path


def temperature(lm) -> float:
    """One at which far records count too."""
    return 30.0 * lm.knn.temperature


MIXERS = {
    "fixed": {"lam": 0.4},
    "bins + T": {"mixer": BinnedLambda((5.0, 9.0), (0.6, 0.4, 0.1), (0.5, 1.0, 3.0))},
    "domains": {"mixer": DomainWeights(("a", "b"), (0.3, 0.2), (1.0, 2.0))},
    "cache": {"lam": 0.4, "cache": CacheSettings(64, 20.0, 0.2)},
    "one domain": {"lam": 0.4, "selection": Selection(domains=("b",))},
    "tag": {"lam": 0.4, "selection": Selection(tags=("t",))},
}


@pytest.mark.parametrize(
    ("filled", "mixer"),
    [
        *(("l2", name) for name in MIXERS),
        *(pytest.param(one, "fixed", marks=pytest.mark.slow) for one in ("ip", "device")),
    ],
    indirect=["filled"],
)
def test_all_cells_are_all_neighbors(lm, mixer) -> None:
    """Evaluating, explaining and `forward` give what a search for every record gives."""
    by_k = KNNSettings(k=K_ALL, temperature=temperature(lm), **MIXERS[mixer])
    by_cells = replace(by_k, k=1, probes=ALL)
    one, other = lm.evaluate(HELD_OUT, by_k), lm.evaluate(HELD_OUT, by_cells)
    assert other.knn_ppl == pytest.approx(one.knn_ppl, rel=1e-5)
    assert (other.lam, other.helped) == (pytest.approx(one.lam, rel=1e-5), one.helped)
    text = " ".join(HELD_OUT[0].text.split()[:25])
    for expected, found in zip(lm.explain(text, by_k), lm.explain(text, by_cells), strict=True):
        assert (found.p, found.p_knn) == (
            pytest.approx(expected.p, rel=1e-4),
            pytest.approx(expected.p_knn, rel=1e-4, abs=1e-7),
        )
        shares = [[source.share for source in one.neighbors] for one in (expected, found)]
        if mixer != "domains":  # in which equally near records weigh differently
            assert shares[0] == pytest.approx(shares[1], rel=1e-3, abs=1e-7)
    ids = torch.tensor([lm.reader.tokenize(text).tolist()])
    with torch.no_grad():
        logits = [lm(ids, knn=settings).logits for settings in (by_k, by_cells)]
    assert torch.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("probes", [1, 3])
def test_p_knn_is_the_sum_over_the_cells_visited(lm, probes) -> None:
    """Of evaluation and of `explain`, against numpy over the records that the engine says are visited."""
    settings = KNNSettings(temperature=temperature(lm), lam=0.4, probes=probes)
    losses = []
    for part in score_documents(lm.store, lm.reader, HELD_OUT, settings):
        total, gold = np.zeros((2, len(part)))
        for visit in split_visits(lm.store.visit(part.read.keys.numpy(), probes)):
            weights = np.exp(-visit.distances.astype(np.float64) / settings.temperature)
            total[visit.queries] += weights.sum(1)
            hits = tokens_from_ids(visit.ids) == part.targets.numpy()[visit.queries, None]
            gold[visit.queries] += (weights * hits).sum(1)
        assert 0 < (total > 0).mean() == 1
        losses.append(-np.log(0.4 * gold / total + 0.6 * part.lm_log_probs.double().exp().numpy()))
    expected = math.exp(np.concatenate(losses).mean())
    assert lm.evaluate(HELD_OUT, settings).knn_ppl == pytest.approx(expected, rel=1e-5)
    found = [token.p for document in HELD_OUT for token in lm.explain(document.text, settings)]
    assert math.exp(-np.log(found).mean()) == pytest.approx(expected, rel=1e-5)
    fewer = lm.evaluate(HELD_OUT, replace(settings, probes=ALL)).knn_ppl
    assert fewer != pytest.approx(expected, rel=1e-5), "the cells do not differ"


@pytest.mark.parametrize("filled", ["l2"], indirect=True)
def test_a_step_on_the_cpu_asks_twice_for_the_revision(lm, monkeypatch) -> None:
    """Before the search and after it; to learn that no keys are on the device takes no question."""
    settings, ids = KNNSettings(temperature=temperature(lm), lam=0.4, probes=2), torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        lm(ids, knn=settings)
        asked, ask = list[int](), Catalog.revision
        monkeypatch.setattr(Catalog, "revision", lambda self: asked.append(1) or ask(self))
        lm(ids, knn=settings)
    assert len(asked) == 2


def test_numbers_of_settings_are_uploaded_once_and_may_be_used_to_train() -> None:
    device = torch.device("cpu")
    with torch.inference_mode():
        numbers = upload_floats((0.25, 0.7), device)
    assert upload_floats((0.25, 0.7), device) is numbers
    assert not numbers.is_inference()
    assert torch.equal(numbers, torch.tensor([0.25, 0.7]))


@pytest.mark.parametrize("filled", ["l2"], indirect=True)
def test_what_was_removed_is_in_no_sum(lm) -> None:
    """Removing a domain gives the digits from before it was added; so does a document left out."""
    settings = KNNSettings(temperature=temperature(lm), lam=0.4, probes=2)
    before = lm.evaluate(HELD_OUT, settings).knn_ppl
    lm.add([words(RNG, 99) for _ in range(3)], domain="noise")
    assert lm.evaluate(HELD_OUT, replace(settings, probes=ALL)).knn_ppl != before
    lm.store.remove_domain("noise")
    assert lm.evaluate(HELD_OUT, settings).knn_ppl == before
    lm.add(HELD_OUT[:1], domain="a")
    own = lm.evaluate(HELD_OUT[:1], replace(settings, probes=1)).knn_ppl
    apart = lm.evaluate(HELD_OUT[:1], replace(settings, probes=1), leave_out=True).knn_ppl
    lm.store.remove_document("h0", domain="a")
    assert apart > own
    assert lm.evaluate(HELD_OUT[:1], replace(settings, probes=1)).knn_ppl == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize("filled", ["l2"], indirect=True)
@pytest.mark.parametrize("group", [None, 99], ids=["in a domain", "apart"])
def test_records_of_no_live_document_are_in_no_sum(lm, group) -> None:
    """Of one that is just being added, say; nor do they leave a query without anything."""
    settings = KNNSettings(temperature=temperature(lm), lam=0.4, probes=ALL)
    before = lm.evaluate(HELD_OUT, settings).knn_ppl
    _, keys, groups = next(lm.store.datastore.iterate(batch_size=3))
    orphans = np.arange(3) + (1 << 45)
    lm.store.datastore.add(orphans, keys, groups if group is None else np.full(3, group, np.int32))
    for visit in split_visits(lm.store.visit(keys, 1)):
        assert not np.isin(visit.ids, orphans).any()
    assert lm.evaluate(HELD_OUT, settings).knn_ppl == pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize("filled", ["l2"], indirect=True)
def test_probes_count_where_there_are_cells_alone(lm, tmp_path) -> None:
    """They are saved with the settings; after a move to an engine without cells k counts."""
    settings = KNNSettings(k=7, temperature=temperature(lm), lam=0.4, probes=2)
    lm.store.move("faiss", str(tmp_path / "elsewhere"))
    by_k = lm.evaluate(HELD_OUT, replace(settings, probes=None)).knn_ppl
    assert lm.evaluate(HELD_OUT, settings).knn_ppl == by_k
    for bad in (0, -1, True, 2.0):
        with pytest.raises(ConfigError, match="probes must be"):
            KNNSettings(probes=bad)  # type: ignore[arg-type]
