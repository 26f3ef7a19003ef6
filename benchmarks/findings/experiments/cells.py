"""Whole cells in place of the nearest neighbors."""

from finding import Finding, Table, below, count, each, settle
from judging import best_cells, best_fixed, interval, ratio
from lab import Lab
from memory import PROBES

TITLE = "Sums over whole cells are no worse than the 1,024 nearest"
CLAIM = f"""knnstore's own: p_kNN over every record of the {PROBES} nearest cells of a k-means partition is
as good as over the 1,024 nearest of all records, and costs far less."""
RULE = """in a domain it holds if the perplexity over cells, divided by that over the exact k nearest, is
below 1.005 with its whole interval; the contrary if it is above. One λ and one T, fitted on dev for each.
Written when figures of three of the texts were known."""
MINUTES = 20.0


def run(lab: Lab) -> Finding:
    """Score test both ways."""
    rows, changes = [], []
    for domain in lab.domains:
        cells, test = lab.in_cells(domain), lab.test(domain)
        near = test.log_probs(best_fixed(lab.dev(domain))).log_probs
        over = cells.visited(domain, "test").log_probs(best_cells(cells.visited(domain, "dev"))).log_probs
        changes.append(ratio(test, over, near))
        rows.append([domain, interval(test, near), interval(test, over), changes[-1]])
    head = ["domain", f"{lab.limits.k:,} nearest", f"{PROBES} cells", "ratio"]
    return Finding(
        settle([below(change, 1.005) for change in changes]),
        f"Cells ÷ nearest: {each(changes)}; better beyond chance in "
        f"{count([below(change) for change in changes])}, and no worse by "
        f"more than .5 % in {count([below(change, 1.005) for change in changes])}.",
        [Table(head, rows)],
    )
