"""Half of the records."""

import torch
from finding import Finding, Table, below, count, every, settle
from judging import best_fixed, interval, ratio
from knnstore_research.merging import (
    WeightedNeighbors,
    Weights,
    drop_at_random,
    drop_highest,
    find_weighted,
    merge_nearest,
    score_stored,
)
from knnstore_research.stored_records import StoredRecords
from lab import Lab
from torch import Tensor

from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits.mixers import fit_fixed
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.lm.mixing import FixedLambda, make_temperature_grid, mix_probs
from knnstore.store import Selection

TITLE = "Half of a store does nearly as well"
CLAIM = """He et al. 2021: with 60 % of the records, chosen by merging neighbors that carry the same
token, perplexity is 16.86 in place of 16.65; merging is better than leaving out at random, which is
better than other methods. Theirs visits the records in an order drawn by chance and merges what is near into
each; `knnstore_research.merging` merges the nearest pairs of the same token, again and again."""
RULE = """of knnstore's merging, not theirs: in a domain it holds if merging to half of the records raises
perplexity by at most 3 % and is better than leaving out half at random, each with the whole interval; the
contrary if either is false with its whole interval. T and λ are fitted on dev for each store. Mended when the
figures were known: it was called a test of their merging."""
MINUTES = 45.0
KEEP = 0.5
METHODS = ("merge", "known", "random")
_SAMPLE = 2048
"""Tokens to choose the temperatures by."""


def run(lab: Lab) -> Finding:
    """Leave out records by each method, and search among those that are left."""
    rows, holds, cheap = [], [], []
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        whole = test.log_probs(best_fixed(dev)).log_probs
        rows.append([domain, "everything", interval(test, whole), None])
        records = StoredRecords(lab.base.lm.store, Selection(domains=(domain,)))
        left, costs = {}, {}
        for method in METHODS:
            lab.say(f"{domain}: leaving out records, {method}")
            weights = choose(lab, domain, records, method)
            found = [find_weighted(records, weights, text, text.k) for text in (dev, test)]
            left[method] = fit_and_mix(dev, found[0], test, found[1])
            costs[method] = ratio(test, left[method], whole)
            rows.append([domain, method, interval(test, left[method]), costs[method]])
        better = below(ratio(test, left["merge"], left["random"]))
        holds.append(every([below(costs["merge"], 1.03), better]))
        cheap.append(min(cost.ppl for cost in costs.values()) <= 1.03)
    return Finding(
        settle(holds),
        f"Merging did as the rule says in {count(holds)}; the best method cost at most 3 % in "
        f"{count(cheap)}.",
        [Table(["domain", "records", "perplexity", "÷ everything"], rows)],
    )


def choose(lab: Lab, domain: str, records: StoredRecords, method: str) -> Weights:
    """Choose which records stay."""
    count_left = max(1, round(KEEP * len(records)))
    if method == "merge":
        return merge_nearest(records.tokens, records.keys, count_left)
    if method == "random":
        return drop_at_random(len(records), count_left)
    lm = lab.base.lm
    return drop_highest(score_stored(lm.store, lm.reader, Selection(domains=(domain,))), count_left)


def fit_and_mix(
    dev: ScoredText, on_dev: WeightedNeighbors, test: ScoredText, on_test: WeightedNeighbors
) -> Tensor:
    """Fit T and λ on dev; return log p of every token of test."""
    temperatures = make_temperature_grid(on_dev.distances[:: max(1, len(dev) // _SAMPLE)])
    knn = torch.stack([on_dev.knn_probs(temperature) for temperature in temperatures.tolist()], 1)
    lm = dev.lm_log_probs.exp()[:, None]
    evidence = GridEvidence(dev.k, temperatures, knn, lm, dev.evidence, torch.arange(len(dev)))
    settings = fit_fixed(evidence)
    assert isinstance(settings.mixer, FixedLambda)
    knn_probs = on_test.knn_probs(settings.temperature)
    return mix_probs(test.lm_log_probs.exp(), (settings.mixer.lam, knn_probs)).log()
