"""The mixture, against ten lines of float64 numpy that spell the definition out."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from knnstore.lm.mixing import Contribution, Mixture, ModelDistribution, compute_neighbor_weights

MISSING_TOKEN = 2**20 - 1  # the token of id -1


def mixture(distances, temperature, tokens, lam) -> Mixture:
    lambdas = torch.as_tensor(lam).expand(len(distances))
    return Mixture([Contribution(compute_neighbor_weights(distances, temperature), lambdas, tokens)])


def oracle(lm, distances, tokens, temperature, lam):
    """log p over the vocabulary, one query and one neighbor at a time."""
    rows = []
    for row in range(len(lm)):
        knn = np.zeros(lm.shape[1])
        nearest = distances[row].min()
        for d, token in zip(distances[row], tokens[row], strict=True):
            if math.isfinite(d):
                knn[token] += math.exp(-(float(d) - float(nearest)) / temperature)
        share = lam[row] if knn.sum() > 0 else 0.0
        rows.append(share * knn / (knn.sum() or 1.0) + (1 - share) * np.exp(lm[row].astype(np.float64)))
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows))


@st.composite
def queries(draw):
    n, k, v = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(2, 7))
    logits = draw(hnp.arrays(np.float32, (n, v), elements=st.floats(-50, 50, width=32)))
    distances = draw(
        hnp.arrays(
            np.float32,
            (n, k),
            elements=st.one_of(st.floats(-100, 1e6, width=32), st.just(np.float32(np.inf))),
        )
    )
    tokens = draw(hnp.arrays(np.int64, (n, k), elements=st.integers(0, v - 1)))
    tokens = np.where(np.isfinite(distances), tokens, MISSING_TOKEN)
    lam = draw(
        hnp.arrays(np.float32, n, elements=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32)))
    )
    temperature = draw(st.floats(0.5, 1e4))
    return torch.from_numpy(logits).log_softmax(1), distances, tokens, temperature, lam


@settings(deadline=None)  # the first call into torch is slow
@given(queries())
@example(
    (
        torch.zeros(1, 2).log_softmax(1),
        np.array([[0, 120613]], np.float32),
        np.array([[1, 0]]),
        1221.0,
        np.ones(1, np.float32),
    )
)  # of one token p is below the least normal float
def test_mixture_is_the_definition(case):
    lm, distances, tokens, temperature, lam = case
    expected = oracle(lm.numpy(), distances, tokens, temperature, lam)
    found = mixture(torch.from_numpy(distances), temperature, torch.from_numpy(tokens), torch.from_numpy(lam))
    mixed = found.compute_log_probs(ModelDistribution(lm))
    assert mixed.dtype == torch.float32
    np.testing.assert_allclose(mixed.exp(), np.exp(expected), atol=2e-6)
    np.testing.assert_allclose(mixed.exp().sum(1), 1.0, atol=5e-6)
    # Relative precision: where float32 has all of its digits, the logarithms are equal too.
    clear = expected > -80
    np.testing.assert_allclose(mixed.numpy()[clear], expected[clear], rtol=1e-5, atol=1e-4)
    # The gold-token path gives the same number for every token without a row over the vocabulary.
    for token in range(lm.shape[1]):
        one = found.target_log_probs(lm[:, token], torch.full((len(lm),), token))
        rows = clear[:, token]
        torch.testing.assert_close(one[rows], mixed[rows, token], rtol=1e-5, atol=1e-5)
        # What is left of the digits of the least floats.
        torch.testing.assert_close(one[~rows], mixed[~rows, token], rtol=0, atol=1.0)


def test_rows_without_neighbors_and_lambda_zero_keep_the_model_exactly():
    lm = torch.randn(3, 11).log_softmax(1)
    distances = torch.full((3, 4), torch.inf)
    distances[0, 0] = 2.0
    tokens = torch.full((3, 4), MISSING_TOKEN)
    tokens[0, 0] = 5
    found = mixture(distances, 1.0, tokens, torch.tensor([0.0, 0.7, 1.0]))
    assert torch.equal(found.compute_log_probs(ModelDistribution(lm)), ModelDistribution(lm).log_probs)
    assert torch.equal(found.target_log_probs(lm[:, 5], torch.full((3,), 5)), lm[:, 5])


def test_lambda_one_is_retrieval_alone():
    lm = torch.zeros(1, 5).log_softmax(1)
    distances, tokens = torch.tensor([[0.0, 0.0, 0.0, torch.inf]]), torch.tensor([[2, 2, 4, MISSING_TOKEN]])
    mixed = mixture(distances, 3.0, tokens, 1.0).compute_log_probs(ModelDistribution(lm))
    expected = torch.tensor([[-torch.inf, -torch.inf, math.log(2 / 3), -torch.inf, math.log(1 / 3)]])
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("shift", [0.0, 1e6, 1e30, -1e30])
def test_only_differences_of_distances_count(shift):
    """Squared distances of wide models are huge; the softmax must not under- or overflow."""
    weights = compute_neighbor_weights(torch.tensor([[0.0, 0.0, torch.inf]]) + shift, 1.0)
    assert torch.equal(weights, torch.tensor([[0.5, 0.5, 0.0]]))


def test_large_distances_keep_their_small_differences():
    """1e6 / 0.7 rounds to steps of 0.125: the subtraction must come before the division."""
    weights = compute_neighbor_weights(torch.tensor([[1e6, 1e6 + 1]]), 0.7)
    torch.testing.assert_close(weights, torch.tensor([[0.0, -1 / 0.7]]).softmax(1))


def test_temperature_may_differ_by_query():
    distances = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    weights = compute_neighbor_weights(distances, torch.tensor([1.0, 10.0]))
    torch.testing.assert_close(weights[0], torch.tensor([0.0, -1.0]).softmax(0))
    torch.testing.assert_close(weights[1], torch.tensor([0.0, -0.1]).softmax(0))


def test_rare_tokens_of_the_model_do_not_round_to_impossible():
    """exp(-200) is zero in float32; its logarithm must survive the mixture."""
    lm = torch.tensor([[0.0, -200.0]])
    mixed = mixture(torch.tensor([[1.0]]), 1.0, torch.tensor([[0]]), 0.5).compute_log_probs(
        ModelDistribution(lm)
    )
    torch.testing.assert_close(mixed, torch.tensor([[0.0, -200.0 + math.log(0.5)]]))


def test_a_model_s_distribution_can_be_used_again_after_it_was_mixed():
    """The mixture takes the memory of the probabilities, never that of the logits."""
    logits = 9 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before, lm = logits.clone(), ModelDistribution(logits)
    found = mixture(torch.rand(3, 4), 1.0, torch.arange(12).reshape(3, 4), 0.3)
    mixed = found.compute_log_probs(lm)
    assert torch.equal(found.compute_log_probs(lm), mixed)
    assert torch.equal(logits, before)
    expected = logits.double().log_softmax(1)
    torch.testing.assert_close(lm.log_max, expected.amax(1).float())
    entropy = -(expected.exp() * expected).sum(1)
    torch.testing.assert_close(lm.compute_entropy(), entropy.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lm.scale_probs(torch.ones(3)), expected.exp().float())


def test_impossible_tokens_have_no_part_in_the_entropy():
    lm = ModelDistribution(torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, 7.0, -torch.inf]]))
    torch.testing.assert_close(lm.compute_entropy(), torch.tensor([math.log(2), 0.0]))
    torch.testing.assert_close(lm.log_max, torch.tensor([-math.log(2), 0.0]))


def test_gradients_flow_to_the_model_alone():
    """Fine-tuning through the mixture: the derivative of the definition, by central differences."""
    logits = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]], dtype=torch.float32, requires_grad=True)
    distances, gold = torch.tensor([[0.0, 1.0], [2.0, 2.0]]), torch.tensor([[0], [2]])
    found = mixture(distances, 1.0, torch.tensor([[0, 2], [1, 1]]), 0.5)

    def loss(values):
        return -found.compute_log_probs(ModelDistribution(values)).gather(1, gold).sum()

    loss(logits).backward()
    step = 1e-2
    for at in np.ndindex(2, 3):
        shift = torch.zeros(2, 3)
        shift[at] = step
        slope = (loss(logits.detach() + shift) - loss(logits.detach() - shift)) / (2 * step)
        assert logits.grad[at].item() == pytest.approx(slope.item(), abs=1e-3)


def test_weights_that_sum_to_more_than_one_by_rounding_leave_nothing_to_the_model():
    lams = torch.rand((4, 4096), generator=torch.Generator().manual_seed(0))
    lams[0] = 1.0
    tokens = torch.arange(4)[None].expand(4096, -1)
    found = Mixture([Contribution(torch.full((4096, 4), 0.25), lam, tokens) for lam in lams])
    model = torch.full((4096, 5), 0.2).log()
    mixed = found.compute_log_probs(ModelDistribution(model))
    expected = torch.tensor([0.25] * 4 + [0.0]).expand(4096, -1)
    torch.testing.assert_close(mixed.exp(), expected, atol=1e-6, rtol=0)
    gold = found.target_log_probs(model[:, 4], torch.full((4096,), 4)).exp()
    torch.testing.assert_close(gold, expected[:, 4], atol=1e-6, rtol=0)
