"""What part of the gain needs no retrieval."""

from finding import Finding, Table, below, count, settle
from judging import best_fixed, interval, ppl, ratio
from knnstore_research.substitute import add_substitute, fit_alone, fit_beside, train_substitute
from lab import Lab

from knnstore.lm.calibration.evidence import gather_evidence
from knnstore.lm.calibration.fits.mixers import fit_fixed
from knnstore.store import Selection

TITLE = "Part of the gain needs no store: trained rows for each token give it too"
CLAIM = """Xu et al. 2023: with the store replaced by rows of weights for each token of the vocabulary,
trained on the same keys while the model is frozen and mixed in the same way, about half of the gain
remains."""
RULE = """in a domain it holds if one row for each token has at least a third of the store's gain in
perplexity (alone - substitute) ÷ (alone - store), and the store is better still, with the whole interval
of the ratio; the contrary if either is false (the latter with its whole interval). T and λ are fitted
on dev."""
MINUTES = 40.0


def run(lab: Lab) -> Finding:
    """Train a substitute of every store and mix it alone and beside the store."""
    rows, holds, shares = [], [], []
    for domain in lab.domains:
        lm, selection = lab.base.lm, Selection(domains=(domain,))
        dev, test = lab.dev(domain), lab.test(domain)  # which stores the domain first
        lab.say(f"{domain}: training a substitute")
        trained = train_substitute(lm, domains=[domain])
        dev, test = (add_substitute(of, lm.store, selection, lm.device) for of in (dev, test))
        evidence = gather_evidence(dev, [dev.k])[0]
        only = test.log_probs(fit_alone(evidence.tokens, dev)).log_probs
        beside = test.log_probs(fit_beside(evidence, dev, fit_fixed)).log_probs
        store = test.log_probs(best_fixed(dev)).log_probs
        base = ppl(test.lm_log_probs)
        share = (base - ppl(only)) / (base - ppl(store))
        better = below(ratio(test, store, only))
        holds.append(False if share < 1 / 3 else better)
        shares.append(f"{share:.0%}")
        found = [interval(test, of) for of in (only, store, beside)]
        rows.append([domain, base, *found, f"{share:.0%}", trained.tokens, trained.seconds])
    names = ["domain", "the model alone", "substitute", "store", "both", "share of the gain", "rows", "s"]
    return Finding(
        settle(holds),
        f"The substitute had {', '.join(shares)} of the store's gain; the rule held in {count(holds)}.",
        [Table(names, rows)],
    )
