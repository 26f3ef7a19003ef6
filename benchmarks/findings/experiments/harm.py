"""What speaks against it: tokens that are made worse."""

from itertools import pairwise

import numpy as np
import torch
from finding import Finding, Table, settle
from judging import ppl
from lab import Lab

from knnstore.store import Selection

TITLE = "Most of the gain is on few tokens, and many are made worse"
CLAIM = """Wang et al. 2023: most tokens become less likely with retrieval, and the perplexity falls
because of a minority. Nishida et al. 2025: frequent tokens gain, not the long tail."""
RULE = """in a domain it holds if more than half of the tokens are less likely with the calibrated mixture
than with the model alone, or if rare tokens (in the lower half of all occurrences, by how often the token
is stored) gain less, as mean log-probability, than frequent ones; the contrary holds if neither does.
Intervals play no part: the shares are of tens of thousands of tokens."""
MINUTES = 1.0


def run(lab: Lab) -> Finding:
    """Compare each token's probability with and without the store."""
    rows, slices, holds, worse_shares = [], [], [], []
    for domain in lab.domains:
        test = lab.test(domain)
        mixed = test.log_probs(lab.calibrated(domain)).log_probs
        gain = (mixed - test.lm_log_probs).double()
        worse = float((gain < 0).double().mean())
        largest = gain.sort(descending=True).values
        top = float(largest[: len(gain) // 10].sum() / gain.sum())
        counts = torch.from_numpy(stored_counts(lab, domain))[test.reading.gold]
        middle = counts.median()
        rare, frequent = float(gain[counts <= middle].mean()), float(gain[counts > middle].mean())
        holds.append(worse > 0.5 or rare < frequent)
        worse_shares.append(f"{worse:.0%}")
        quartiles = [float(value) for value in gain.quantile(torch.tensor([0.5, 0.25, 0.75]).double())]
        rows.append([domain, f"{worse:.1%}", quartiles, float(gain.mean()), f"{top:.0%}", rare, frequent])
        slices += sliced(domain, test.lm_log_probs, mixed, counts)
    head = ["domain", "made worse", "median gain (quartiles)", "mean gain", "gain from the best tenth",
            "mean gain, rare half", "frequent half"]  # fmt: skip
    return Finding(
        settle(holds),
        f"Made worse by the calibrated mixture: {', '.join(worse_shares)} of the tokens. Gains are of "
        "log-probability, in nats; `gain from the best tenth` is the share of the whole gain that the tenth "
        "of the tokens with the largest gains has, above 100 % where the others lose.",
        [
            Table(head, rows),
            Table(
                ["domain", "stored so often", "tokens", "the model alone", "mixture", "made worse"],
                slices,
                "By how often the token is stored",
            ),
        ],
    )


def stored_counts(lab: Lab, domain: str) -> np.ndarray:
    """How often the domain's store holds each token."""
    lab.base.stored(domain)
    return np.array(lab.base.lm.store.token_counts(Selection(domains=(domain,))))


def sliced(domain: str, lm: torch.Tensor, mixed: torch.Tensor, counts: torch.Tensor) -> list[list[object]]:
    """Tokens by the power of ten of how often they are stored."""
    powers = [0, *(10**power for power in range(len(str(int(counts.max()))))), int(counts.max()) + 1]
    rows: list[list[object]] = []
    for low, high in pairwise(powers):
        within = (counts >= low) & (counts < high)
        if within.any():
            worse = float((mixed[within] < lm[within]).double().mean())
            name = "never" if low == 0 else f"{low:,} to {high - 1:,}"
            rows.append(
                [domain, name, int(within.sum()), ppl(lm[within]), ppl(mixed[within]), f"{worse:.0%}"]
            )
    return rows
