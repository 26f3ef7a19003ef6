"""Scored texts that were not scored: made of columns, or changed in some of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import Evidence, NeighborSums


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
