"""Codes of 32 bytes in place of keys."""

from finding import Finding, Table, below, settle
from judging import best_cells, interval, ratio
from lab import Lab

TITLE = "Keys of a sixteenth of the bytes do nearly as well"
CLAIM = """knnstore's own: a product quantizer after a learned rotation keeps a key of 512 bytes in 32
(`pq32`), for half a percent of perplexity."""
RULE = """in a domain it holds if the perplexity with codes, divided by that with half precision, is below
1.01 with its whole interval; the contrary if it is above. Sums over cells, one λ and one T, fitted on dev
for each. Written when figures of three of the texts were known."""
MINUTES = 20.0


def run(lab: Lab) -> Finding:
    """Score test with both."""
    rows, changes = [], []
    for domain in lab.domains:
        found = []
        for codes in ("none", lab.limits.codes):
            memory = lab.in_cells(domain, codes=codes)
            test = memory.visited(domain, "test")
            found.append(test.log_probs(best_cells(memory.visited(domain, "dev"))).log_probs)
        changes.append(ratio(test, *reversed(found)))
        rows.append([domain, *(interval(test, of) for of in found), changes[-1]])
    return Finding(
        settle([below(change, 1.01) for change in changes]),
        f"Perplexity with codes was {', '.join(f'{change.ppl - 1:+.2%}' for change in changes)}.",
        [Table(["domain", "half precision", lab.limits.codes, "ratio"], rows)],
    )
