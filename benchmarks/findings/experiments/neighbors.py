"""How many neighbors."""

from finding import Finding, Plot, Table, below, count, every, settle
from judging import interval, ratio
from lab import Lab

from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits.mixers import fit_fixed

TITLE = "More neighbors are better, each less than the one before"
CLAIM = """Khandelwal et al. 2020, figure 4: perplexity falls with k, from 17.6 at k = 1 to 16.1 at k =
1024, and ever more slowly."""
RULE = """in a domain it holds if the perplexity at the largest k is below that at every smaller one in
the table, with the whole interval of their ratio for all k up to a quarter of the largest. T and λ are
fitted for each k."""
MINUTES = 4.0
KS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def run(lab: Lab) -> Finding:
    """Fit T and λ at each k from one pass."""
    ks = [k for k in KS if k <= lab.limits.k]
    rows, holds, lines = [], [], {}
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        within = [k for k in ks if k <= dev.k]
        fitted = [fit_fixed(evidence) for evidence in gather_evidence(dev, within)]
        log_probs = [test.log_probs(settings).log_probs for settings in fitted]
        found = [interval(test, of) for of in log_probs]
        against = [ratio(test, log_probs[-1], of) for of in log_probs[:-1]]
        holds.append(
            every([below(of) for k, of in zip(within, against, strict=False) if 4 * k <= within[-1]])
        )
        rows += [
            [domain, settings.k, of, settings.temperature, settings.mixer.lam]
            for settings, of in zip(fitted, found, strict=True)
        ]
        lines[domain] = [(float(k), of.ppl) for k, of in zip(within, found, strict=True)]
    return Finding(
        settle(holds),
        f"The largest k was the best beyond chance in {count(holds)}.",
        [Table(["domain", "k", "perplexity", "T", "λ"], rows)],
        [Plot("neighbors", "Perplexity by number of neighbors", "k", "perplexity", lines, log_x=True)],
    )
