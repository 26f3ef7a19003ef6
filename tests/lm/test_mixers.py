"""Every mixer that settings can be saved with: its formula, its bounds, and the paths that use it."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from knnstore.errors import ConfigError
from knnstore.lm import (
    BinnedLambda,
    Evidence,
    FixedLambda,
    KNNLMForCausalLM,
    KNNSettings,
    NeighborSums,
    settings_from_dict,
    settings_to_dict,
)
from knnstore.lm.mixing import ModelDistribution
from knnstore.lm.mixture import build_mixture
from tests.lm.scored import AllNeighborsLambda

CONFIDENCES = st.floats(-20, 0, width=32)
DISTANCES = st.one_of(st.floats(-1e4, 1e4, width=32), st.just(math.inf))


def edges(values):
    return st.lists(values, max_size=4, unique=True).map(sorted).map(tuple)


@st.composite
def binned(draw):
    near, sure = draw(edges(st.floats(-100, 500, width=32))), draw(edges(CONFIDENCES))
    bins = (len(near) + 1) * (len(sure) + 1)
    lambdas = draw(st.lists(st.floats(0, 1), min_size=bins, max_size=bins))
    factors = draw(st.one_of(st.just(()), st.lists(st.floats(0.01, 100), min_size=bins, max_size=bins)))
    return BinnedLambda(near, lambdas, factors, sure)


MIXER = st.one_of(
    st.builds(FixedLambda, st.floats(0, 1)),
    binned(),
)


@given(
    MIXER,
    st.floats(0.01, 1e4),
    arrays(np.float32, (5, 4), elements=DISTANCES),
    arrays(np.float32, 5, elements=CONFIDENCES),
)
def test_every_mixture_is_a_distribution(mixer, temperature, distances, confidence):
    nearest = torch.from_numpy(np.sort(distances, axis=1))
    sums = NeighborSums(nearest, torch.arange(20).reshape(5, 4) % 7)
    found = Evidence(torch.from_numpy(confidence), [sums])
    mixture = build_mixture(KNNSettings(k=4, temperature=temperature, mixer=mixer), found)
    assert mixture.lam.dtype == torch.float32
    assert bool(((mixture.lam >= 0) & (mixture.lam <= 1)).all())
    assert bool((torch.as_tensor(mixture.temperature) > 0).all())
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mixed = mixture.compute_log_probs(ModelDistribution(logits))
    assert mixed.exp().sum(1).numpy() == pytest.approx(np.ones(5), abs=1e-5)


@given(MIXER, st.integers(1, 2000), st.floats(0.01, 1e4))
def test_settings_with_any_mixer_survive_json(mixer, k, temperature):
    saved = KNNSettings(k=k, temperature=temperature, mixer=mixer)
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(saved)))) == saved


def test_bins_hold_what_is_between_their_edges():
    mixer = BinnedLambda((10.0, 20.0), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6), (1, 2, 3, 4, 5, 6), (-1.0,))
    distances = torch.tensor([[5.0], [5.0], [10.0], [19.0], [20.0], [torch.inf], [-torch.inf]])
    confidence = torch.tensor([-2.0, -0.5, -2.0, -1.0, -9.0, 0.0, -9.0])
    lam, temperature = mixer(Evidence(confidence, [NeighborSums(distances)]), 10.0)
    assert lam.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1])
    assert temperature.tolist() == pytest.approx([10, 20, 30, 40, 50, 60, 10])


@pytest.mark.parametrize(
    ("mixer", "values"),
    [
        (BinnedLambda, ((2.0, 1.0), (0.1, 0.2, 0.3))),
        (BinnedLambda, ((1.0, math.inf), (0.1, 0.2, 0.3))),
        (BinnedLambda, ((1.0,), (0.1,))),
        (BinnedLambda, ((1.0,), (0.1, 1.2))),
        (BinnedLambda, ((1.0,), (0.1, 0.2), (1.0,))),
        (BinnedLambda, ((1.0,), (0.1, 0.2), (1.0, 0.0))),
    ],
)
def test_what_makes_no_sense_is_refused(mixer, values):
    with pytest.raises(ConfigError):
        mixer(*values)


@pytest.mark.parametrize(
    "mixer",
    [
        BinnedLambda((20.0, 60.0), (0.7, 0.3, 0.6, 0.2, 0.5, 0.1), (0.5, 1, 2, 1, 0.3, 4), (-2.0,)),
        AllNeighborsLambda(),
    ],
    ids=lambda mixer: mixer.name,
)
def test_scoring_explaining_and_generating_agree(mixer, make_model, make_store, tokenizer):
    """One text through all three: forward, `explain`, and beams over a padded batch."""
    base = make_model("gpt2")
    generator = np.random.default_rng(1)
    store = make_store(base, generator.integers(4, 100, (6, 20)).tolist())
    knn = KNNSettings(k=9, temperature=60.0, mixer=mixer)
    lm = KNNLMForCausalLM.from_base(base, store, knn, tokenizer)
    ids = generator.integers(4, 100, 12).tolist()
    explained = lm.explain(" ".join(f"w{token}" for token in ids), neighbors=0)
    with torch.no_grad():
        whole = lm(torch.tensor([[0, *ids]])).logits[0].log_softmax(-1)
    expected = [float(whole[at, token].exp()) for at, token in enumerate(ids)]
    assert [token.p for token in explained] == pytest.approx(expected, rel=1e-3)
    assert len({round(token.lam, 4) for token in explained}) > 1
    one = torch.tensor([[0, *ids[:5]]])
    padded = torch.tensor([[2, 2, 0, *ids[:3]], [0, *ids[:5]]])
    options = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False, "pad_token_id": 2}
    alone = lm.generate(one, attention_mask=torch.ones_like(one), **options)[0, 6:]
    batched = lm.generate(padded, attention_mask=(padded != 2).long(), **options)[1, 6:]
    assert batched.tolist() == alone.tolist()
