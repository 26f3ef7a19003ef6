"""The model alone, with a cache, with a store, with both."""

from itertools import pairwise

from finding import Finding, Table, below, count, each, every, settle
from judging import interval, ratio, with_cache
from lab import Lab

from knnstore.lm import KNNSettings

TITLE = "A cache helps, a store helps more, both together most"
CLAIM = """Khandelwal et al. 2020, table 1 (Wikitext-103, test): 18.65 alone, 18.27 with a continuous
cache, 16.12 with a store, 15.79 with both. Grave et al. 2017: the weaker the model, the more the cache
gains."""
RULE = """in a domain it holds if each step (alone, cache, store, both) lowers perplexity with the whole
interval of their ratio. The store is mixed as `knnstore calibrate` chooses on dev, the size, T and λ
of the cache are the likeliest on dev."""
MINUTES = 35.0


def run(lab: Lab) -> Finding:
    """Fit all four on dev and compare them on test."""
    rows, holds, both_lower, whole = [], [], [], []
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        store = lab.calibrated(domain)
        cache = with_cache(dev, KNNSettings(k=1, lam=0.0))
        both = with_cache(dev, store)
        log_probs = [test.lm_log_probs] + [test.log_probs(of).log_probs for of in (cache, store, both)]
        steps = [ratio(test, after, before) for before, after in pairwise(log_probs)]
        holds.append(every([below(step) for step in steps]))
        whole.append(ratio(test, log_probs[-1], log_probs[0]))
        both_lower.append(below(steps[-1]))
        rows.append([domain, *(interval(test, of) for of in log_probs), steps[-1], both.cache.lam])
    head = ["domain", "the model alone", "cache", "store", "both", "both ÷ store", "λ of the cache then"]
    return Finding(
        settle(holds),
        f"Every step lowered perplexity beyond chance in {count(holds)}; both ÷ the model "
        f"alone: {each(whole)}. "
        f"The cache added to the store in "
        f"{count(both_lower)}.",
        [Table(head, rows)],
    )
