"""Keys that remember the states before."""

from finding import Finding, Table, below, count, settle
from judging import best_cells, interval, ratio
from lab import Lab

TITLE = "A key that joins the last three states is better than one state"
CLAIM = """knnstore's own: [h_t; .5 h_{t-1}; .35 h_{t-2}], brought to the width of one state by PCA, lowers
perplexity by a tenth at no byte more."""
RULE = """in a domain it holds if the perplexity with joined keys, divided by that with single ones, is
below .95 with its whole interval; the contrary if it is above. Half precision, sums over cells, one λ and
one T, fitted on dev for each. Written when figures of all texts were known."""
MINUTES = 30.0
STATES = 3


def run(lab: Lab) -> Finding:
    """Score test with both."""
    rows, changes = [], []
    for domain in lab.domains:
        found = []
        for states in (1, STATES):
            memory = lab.in_cells(domain, states)
            test = memory.visited(domain, "test")
            found.append(test.log_probs(best_cells(memory.visited(domain, "dev"))).log_probs)
        changes.append(ratio(test, *reversed(found)))
        rows.append([domain, *(interval(test, of) for of in found), changes[-1]])
    holds = [below(change, 0.95) for change in changes]
    return Finding(
        settle(holds),
        f"Joined keys were better by 5 % or more, beyond chance, in {count(holds)}: by "
        f"{', '.join(f'{1 - change.ppl:.1%}' for change in changes)}.",
        [Table(["domain", "one state", f"{STATES} states", "ratio"], rows)],
    )
