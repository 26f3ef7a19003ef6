"""λ in the model's own domain and out of it."""

from finding import Finding, Plot, Table, count, each, settle
from judging import best_fixed, knn_probs, lambda_interval, ppl
from lab import Lab

from knnstore.lm import KNNSettings

TITLE = "The best λ is small in the model's own domain and large out of it"
CLAIM = """Khandelwal et al. 2020, figure 5: the best λ is 0.25 in the domain that the model was trained
on, with a store of its own training text, and 0.65 in another; perplexity by λ has one minimum."""
RULE = """in a domain it holds if the interval of the best λ on dev is lower, as a whole, for the model
fine-tuned on the store's text (three epochs), with a store that it made of it, than for the base model;
the contrary if it is higher."""
MINUTES = 45.0


def run(lab: Lab) -> Finding:
    """Compare the base model with the one that was fine-tuned, each with its own store of the same text."""
    rows, holds, inner, outer, lines = [], [], [], [], {}
    for domain in lab.domains:
        fraction = lab.train_fraction(domain)
        found = []
        for name, memory in (("out of domain", lab.base), ("in domain", lab.inside(domain))):
            dev, test = (memory.scored(domain, split, fraction=fraction) for split in ("dev", "test"))
            settings = best_fixed(dev)
            found.append(lambda_interval(dev, dev.k, settings.temperature))
            mixed = test.log_probs(settings).log_probs
            rows.append([domain, name, found[-1], settings.temperature, ppl(test.lm_log_probs), ppl(mixed)])
            lines[f"{domain}, {name}"] = curve(test, settings)
        out, within = found
        outer.append(out)
        inner.append(within)
        holds.append(True if within.high < out.low else False if within.low > out.high else None)
    head = ["domain", "the model is", "best λ on dev", "T", "the model alone", "with the store"]
    return Finding(
        settle(holds),
        f"The best λ was smaller in domain, beyond chance, in {count(holds)}: {each(inner)} in "
        f"domain, {each(outer)} out of it.",
        [Table(head, rows)],
        [Plot("lambdas", "Perplexity of test by λ, divided by the model's own", "λ", "ratio", lines)],
    )


def curve(test, settings: KNNSettings) -> list[tuple[float, float]]:
    """Return the perplexity at each λ divided by that at 0."""
    lm, knn = test.lm_log_probs.exp(), knn_probs(test, settings.k, settings.temperature)
    base = ppl(test.lm_log_probs)
    grid = [step / 20 for step in range(20)]
    return [(lam, ppl((lm + lam * (knn - lm)).clamp(min=1e-30).log()) / base) for lam in grid]
