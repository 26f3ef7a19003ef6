"""Counts of the stored text, without keys."""

import torch
from finding import Finding, Table, below, count, each, settle
from judging import best_cells, interval, ratio
from lab import Lab

from knnstore.lm.components import NGramFitting

TITLE = "N-grams of the same text alone beat a classic kNN-LM"
CLAIM = """Khandelwal et al. 2020 found little in n-grams (0.2 of perplexity, of a large model at home).
knnstore's own: with a small model away from home, interpolated Kneser-Ney counts of the stored text, which
need no keys and no forward pass, are worth more than keys of one state with one λ and one T."""
RULE = """in a domain it holds if the perplexity with n-grams, divided by that of the classic kNN-LM, is
below 1 with its whole interval; the contrary if it is above. Contexts of up to 6 tokens; λ by the length of
the longest, fitted on dev, as λ and T are. Written when figures of all texts were known."""
MINUTES = 20.0


def run(lab: Lab) -> Finding:
    """Score test with both."""
    rows, changes = [], []
    for domain in lab.domains:
        memory = lab.in_cells(domain)
        dev, test = memory.visited(domain, "dev"), memory.visited(domain, "test")
        keys = test.log_probs(best_cells(dev)).log_probs
        fitted = NGramFitting(dev.ngrams).fit(dev.lm_log_probs, torch.ones(len(dev), dtype=torch.bool))
        counts = NGramFitting(test.ngrams).mix(test.lm_log_probs, fitted)
        changes.append(ratio(test, counts, keys))
        rows.append([domain, *(interval(test, of) for of in (test.lm_log_probs, keys, counts)), changes[-1]])
    holds = [below(change) for change in changes]
    head = ["domain", "the model alone", "classic kNN-LM", "n-grams", "n-grams ÷ kNN-LM"]
    return Finding(
        settle(holds),
        f"N-grams were better beyond chance in {count(holds)}; ratios: {each(changes)}.",
        [Table(head, rows)],
    )
