"""Weights of domains: against a brute-force optimum and a mixture in numpy, and what each call searches."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knnstore.datastore import Neighbors
from knnstore.errors import ConfigError, DomainNotFoundError
from knnstore.lm import (
    DomainWeights,
    Evidence,
    KNNSettings,
    NeighborSums,
    TokenTable,
)
from knnstore.lm.calibration.fits.domains import DomainEvidence, fit_domains, fit_mixture_weights
from knnstore.lm.components import search_records
from knnstore.store import Selection
from tests.lm.phrases import documents, phrases, text, words


def loss(probs: np.ndarray, weights: np.ndarray) -> float:
    return float(-np.log(probs @ weights).mean())


@given(st.integers(0, 10_000), st.sampled_from([0.1, 0.5, 2.0]))
def test_no_weights_of_a_fine_grid_are_likelier(seed, peakedness):
    probs = np.random.default_rng(seed).beta(peakedness, 2, (120, 3)) + 1e-6
    found = fit_mixture_weights(torch.from_numpy(probs)).numpy()
    assert found.sum() == pytest.approx(1)
    points = [(a, b, 100 - a - b) for a, b in itertools.product(range(101), repeat=2) if a + b <= 100]
    losses = -np.log(probs @ np.array(points).T / 100).mean(0)
    assert -np.log(probs @ found).mean() <= losses.min() + 2e-5


def made(seed: int = 0, tokens: int = 600) -> DomainEvidence:
    """Three domains at four temperatures: the first knows half of the tokens, the third nothing."""
    rng = np.random.default_rng(seed)
    lm = rng.uniform(0.01, 0.3, tokens).astype(np.float32)
    knn = rng.uniform(0, 0.2, (3, tokens, 4)).astype(np.float32)
    half = tokens // 2
    for point, gain in enumerate((0.3, 0.5, 0.7, 0.4)):
        knn[0, :half, point] += gain
        knn[1, half:, point] += 0.8 - gain
    knn[2] = 1e-6
    found = np.ones((3, tokens), bool)
    found[1, ::5] = False
    knn[1, ::5] = lm[::5, None]
    return DomainEvidence(
        8, ("a", "b", "c"), torch.tensor([1.0, 2.0, 4.0, 8.0]),
        torch.from_numpy(knn), torch.from_numpy(found), torch.from_numpy(lm),
    )  # fmt: skip


def test_weights_and_temperatures_are_the_best_of_all():
    evidence = made()
    fitted = fit_domains(evidence)
    mixer = fitted.mixer
    temperatures = [fitted.temperature * factor for factor in mixer.temperature_factors]
    assert temperatures[:2] == pytest.approx([4.0, 1.0])
    assert mixer.lambdas[2] == 0
    mixed, lam = evidence.log_probs(fitted, torch.arange(600))
    best = min(
        loss(
            np.stack([evidence.lm, evidence.knn[0, :, first], evidence.knn[1, :, second]], 1),
            np.array([20 - a - b, a, b]) / 20,
        )
        for first, second in itertools.product(range(4), repeat=2)
        for a, b in itertools.product(range(20), repeat=2)
        if a + b < 20
    )
    assert -float(mixed.double().mean()) < best + 1e-4
    assert float(lam[0]) == pytest.approx(mixer.lambdas[0])
    assert float(lam[1]) == pytest.approx(sum(mixer.lambdas))
    half = torch.arange(600) < 300
    assert fit_domains(evidence.select_tokens(half)).mixer.lambdas[0] > mixer.lambdas[0]


@given(st.integers(0, 10_000))
def test_the_mixture_is_that_of_separate_distributions(seed):
    rng = np.random.default_rng(seed)
    n, k, vocabulary = 5, 4, 6
    mixer = DomainWeights(("a", "b", "c"), (0.5, 0.0, 0.3), (1.0, 9.0, 0.5))
    distances = np.sort(rng.exponential(5, (n, 2, k)), axis=2).astype(np.float32)
    distances[rng.random((n, 2)) < 0.3] = np.inf
    distances[:, :, -1][rng.random((n, 2)) < 0.3] = np.inf
    tokens = rng.integers(0, vocabulary, (n, 2 * k))
    searches = [
        NeighborSums(
            torch.from_numpy(distances[:, at]),
            torch.from_numpy(tokens[:, at * k : at * k + k]),
        )
        for at in range(2)
    ]
    found = mixer.weigh(Evidence(torch.zeros(n), searches), 2.0)
    for row in range(n):
        expected, total = np.zeros(vocabulary), 0.0
        for at, (lam, temperature) in enumerate(((0.5, 2.0), (0.3, 1.0))):
            near = distances[row, at]
            if np.isinf(near[0]):
                continue
            total += lam
            mass = np.exp(-(near - near[0]) / temperature)
            np.add.at(expected, tokens[row, at * k : at * k + k], lam * mass / mass.sum())
        given = np.zeros(vocabulary)
        np.add.at(given, tokens[row], found.lam[row].item() * found.weights[row].numpy())
        assert given == pytest.approx(expected, abs=1e-6)
        assert float(found.lam[row]) == pytest.approx(total)


class Searched:
    """Knows the domains a and b, and remembers where it was searched."""

    home = type("Home", (), {"path": "somewhere"})

    def __init__(self) -> None:
        self.selections: list[Selection] = []

    def search(self, queries, k, selection):
        self.selections.append(selection)
        if selection.domains == ("c",):
            raise DomainNotFoundError("no domain 'c'")
        shape = (len(queries), k)
        return Neighbors(np.full(shape, ord(selection.domains[0])), np.zeros(shape, np.float32))


def test_only_domains_with_a_weight_are_searched_and_a_lost_one_is_reported_once(caplog):
    store, queries = Searched(), np.zeros((2, 3), np.float32)
    given = KNNSettings(3, mixer=DomainWeights(("b", "c", "a"), (0.5, 0.2, 0.0)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = Neighbors.concatenate(
                search_records(store, queries, replace(given, selection=Selection(tags=("t",))))
            )
    assert [selection.domains for selection in store.selections] == [("b",), ("c",)] * 2
    assert all(selection.tags == ("t",) for selection in store.selections)
    assert found.ids.tolist() == [[98] * 3 + [-1] * 3] * 2
    assert np.isinf(found.distances[:, 3:]).all()
    assert len(caplog.records) == 1
    store.selections.clear()
    for nowhere in (
        replace(given, selection=Selection(domains=("a", "d"))),
        replace(given, mixer=DomainWeights(("a",), (0.0,))),
    ):
        assert all((one.ids == -1).all() for one in search_records(store, queries, nowhere))
    assert store.selections == []


@pytest.mark.parametrize(
    ("domains", "lambdas", "factors"),
    [
        ((), (), ()),
        (("a",), (0.1, 0.2), ()),
        (("a", "a"), (0.1, 0.2), ()),
        (("a", "b"), (0.6, 0.6), ()),
        (("a",), (-0.1,), ()),
        (("a",), (float("nan"),), ()),
        (("a",), (0.5,), (0.0,)),
        (("a",), (0.5,), (1.0, 1.0)),
    ],
)
def test_weights_that_make_no_sense_are_refused(domains, lambdas, factors):
    with pytest.raises(ConfigError, match="domains"):
        DomainWeights(domains, lambdas, factors)


RNG = np.random.default_rng(11)
OF_A, OF_B = phrases(RNG, 20, 4, 44), phrases(RNG, 20, 50, 90)


@pytest.fixture(scope="module")
def filled(make_lm):
    """A home with the domains a and b, and one of noise."""
    stored = {
        "a": documents(RNG, OF_A, "a", 8),
        "b": documents(RNG, OF_B, "b", 3),
        "noise": [words(RNG, 99) for _ in range(2)],
    }
    with make_lm(stored, max_length=32, stride=16).store as store:
        return store.home.path


MIXER = DomainWeights(("a", "b", "noise"), (0.3, 0.4, 0.0), (1.0, 2.0, 1.0))


def test_evaluation_forward_and_explanations_agree_with_domains_searched_apart(lm):
    given, held_out = KNNSettings(8, 3.0, MIXER), text(RNG, OF_A + OF_B)
    table = TokenTable()
    found = lm.evaluate([held_out], given, table=table)
    rows = list(table.rows(lm.tokenizer))
    alone = {}
    for domain, temperature in (("a", 3.0), ("b", 6.0)):
        only = TokenTable()
        knn = KNNSettings(8, temperature, lam=0.5, selection=Selection(domains=(domain,)))
        lm.evaluate([held_out], knn, table=only)
        alone[domain] = list(only.rows(lm.tokenizer))
    for row, a, b in zip(rows, alone["a"], alone["b"], strict=True):
        assert row["p"] == pytest.approx(0.3 * row["p_lm"] + 0.3 * a["p_knn"] + 0.4 * b["p_knn"], rel=1e-4)
        assert row["distance"] == pytest.approx(min(a["distance"], b["distance"]))
        assert row["lambda"] == pytest.approx(0.7)
    assert found.knn_ppl == pytest.approx(np.exp(-np.mean(np.log([row["p"] for row in rows]))), rel=1e-5)
    ids = torch.tensor([[lm.tokenizer.bos_token_id, *lm.reader.tokenize(held_out).tolist()]])[:, :20]
    logits = lm(ids, knn=given).logits[0].detach()
    assert logits.exp().sum(1).tolist() == pytest.approx([1] * 20, abs=1e-4)
    predicted = logits[torch.arange(19), ids[0, 1:]].exp().tolist()
    assert predicted == pytest.approx([row["p"] for row in rows[:19]], rel=1e-3)
    explained = lm.explain(" ".join(held_out.split()[:6]), given, neighbors=16)
    assert {source.domain for source in explained[5].neighbors} == {"a", "b"}
    assert sum(source.share for source in explained[5].neighbors) == pytest.approx(1, abs=1e-4)
    distances = [source.distance for source in explained[5].neighbors]
    assert distances == sorted(distances)


def test_a_domain_that_goes_gives_its_weight_back(lm):
    given = KNNSettings(8, 3.0, MIXER)
    held_out = text(RNG, OF_A)
    ids = torch.tensor([[lm.tokenizer.bos_token_id, *lm.reader.tokenize(held_out).tolist()]])[:, :9]

    class Removing:
        """Removes a domain after the third token."""

        def __init__(self) -> None:
            self.seen = 0

        def put(self, value) -> None:
            self.seen += 1
            if self.seen == 4:  # the prompt comes first
                lm.store.remove_domain("b")

        def end(self) -> None: ...

    written = lm.generate(ids, max_new_tokens=6, do_sample=False, knn=given, streamer=Removing())
    assert written.shape == (1, 15)
    reduced = KNNSettings(8, 3.0, DomainWeights(("a",), (0.3,)))
    both = {knn: lm.generate(ids, max_new_tokens=6, num_beams=2, knn=knn) for knn in (given, reduced)}
    assert torch.equal(*both.values())
    assert lm.evaluate([held_out], given).knn_ppl == pytest.approx(lm.evaluate([held_out], reduced).knn_ppl)
