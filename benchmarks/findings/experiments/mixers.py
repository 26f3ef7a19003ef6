"""λ that is not the same everywhere."""

from collections.abc import Sequence

from finding import Finding, Table, below, count, settle
from judging import interval, ratio
from lab import Lab, store_alone

from knnstore.lm import Interval
from knnstore.lm.calibration.candidates import Candidate

TITLE = "λ by the nearest distance is better than one λ"
CLAIM = """Drozdov et al. 2022: λ chosen by the distance to the nearest neighbor lowers perplexity by up
to 4 % against one λ. He et al. 2021: so does a gate that is trained. Others need next to no fitting (SK-
MT, NEST)."""
RULE = """in a domain it holds if the perplexity with λ by bins of the nearest distance, divided by that of
the best fixed λ, T and k, is below 1 on test with its whole interval; the contrary if it is above. Of 8 and
32 bins the better on dev is taken. Bins that choose T as well, the gate, and what `knnstore calibrate`
chooses on dev of all that mixes the store alone are counted apart. Corrected when the figures were known:
what was judged was the last of these, in most domains the gate."""
MINUTES = 10.0

BINS, CHOSEN = "λ by bins of distance", "what calibration chose"
KINDS = {
    BINS: ("bins 8", "bins 32"),
    "λ and T by bins of distance": ("bins 8 + T", "bins 32 + T"),
    "the gate": ("gate",),
}
"""Names of candidates; of several the best on dev is judged."""


def run(lab: Lab) -> Finding:
    """Fit every candidate of `knnstore calibrate` on dev, and judge it on test."""
    tables = []
    judged: dict[str, list[Interval]] = {kind: [] for kind in (*KINDS, CHOSEN)}
    for domain in lab.domains:
        test, found = lab.test(domain), lab.compared(domain)
        reference = test.log_probs(lab.fixed(domain)).log_probs
        alone = [one for one in found.candidates if one.settings.cache is None]
        taken = {kind: best_of(alone, names) for kind, names in KINDS.items()}
        taken[CHOSEN] = store_alone(found)
        rows = [["the model alone", None, interval(test, test.lm_log_probs), None]]
        for candidate in alone:
            log_probs = test.log_probs(candidate.settings).log_probs
            change = ratio(test, log_probs, reference)
            chosen = " (chosen)" if candidate is taken[CHOSEN] else ""
            rows.append([candidate.name + chosen, candidate.settings.k, interval(test, log_probs), change])
            for kind, one in taken.items():
                if candidate is one:
                    judged[kind].append(change)
        tables.append(Table(["mixer", "k", "perplexity", "÷ best fixed"], rows, domain))
    title, *others = (said(kind, changes) for kind, changes in judged.items())
    return Finding(
        settle([below(change) for change in judged[BINS]]),
        f"Better than the best fixed λ, T and k, beyond chance: {title}. And: {'; '.join(others)}.",
        tables,
    )


def best_of(candidates: Sequence[Candidate], names: Sequence[str]) -> Candidate:
    """Return the best on dev of the candidates with some names."""
    return min((one for one in candidates if one.name in names), key=lambda candidate: candidate.held_out.ppl)


def said(kind: str, changes: Sequence[Interval]) -> str:
    """In how many domains perplexity was lower beyond chance, and by how much in each."""
    lower = ", ".join(f"{1 - change.ppl:.1%}" for change in changes)
    return f"{kind} in {count([below(change) for change in changes])}, lower by {lower}"
