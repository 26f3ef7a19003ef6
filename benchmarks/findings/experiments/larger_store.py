"""A model trained on little text with a store of more, against a model trained on all of it."""

from finding import Finding, Table, below, count, each, settle
from judging import interval, ratio
from lab import Lab

TITLE = "A store of more text can replace training on it"
CLAIM = """Khandelwal et al. 2020, table 3: a model trained on 100 million tokens has 19.59, with a store
of 3 billion 13.73; one trained on the 3 billion has 15.17."""
RULE = """in a domain it holds if a model fine-tuned (three epochs) on a quarter of the text, with a store
of all of it, has a lower perplexity than the model fine-tuned on all of it, with the whole interval of
the ratio; the contrary if the whole interval is above 1."""
MINUTES = 60.0


def run(lab: Lab) -> Finding:
    """Store all text with the model that has read a quarter of it."""
    rows, changes = [], []
    for domain in lab.domains:
        fraction = lab.train_fraction(domain)
        few = lab.tuned(domain, 3, fraction * 4)
        memory = lab.memory(few.model, f"{domain}-3-{fraction * 4}")
        settings = lab.calibrated(domain, memory, fraction)
        test = memory.scored(domain, "test", fraction=fraction)
        mixed = test.log_probs(settings).log_probs
        all_read = lab.tuned(domain, 3, fraction)
        whole = lab.alone(all_read.model, domain, "test").lm_log_probs
        change = ratio(test, mixed, whole)
        changes.append(change)
        alone = interval(test, test.lm_log_probs)
        rows.append(
            [
                domain,
                few.tokens,
                alone,
                interval(test, mixed),
                all_read.tokens,
                interval(test, whole),
                change,
            ]
        )
    holds = [below(change) for change in changes]
    head = ["domain", "trained on", "alone", "with a store of all", "trained on all", "alone", "ratio"]
    return Finding(
        settle(holds),
        f"The store of all text was better than training on all of it in {count(holds)}; "
        f"ratios: {each(changes)}.",
        [Table(head, rows)],
    )
