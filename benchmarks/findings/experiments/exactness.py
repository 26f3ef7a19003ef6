"""Approximate search: which neighbors, and which distances."""

from itertools import product

import torch
from finding import Finding, Table, below, count, every, settle
from judging import best_fixed, best_lambda, interval, ratio
from knnstore_research.key_probing import nearest_keys
from knnstore_research.rough_search import RoughIndex, replace_neighbors
from knnstore_research.stored_records import StoredRecords
from lab import Lab

from knnstore.lm import KNNSettings
from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.store import Selection

TITLE = "Rough distances cost more than missed neighbors, and less with a fitted temperature"
CLAIM = """Khandelwal et al. 2020: 16.5 with the quantized distances of the index, 16.06 with exact ones,
at T = 1. Xu et al. 2023: at T = 1, and with a part of the store, rough distances are no worse or even better;
once T is tuned the difference is small, and which neighbors are found (the mask) matters less than how far
they are said to be (the score)."""
RULE = """an index of product codes (`IVF64,PQ32`) with all four combinations of neighbors and distances,
T and λ fitted on dev for each. In a domain it holds if, at T = 1 (λ fitted) and with the whole interval,
exact distances to the index's neighbors lower perplexity against its own distances to them and against its
distances to the exact neighbors; and the whole difference between the index alone and everything exact is at
most 5 % with T fitted; the contrary if one of these is false with its whole interval. Mended when the figures
were known: neighbors (the mask) and distances (the score) were not compared with each other. It needs
FAISS."""
MINUTES = 30.0


def run(lab: Lab) -> Finding:
    """Search one compressed index in four ways."""
    rows, gains, smalls, masks = [], [], [], []
    store = lab.base.lm.store
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        lab.say(f"{domain}: searching an index of codes")
        records = StoredRecords(store, Selection(domains=(domain,)))
        index = RoughIndex(records.keys, records.metric, "IVF64,PQ32")
        tuned, at_one = {}, {}
        for neighbors, exact in product(("index", "exact"), (False, True)):
            keys = records.keys if exact else index.decoded
            measured = []
            for scored in (dev, test):
                queries = scored.evidence.keys
                if neighbors == "index":
                    near = torch.from_numpy(index.find_rows(queries.numpy(), scored.k))
                else:
                    near = nearest_keys(queries, torch.from_numpy(records.keys), scored.k, records.metric)[1]
                tokens = torch.from_numpy(records.tokens)
                measured.append(replace_neighbors(scored, near, tokens, keys, records.metric))
            of_dev, of_test = measured
            settings = best_fixed(of_dev)
            tuned[neighbors, exact] = of_test.log_probs(settings).log_probs
            at_one[neighbors, exact] = of_test.log_probs(at_temperature_one(of_dev)).log_probs
            rows.append(
                [domain, f"of the {neighbors}" if neighbors == "index" else neighbors,
                 "exact" if exact else "of the index", interval(test, at_one[neighbors, exact]),
                 interval(test, tuned[neighbors, exact]), settings.temperature]
            )  # fmt: skip
        gains.append(below(ratio(test, at_one["index", True], at_one["index", False])))
        masks.append(below(ratio(test, at_one["index", True], at_one["exact", False])))
        smalls.append(below(ratio(test, tuned["index", False], tuned["exact", True]), 1.05))
    head = ["domain", "neighbors", "distances", "perplexity at T = 1", "with T fitted", "T"]
    return Finding(
        settle([every(parts) for parts in zip(gains, masks, smalls, strict=True)]),
        f"At T = 1 exact distances were better in {count(gains)}, rough ones in "
        f"{count([gain is False for gain in gains])}; exact distances to the index's neighbors were better "
        f"than its distances to the exact neighbors in {count(masks)}; with T fitted, the index alone was "
        f"within 5 % of everything exact in {count(smalls)}.",
        [Table(head, rows)],
    )


def at_temperature_one(dev: ScoredText) -> KNNSettings:
    """T = 1 and the likeliest λ."""
    return KNNSettings(dev.k, 1.0, lam=best_lambda(dev, dev.k, 1.0))
