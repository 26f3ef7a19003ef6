"""Far more neighbors than the papers use."""

import torch
from finding import Finding, Table, below, count, each, settle
from judging import best_fixed, interval, ratio
from lab import Lab

from knnstore.lm.calibration.fits.mixers import fit_fixed
from knnstore.lm.calibration.searches import FurtherSearches, WideEvidence
from knnstore.store import Selection

TITLE = "More than 1,024 neighbors still help a little"
CLAIM = """Khandelwal et al. 2020 stop at k = 1024, where the curve is nearly flat; Geng et al. 2024 use
up to 2,048. No paper known to us goes on to the whole store."""
RULE = """in a domain it holds if the perplexity at the best larger k, chosen on dev, divided by that at
the k of the other experiments, is below 1 with its whole interval; the contrary if it is above. One λ and
one T, fitted for each k."""
MINUTES = 60.0
KS = (4096, 16384)


def run(lab: Lab) -> Finding:
    """Search again with larger k."""
    rows, taken = [], []
    for domain in lab.domains:
        dev, test = lab.dev(domain), lab.test(domain)
        tokens = lab.base.stored(domain).tokens["1/1"]
        ks = [k for k in KS if dev.k < k <= tokens] or [tokens]
        every_token = torch.arange(len(test))
        plain = best_fixed(dev)
        reference = test.log_probs(plain).log_probs
        rows.append([domain, plain.k, interval(test, reference), None, plain.temperature, plain.mixer.lam])
        losses, changes = [], []
        wide = {split: searched(lab, domain, split, ks) for split in ("dev", "test")}
        for of_dev, of_test in zip(wide["dev"], wide["test"], strict=True):
            settings = fit_fixed(of_dev.evidence)
            losses.append(
                -float(of_dev.log_probs(settings, torch.arange(len(dev))).log_probs.double().mean())
            )
            log_probs = of_test.log_probs(settings, every_token).log_probs
            changes.append(ratio(test, log_probs, reference))
            rows.append(
                [domain, settings.k, interval(test, log_probs), changes[-1], settings.temperature,
                 settings.mixer.lam]
            )  # fmt: skip
        taken.append(changes[losses.index(min(losses))])
    holds = [below(change) for change in taken]
    return Finding(
        settle(holds),
        f"A larger k was better beyond chance in {count(holds)}; ratios: {each(taken)}.",
        [Table(["domain", "k", "perplexity", f"÷ k = {lab.limits.k:,}", "T", "λ"], rows)],
    )


def searched(lab: Lab, domain: str, split: str, ks: list[int]) -> list[WideEvidence]:
    """Search with larger k for the tokens of a pass."""
    lab.say(f"{domain}: searching again for {split}, k={ks[-1]}")
    scored = lab.base.scored(domain, split)
    documents, selection = lab.texts[domain][split], Selection(domains=(domain,))
    return FurtherSearches(lab.base.lm.store, scored, documents, selection).search_with_k(ks)
