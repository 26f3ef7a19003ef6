"""The temperature."""

from dataclasses import replace

from finding import Finding, Plot, Table, below, count, each, settle
from judging import best_fixed, best_lambda, interval, ppl, ratio
from lab import Lab

from knnstore.lm import KNNSettings

TITLE = "The temperature matters, and 1 is far from the best"
CLAIM = """Xu et al. 2023: p_kNN needs a temperature that is tuned; the original paper has none, which is
T = 1. With other models the best one is another (13 for gpt2-large, where T = 1 was worse than no
store)."""
RULE = """in a domain it holds if the perplexity with T fitted on dev, divided by that with T = 1, is
below 1 with its whole interval; λ is fitted for both."""
MINUTES = 4.0
OCTAVES = range(-6, 6)


def run(lab: Lab) -> Finding:
    """Fit λ at each T of a grid around the best one, and at T = 1."""
    rows, changes, lines = [], [], {}
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        tuned = best_fixed(dev)
        one = KNNSettings(tuned.k, 1.0, lam=best_lambda(dev, tuned.k, 1.0))
        best, plain = test.log_probs(tuned).log_probs, test.log_probs(one).log_probs
        change = ratio(test, best, plain)
        changes.append(change)
        rows.append(
            [domain, ppl(test.lm_log_probs), interval(test, plain), one.mixer.lam,
             interval(test, best), tuned.temperature, tuned.mixer.lam, change]
        )  # fmt: skip
        lines[domain] = []
        for octave in OCTAVES:
            temperature = tuned.temperature * 2.0**octave
            settings = replace(one, temperature=temperature, lam=best_lambda(dev, tuned.k, temperature))
            lines[domain].append((temperature, ppl(test.log_probs(settings).log_probs)))
    holds = [below(change) for change in changes]
    head = ["domain", "the model alone", "T = 1", "its λ", "T fitted", "T", "its λ", "ratio"]
    return Finding(
        settle(holds),
        f"T fitted on dev was better than 1 beyond chance in {count(holds)}; ratios: {each(changes)}.",
        [Table(head, rows)],
        [
            Plot(
                "temperature",
                "Perplexity by temperature, λ fitted for each",
                "T",
                "perplexity",
                lines,
                log_x=True,
            )
        ],
    )
