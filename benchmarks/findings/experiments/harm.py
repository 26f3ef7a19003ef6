"""What speaks against it: tokens that are made worse."""

from finding import Finding, Table, below, count, settle
from judging import mean
from lab import Lab
from torch import Tensor, tensor

TITLE = "Most tokens are made less likely, and few bring the gain"
CLAIM = """Wang et al. 2023 (Wikitext-103, with a model trained on it, one λ): most tokens become less likely
with retrieval, and the perplexity falls because of a minority that becomes much likelier."""
RULE = """in a domain it holds if the share of tokens that are less likely with the calibrated mixture than
with the model alone is above one half with its whole interval; the contrary if it is below. Corrected when
the figures were known: it held as well where rare tokens gain less than frequent ones, which is another claim
and is judged apart now."""
MINUTES = 1.0


def run(lab: Lab) -> Finding:
    """Compare each token's probability with and without the store."""
    rows, holds, shares = [], [], []
    for domain in lab.domains:
        test = lab.test(domain)
        gain = (test.log_probs(lab.calibrated(domain)).log_probs - test.lm_log_probs).double()
        fixed = (test.log_probs(lab.fixed(domain)).log_probs - test.lm_log_probs).double()
        worse = mean(test, gain < 0)
        fewer = below(worse, 0.5)
        holds.append(None if fewer is None else not fewer)
        shares.append(f"{worse.ppl:.0%}")
        rows.append(
            [domain, worse, mean(test, fixed < 0), quartiles(gain), mean(test, gain), f"{top(gain):.0%}"]
        )
    head = ["domain", "share made worse", "by the best fixed λ", "median gain (quartiles)", "mean gain",
            "gain from the best tenth"]  # fmt: skip
    return Finding(
        settle(holds),
        f"Made worse: {', '.join(shares)} of the tokens; more than half, beyond chance, in {count(holds)}, "
        f"less than half in {count([held is False for held in holds])}. Gains are of log-probability, in "
        "nats; `gain from the best tenth` is the share of the whole gain that the tenth of the tokens with "
        "the largest gains has, above 100 % where the others lose.",
        [Table(head, rows)],
    )


def quartiles(gain: Tensor) -> list[float]:
    """The median, and between which bounds half of the tokens are."""
    return [float(value) for value in gain.quantile(tensor([0.5, 0.25, 0.75]).double())]


def top(gain: Tensor) -> float:
    """The share of the whole gain that the best tenth of the tokens has."""
    return float(gain.sort(descending=True).values[: len(gain) // 10].sum() / gain.sum())
