"""What speaks against it: the tokens that are rare."""

from itertools import pairwise

import numpy as np
import torch
from finding import Finding, Table, below, count, settle
from judging import mean, ppl
from lab import Lab
from torch import Tensor

from knnstore.lm.calibration.scored_text import ScoredText
from knnstore.store import Selection

TITLE = "Frequent tokens gain more than rare ones"
CLAIM = (
    """Nishida et al. 2025: retrieval helps to predict frequent tokens, and not the long tail of rare ones."""
)
RULE = """the tokens of test are divided at the median of how often the domain's store holds them. In a domain
it holds if the mean gain of the rare half, less that of the frequent half, is below 0 with its whole
interval; the contrary if it is above. A gain is the log-probability by the calibrated mixture, less that by
the model alone. It was a part of the rule on tokens made worse, without an interval, until the figures were
known. Whether the rare gain at all is counted apart."""
MINUTES = 1.0
FEW = 10


def run(lab: Lab) -> Finding:
    """Compare the gains of rare and of frequent tokens."""
    rows, slices = [], []
    holds, rare_gain, few_lose = [], [], []
    for domain in lab.domains:
        test = lab.test(domain)
        mixed = test.log_probs(lab.calibrated(domain)).log_probs
        gain = (mixed - test.lm_log_probs).double()
        counts = torch.from_numpy(stored_counts(lab, domain))[test.targets]
        rare, few = counts <= counts.median(), counts < FEW
        less = mean(test, gain, rare, than=~rare)
        of_rare, of_few = mean(test, gain, rare), mean(test, gain, few)
        holds.append(below(less, 0.0))
        rare_gain.append(of_rare.low > 0)
        few_lose.append(below(of_few, 0.0))
        rows.append([domain, int(counts.median()), of_rare, mean(test, gain, ~rare), less, of_few])
        slices += sliced(domain, test, mixed, counts)
    halves = ["domain", "median of times stored", "mean gain, rare half", "frequent half",
              "rare less frequent", f"gain, stored fewer than {FEW} times"]  # fmt: skip
    finer = ["domain", "stored so often", "tokens", "the model alone", "mixture", "mean gain", "made worse"]
    return Finding(
        settle(holds),
        f"The frequent half gained more than the rare half, beyond chance, in {count(holds)}. The rare half "
        f"gained too in {count(rare_gain)}; tokens that are stored fewer than {FEW} times lost in "
        f"{count(few_lose)}. Gains are in nats.",
        [Table(halves, rows), Table(finer, slices, "By how often the token is stored")],
    )


def stored_counts(lab: Lab, domain: str) -> np.ndarray:
    """How often the domain's store holds each token."""
    lab.base.stored(domain)
    return np.array(lab.base.lm.store.token_counts(Selection(domains=(domain,))))


def sliced(domain: str, test: ScoredText, mixed: Tensor, counts: Tensor) -> list[list[object]]:
    """Tokens by the power of ten of how often they are stored."""
    powers = [0, *(10**power for power in range(len(str(int(counts.max()))))), int(counts.max()) + 1]
    gain = (mixed - test.lm_log_probs).double()
    rows: list[list[object]] = []
    for low, high in pairwise(powers):
        within = (counts >= low) & (counts < high)
        if within.any():
            name = "never" if low == 0 else f"{low:,} to {high - 1:,}"
            rows.append(
                [domain, name, int(within.sum()), ppl(test.lm_log_probs[within]), ppl(mixed[within]),
                 mean(test, gain, within), f"{float((gain[within] < 0).double().mean()):.0%}"]
            )  # fmt: skip
    return rows
