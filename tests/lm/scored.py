"""Scored texts that were not scored: made of columns, or changed in some of them; and a mixer for tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import Chosen, Evidence, NeighborSums, SimpleMixer


class AllNeighborsLambda(SimpleMixer):
    """A mixer that looks at all neighbors: λ falls with the ratio of the nearest to the farthest distance."""

    name = "all neighbors"

    def __call__(self, evidence: Evidence, temperature: float) -> Chosen:
        """Choose λ, and the temperature given."""
        distances = evidence.distances
        farthest = distances.where(distances.isfinite(), 0).amax(1).clamp(min=1e-6)
        return Chosen((1 - distances[:, 0] / farthest).clamp(0, 0.9), temperature)


def scored_text(
    lm_log_probs: Tensor,
    lm_max: Tensor,
    distances: Tensor,
    hits: Tensor,
    documents: Tensor,
    *,
    keys: Tensor | None = None,
    lm_entropy: Tensor | None = None,
    distinct: Tensor | None = None,
    found: Mapping[str, Any] | None = None,
    **others: Any,
) -> ScoredText:
    """Make a scored text of columns that are those of `ScoredText`, `Evidence` and `NeighborSums`."""
    sums = NeighborSums(distances, hits=hits, known_distinct=distinct)
    evidence = Evidence(lm_max, [sums], keys, lm_entropy, found=found or {})
    return ScoredText(lm_log_probs, documents, evidence, **others)


def near_and_far(seed: int = 0, tokens: int = 1200, k: int = 16, documents: int = 12) -> ScoredText:
    """Tokens of which the near ones are retrieved well and the far ones badly."""
    rng = np.random.default_rng(seed)
    nearest = rng.uniform(1, 100, (tokens, 1))
    distances = nearest + np.sort(rng.exponential(20, (tokens, k)), axis=1)
    # The nearer a neighbor, the likelier it has the token.
    hits = rng.random((tokens, k)) < 0.9 * np.exp(-distances / 60)
    return scored_text(
        torch.from_numpy(np.log(rng.uniform(0.001, 0.4, tokens)).astype(np.float32)),
        torch.from_numpy(np.log(rng.uniform(0.4, 0.9, tokens)).astype(np.float32)),
        torch.from_numpy(distances.astype(np.float32)),
        torch.from_numpy(hits),
        torch.from_numpy(rng.integers(0, documents, tokens)),
    )


def with_evidence(
    scored: ScoredText, *, hits: Tensor | None = None, found: Mapping[str, Any] | None = None, **columns: Any
) -> ScoredText:
    """Change columns of a scored text's evidence.

    `found` is what some components found,
    or None for nothing.
    """
    sums = scored.sums if hits is None else replace(scored.sums, hits=hits)
    changed = {**scored.evidence.found, **(found or {})}
    known = {name: one for name, one in changed.items() if one is not None}
    return replace(scored, evidence=replace(scored.evidence, searches=[sums], found=known, **columns))
