"""The network that chooses λ and T: what it finds, and that loading changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from knnstore.cli.fits import build_fit_row
from knnstore.errors import ConfigError, CorruptWeightsError, FingerprintMismatchError
from knnstore.lm import Interval, KNNLMForCausalLM, KNNSettings
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits.gate import fit_gate
from knnstore.lm.calibration.fits.mixers import fit_bins, fit_fixed
from knnstore.lm.calibration.scored_text import ScoredText, score_once
from knnstore.lm.mixing import (
    MAX_LAMBDA,
    Evidence,
    GateLambda,
    NeighborSums,
    Network,
    compute_gate_features,
    count_distinct_tokens,
    decode_gate,
    fit_network,
)
from knnstore.lm.settings import (
    collect_weights,
    create_weights_loader,
    settings_for,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.store import EVERYTHING, KNNStore, SavedSettings
from tests.lm.phrases import documents, phrases, words
from tests.lm.scored import scored_text, with_evidence

K = 8


def synthetic(n: int, seed: int) -> tuple[ScoredText, torch.Tensor]:
    """Tokens for which retrieval is right (all neighbors) or wrong (none), as the first component of the key
    tells; distances and confidence tell nothing."""
    rng = np.random.default_rng(seed)
    right = torch.from_numpy(rng.random(n) < 0.5)
    keys = torch.from_numpy(rng.standard_normal((n, 4)).astype(np.float32))
    keys[:, 0] = right.float() * 2 - 1
    noise = torch.from_numpy
    documents = torch.arange(n) // 50
    return scored_text(
        torch.full((n,), 0.05).log(),
        noise(-rng.random(n).astype(np.float32)),
        noise(rng.random((n, K)).astype(np.float32)).sort(1).values,
        right[:, None].repeat(1, K),
        documents,
        keys=keys,
        targets=torch.zeros(n, dtype=torch.long),
        lm_entropy=noise(rng.random(n).astype(np.float32)),
        distinct=torch.ones((n, 4), dtype=torch.int16),
        fitted_for={},
    ), right


def test_distinct_tokens_are_counted_up_to_powers_of_two() -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 9, (50, 70))
    distances = np.sort(rng.random((50, 70)).astype(np.float32), 1)
    distances[10:20, 5:] = np.inf
    distances[20] = np.inf
    found = count_distinct_tokens(torch.from_numpy(tokens), torch.from_numpy(distances))
    for row in range(50):
        for column, limit in enumerate([1, 2, 4, 8, 16]):
            near = {t for t, d in zip(tokens[row, :limit], distances[row, :limit], strict=True) if d < np.inf}
            assert found[row, column] == len(near)


@pytest.mark.slow
def test_a_gate_finds_the_feature_on_which_lambda_depends() -> None:
    (fitted, _), (other, right) = synthetic(4000, 0), synthetic(1000, 1)
    (evidence,) = gather_evidence(fitted, [K])
    settings = fit_gate(evidence, fitted)
    found = other.log_probs(settings)
    assert found.lam[right].min() > 0.9
    assert found.lam[~right].max() < 0.1
    # Oracle: λ = 1 and p = 1 where retrieval is right, λ = 0 and p = 0.05 elsewhere.
    best = float((~right).float().mean()) * np.log(0.05)
    assert float(found.log_probs.mean()) == pytest.approx(best, abs=0.05)
    bins = fit_bins(evidence, 8, 8, temperatures=True)
    assert float(other.log_probs(bins).log_probs.mean()) < best - 0.3
    assert fit_gate(evidence, fitted) == settings  # the same again


def test_a_gate_sees_each_of_its_features_in_its_own_unit() -> None:
    rng, n = np.random.default_rng(2), 40
    distances = np.sort(rng.exponential(30, (n, K)).astype(np.float32))
    distances[:5, 3:] = np.inf
    keys, distinct = rng.standard_normal((n, 3)).astype(np.float32), rng.integers(1, 9, (n, 4))
    surest, entropy = -rng.random(n).astype(np.float32), rng.random(n).astype(np.float32)
    of = torch.from_numpy
    seen = compute_gate_features(
        Evidence(
            of(surest), [NeighborSums(of(distances), known_distinct=of(distinct))], of(keys), of(entropy),
        ), K, 10.0,
    )  # fmt: skip
    last = np.where(np.isfinite(distances), distances, 0).max(1, keepdims=True)
    near = np.where(np.isfinite(distances), distances, last)[:, [0, 1, 3, 7]]
    expected = [surest[:, None], entropy[:, None], np.arcsinh(near / 10), np.log1p(distinct), keys]
    np.testing.assert_allclose(seen, np.concatenate(expected, 1), rtol=1e-5)
    network = fit_network(seen, lambda out, _: out.square().mean(), torch.arange(n) // 4, [0.0])
    apart = torch.arange(n) // 4 % 8 == 0
    torch.testing.assert_close(network.mean, seen[~apart].mean(0))
    torch.testing.assert_close(network.scale, seen[~apart].std(0))


@pytest.mark.slow
@pytest.mark.parametrize("length", [50, 400])
def test_when_to_stop_is_decided_by_documents_that_are_not_learned_from(length) -> None:
    documents = torch.arange(400) // length
    learned, judged = set[int](), set[int]()

    def loss(outputs, rows):
        (judged if torch.is_inference_mode_enabled() else learned).update(rows.tolist())
        return (outputs[:, 0] - 1).square().mean()

    fit_network(torch.randn(400, 3), loss, documents, [0.0])
    assert learned
    assert judged
    assert learned | judged == set(range(400))
    if length < 400:
        assert not {at // length for at in learned} & {at // length for at in judged}
    else:  # of a single document an eighth, in one piece
        assert judged == set(range(50))


def test_what_nothing_depends_on_stays_at_the_best_fixed_lambda() -> None:
    scored, _ = synthetic(4000, 2)
    scored.reading.keys[:, 0] = 0
    (evidence,) = gather_evidence(scored, [K])
    one, of_each = fit_fixed(evidence), fit_gate(evidence, scored)
    assert float((scored.log_probs(of_each).log_probs - scored.log_probs(one).log_probs).mean()) > -0.01
    # A table has no temperature of a gate, which chooses one for each token.
    assert (one.chooses_temperature, of_each.chooses_temperature) == (False, True)
    nothing = Interval(1.0, 1.0, 1.0)
    shown = [build_fit_row(each, 0.5, nothing, nothing)["temperature"] for each in (one, of_each)]
    assert shown == [one.temperature, None]


def test_what_never_varied_and_what_is_far_off_do_not_throw_a_network_off() -> None:
    torch.manual_seed(0)
    features = torch.cat(
        [torch.randn(4000, 1), torch.full((4000, 1), 7.3)], 1
    )  # the second is the same always

    def loss(outputs, rows):
        return (outputs[:, 0] - features[rows, 0]).square().mean()

    network = fit_network(features, loss, torch.arange(4000) // 100, [0.0])
    seen = torch.tensor([[1.0, 7.3], [1.0, 0.0], [1.0, -900.0]])
    assert network(seen)[:, 0].tolist() == pytest.approx([1.0] * 3, abs=0.2)
    far, farther = network(torch.tensor([[50.0, 7.3], [1e6, 7.3]]))
    assert far == farther


@pytest.mark.slow
def test_what_a_query_says_is_not_learned_by_heart() -> None:
    """Little text, a query of many features that say nothing, and one feature beside it that says all."""
    torch.manual_seed(0)
    features, others = torch.randn(2, 400, 101)
    features[:, :100] += 3.0  # a mean of their own
    others[:, :100] += 3.0
    noisy = features[:, 100] + 2 * torch.randn(400)

    def loss(outputs, rows):
        return (outputs[:, 0] - noisy[rows]).square().mean()

    def error(query):
        network = fit_network(features, loss, torch.arange(400) // 20, [0.0], query)
        return float((network(others)[:, 0] - others[:, 100]).square().mean())

    assert error(slice(0, 100)) < 0.9 * error(slice(0))


RNG = np.random.default_rng(7)
PHRASES = phrases(RNG, 20)
NOISE = [words(RNG, 60, 60, 100) for _ in range(20)]
TEXTS = documents(RNG, PHRASES, "t", 30, of=5)


@pytest.fixture(scope="module")
def lm(make_lm):
    return make_lm({"phrases": TEXTS[:10]}, max_length=64)


@pytest.fixture(scope="module")
def scored(lm):
    return score_once(lm.store, lm.reader, TEXTS[10:], k=K, selection=EVERYTHING)


@pytest.fixture(scope="module")
def gated(scored) -> KNNSettings:
    """A gate whose choices differ between tokens."""
    purpose = {**scored.fitted_for, "scale": 1.0, "k": K}
    gate = unlike(compute_gate_features(scored.evidence, K, 1.0), [0.0, 0.0]).to_weights(purpose)
    return KNNSettings(K, temperature=4.0, mixer=GateLambda(gate))


def unlike(features: torch.Tensor, start: list[float]) -> Network:
    """A network that was not fitted and gives each token another value."""
    torch.manual_seed(0)
    network = Network(features.mean(0), features.std(0).clamp(min=1e-6), start).eval()
    torch.nn.init.normal_(network.layers[-1].weight)
    return network.requires_grad_(requires_grad=False)


def test_forward_and_generation_use_the_gate_as_scoring_does(lm, scored, gated) -> None:
    ids = torch.tensor([[0, *lm.reader.tokenize(TEXTS[10].text).tolist()]])
    with torch.no_grad():
        whole = lm(ids, knn=gated).logits
        padded = lm(
            torch.cat([torch.full((1, 3), 2), ids], 1),
            attention_mask=torch.cat([torch.zeros(1, 3, dtype=torch.long), torch.ones_like(ids)], 1),
            position_ids=torch.cat(
                [torch.zeros(1, 3, dtype=torch.long), torch.arange(ids.shape[1])[None]], 1
            ),
            knn=gated,
        ).logits
    torch.testing.assert_close(padded[:, 3:], whole, atol=2e-3, rtol=1e-3)
    mixed, first = scored.log_probs(gated).log_probs, scored.documents == 0
    torch.testing.assert_close(
        whole[0, :-1].gather(1, ids[0, 1:, None])[:, 0], mixed[first], atol=5e-3, rtol=1e-2
    )
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 2, "num_beams": 2, "knn": gated}
    prompts = ids[:, :9]
    alone = lm.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    rows = torch.cat([torch.nn.functional.pad(ids[:, :7], (2, 0), value=2), prompts])
    together = lm.generate(rows, attention_mask=(rows != 2).long(), **options)
    assert together[1].tolist() == alone[0].tolist()


def test_saved_and_loaded_it_chooses_the_same(lm, scored, gated, tmp_path) -> None:
    for weights in collect_weights(gated):
        lm.store.save_weights(weights.tensors, weights.metadata)
    values = settings_to_dict(gated)
    del values["selection"]
    lm.store.save_settings(SavedSettings(values))
    with KNNStore.open(lm.store.home.path) as reader:
        loaded = settings_for(reader)
    assert loaded == gated
    assert scored.log_probs(gated).lam.std() > 0.1
    torch.testing.assert_close(scored.log_probs(loaded).lam, scored.log_probs(gated).lam, atol=0, rtol=0)
    copied = KNNLMForCausalLM.from_base(lm.base, lm.store, gated, lm.tokenizer)
    copied.save_pretrained(tmp_path)
    assert KNNLMForCausalLM.from_pretrained(tmp_path, store=lm.store).knn == gated
    with pytest.raises(ConfigError, match=r"need .*safetensors of a store"):
        settings_from_dict(values)


def test_a_gate_for_another_model_is_refused(lm, scored, gated) -> None:
    weights = gated.mixer.weights
    other = lm.store.save_weights(weights.tensors, {**weights.metadata, "model": "another"})
    with pytest.raises(FingerprintMismatchError, match=r"fitted for .*another.*calibrate again"):
        create_weights_loader(lm.store)(other)
    with pytest.raises(CorruptWeightsError, match="cannot be read"):
        create_weights_loader(lm.store)(f"{'0' * 64}.safetensors")
    wider = with_evidence(scored, keys=scored.evidence.keys.repeat(1, 2))
    with pytest.raises(ConfigError, match="fitted for another model"):
        wider.log_probs(gated)
    # Fewer neighbors than it was fitted with are no other model.
    assert scored.log_probs(replace(gated, k=2)).lam.isfinite().all()


@pytest.mark.slow
def test_calibration_tries_the_gate(lm) -> None:
    held_out = [*TEXTS[10:], *NOISE]
    found = lm.calibrate(held_out, max_k=K, ngrams=False)  # which are best here
    assert found.record.knn_ppl == found.comparison.expected.ppl
    assert settings_for(lm.store) == found.settings == lm.knn
    names = {candidate.name for candidate in found.comparison.candidates}
    assert names >= {"gate", "gate over all"}
    assert all(candidate.settings.ngrams is None for candidate in found.comparison.candidates)
    assert (found.settings.gate is not None) == (found.comparison.best.name == "gate over all")
    without = lm.calibrate(held_out, max_k=K, networks=False, ngrams=False)
    assert all(one.settings.gate is None for one in without.comparison.candidates)


def test_the_first_output_is_the_weight_and_the_second_the_temperature() -> None:
    outputs = torch.tensor([[0.0, 1.0], [50.0, -2.0], [-50.0, 0.0]])
    chosen = decode_gate(outputs, temperature=3.0)
    np.testing.assert_allclose(chosen.lam, [0.5 * MAX_LAMBDA, MAX_LAMBDA, 0], atol=1e-6)
    np.testing.assert_allclose(chosen.temperature, [6, 0.75, 3], rtol=1e-6)
