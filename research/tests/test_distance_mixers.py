"""The mixers of SK-MT and NEST: their formulas, their fits, and the paths that use them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from knnstore_research.distance_mixers import NearnessLambda, RelativeConfidence

from knnstore.errors import ConfigError
from knnstore.lm import Evidence, KNNLMForCausalLM, KNNSettings, settings_from_dict, settings_to_dict
from knnstore.lm.calibration import compare_candidates
from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.mixing import NeighborSums
from tests.lm.scored import near_and_far

MIXERS = [NearnessLambda(), RelativeConfidence(0.6, 0.2)]


def test_the_closed_forms_are_those_of_the_papers() -> None:
    distances = torch.tensor([[20.0, 60.0, 80.0], [120.0, 130.0, torch.inf], [0.0, 0.0, 0.0]])
    evidence = Evidence(torch.zeros(3), [NeighborSums(distances)])
    assert NearnessLambda()(evidence, 100.0).lam.tolist() == pytest.approx([0.8, 0.0, 0.999])
    logits = [(0.4 - ratio) / 0.1 for ratio in (20 / 80, 120 / 130, 1.0)]
    expected = [1 / (1 + math.exp(-logit)) for logit in logits]
    assert RelativeConfidence(0.4, 0.1)(evidence, 100.0).lam.tolist() == pytest.approx(expected)


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(st.just(NearnessLambda()), st.builds(RelativeConfidence, st.floats(-2, 2), st.floats(0.01, 3))),
    st.floats(0.01, 1e4),
    arrays(np.float32, (5, 4), elements=st.one_of(st.floats(-1e4, 1e4, width=32), st.just(math.inf))),
)
def test_lambda_is_a_weight_whatever_the_distances(mixer, temperature, distances) -> None:
    evidence = Evidence(torch.zeros(5), [NeighborSums(torch.from_numpy(np.sort(distances, axis=1)))])
    lam = mixer(evidence, temperature).lam
    assert lam.dtype == torch.float32
    assert bool(((lam >= 0) & (lam <= 1)).all())
    saved = KNNSettings(k=4, temperature=temperature, mixer=mixer)
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(saved)))) == saved


@pytest.mark.parametrize("values", [(0.4, 0.0), (math.nan, 0.1)])
def test_what_makes_no_sense_is_refused(values) -> None:
    with pytest.raises(ConfigError):
        RelativeConfidence(*values)


@pytest.mark.parametrize("mixer", MIXERS, ids=lambda mixer: mixer.name)
def test_scoring_and_explaining_agree(mixer, make_model, make_store, tokenizer) -> None:
    base, generator = make_model("gpt2"), np.random.default_rng(1)
    store = make_store(base, generator.integers(4, 100, (6, 20)).tolist())
    lm = KNNLMForCausalLM.from_base(base, store, KNNSettings(9, 60.0, mixer), tokenizer)
    ids = generator.integers(4, 100, 12).tolist()
    explained = lm.explain(" ".join(f"w{token}" for token in ids), neighbors=0)
    with torch.no_grad():
        whole = lm(torch.tensor([[0, *ids]])).logits[0].log_softmax(-1)
    expected = [float(whole[at, token].exp()) for at, token in enumerate(ids)]
    assert [token.p for token in explained] == pytest.approx(expected, rel=1e-3)
    assert len({round(token.lam, 4) for token in explained}) > 1


def test_formulas_are_fitted_as_well_as_a_grid() -> None:
    scored = near_and_far(tokens=2000)
    (evidence,) = gather_evidence(scored, [16])

    def loss_of(settings) -> float:
        return -float(scored.log_probs(settings).log_probs.double().mean())

    temperatures = np.geomspace(2, 1000, 40)
    by_nearness = [evidence.build_settings(float(one), NearnessLambda()) for one in temperatures]
    assert loss_of(NearnessLambda.fit(evidence, scored)) < min(map(loss_of, by_nearness)) + 2e-3
    fitted = RelativeConfidence.fit(evidence, scored)
    by_ratio = [
        evidence.build_settings(fitted.temperature, RelativeConfidence(alpha, tau))
        for alpha in np.linspace(-0.5, 1.5, 15)
        for tau in (-0.5, -0.2, -0.1, 0.1, 0.2, 0.5, 2.0)
    ]
    assert loss_of(fitted) < min(map(loss_of, by_ratio)) + 1e-3
    assert loss_of(fitted) < loss_of(replace(fitted, mixer=RelativeConfidence())) - 1e-3


def test_calibration_tries_them_where_they_go_with_the_text() -> None:
    scored = near_and_far()
    assert {one.name for one in MIXERS} <= {one.name for one in compare_candidates(scored).candidates}
    (evidence,) = gather_evidence(scored, [16])
    assert NearnessLambda.fit(evidence, replace(scored, metric="ip")) is None
    assert RelativeConfidence.fit(replace(evidence, probes=16), scored) is None
