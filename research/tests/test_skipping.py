"""The network that estimates what a search will bring."""

import numpy as np
import torch
from knnstore_research.skipping import fit_gains

from knnstore.lm.calibration import ScoredText
from tests.lm.scored import scored_text


def text_where_half_of_the_searches_help(tokens: int, seed: int) -> tuple[ScoredText, torch.Tensor]:
    """Returns a text and which searches help; the first component of the key tells, nothing else does."""
    rng = np.random.default_rng(seed)
    helps = torch.from_numpy(rng.random(tokens) < 0.5)
    keys = torch.from_numpy(rng.standard_normal((tokens, 4)).astype(np.float32))
    keys[:, 0] = helps.float() * 2 - 1
    noise = torch.from_numpy(rng.random((2, tokens)).astype(np.float32))
    nothing_found = torch.full((tokens, 1), torch.inf)
    scored = scored_text(
        torch.full((tokens,), -3.0),
        -noise[0],
        nothing_found,
        nothing_found < 0,
        torch.arange(tokens) // 50,
        keys=keys,
        lm_entropy=noise[1],
    )
    return scored, helps


def test_searches_that_help_are_told_from_the_others_in_another_text() -> None:
    (fitted, helps), (other, expected) = (text_where_half_of_the_searches_help(2000, seed) for seed in (0, 1))
    gains = torch.where(helps, 1.5, -0.5)
    estimated = fit_gains(fitted, gains)(other)
    assert float(((estimated > 0.5) == expected).float().mean()) > 0.97
    assert float((estimated - torch.where(expected, 1.5, -0.5)).abs().mean()) < 0.2
