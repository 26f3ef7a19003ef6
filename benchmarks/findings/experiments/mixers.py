"""λ that is not the same everywhere."""

from finding import Finding, Table, below, count, settle
from judging import interval, ratio
from lab import Lab, store_alone

TITLE = "λ by the nearest distance is better than one λ"
CLAIM = """Drozdov et al. 2022: λ chosen by the distance to the nearest neighbour lowers perplexity by up
to 4 % against one λ. He et al. 2021: so does a gate that is trained. Others need next to no fitting (SK-
MT, NEST)."""
RULE = """in a domain it holds if the perplexity of the candidate that `knnstore calibrate` chooses on
dev, divided by that of the best fixed λ, T and k, is below 1 on test with its whole interval. Of single
mixers the table says."""
MINUTES = 10.0


def run(lab: Lab) -> Finding:
    """Fit every candidate of `knnstore calibrate` on dev, and judge it on test."""
    tables, holds, gains = [], [], []
    for domain in lab.domains:
        test, found = lab.test(domain), lab.compared(domain)
        reference = test.log_probs(lab.fixed(domain)).log_probs
        best = store_alone(found)
        rows = [["the model alone", None, interval(test, test.lm_log_probs), None]]
        for candidate in found.candidates:
            if candidate.settings.cache is not None:
                continue
            log_probs = test.log_probs(candidate.settings).log_probs
            quotient = ratio(test, log_probs, reference)
            chosen = " (chosen)" if candidate is best else ""
            rows.append([candidate.name + chosen, candidate.settings.k, interval(test, log_probs), quotient])
            if candidate is best:
                holds.append(below(quotient))
                gains.append(f"{1 - quotient.ppl:.1%}")
        tables.append(Table(["mixer", "k", "perplexity", "÷ best fixed"], rows, domain))
    return Finding(
        settle(holds),
        f"What calibration chose was better than the best fixed λ, T and k beyond chance in {count(holds)}; "
        f"lower by {', '.join(gains)}.",
        tables,
    )
