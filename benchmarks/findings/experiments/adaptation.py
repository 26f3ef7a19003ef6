"""A store of a new domain against fine-tuning on the same text."""

import math

from finding import Finding, Table, count, each, settle
from judging import interval, ppl, ratio, with_cache
from lab import Lab

from knnstore.lm import KNNSettings

TITLE = "A store closes most of the gap to a model fine-tuned on the same text"
CLAIM = """Khandelwal et al. 2020, table 4 (books, with a model of Wikipedia): 34.84 alone, 20.47 with a
store of books, 11.89 for a model trained on books: 63 % of the way, for one pass over the text."""
RULE = """in a domain it holds if (alone - store) ÷ (alone - fine-tuned) of the log-perplexities is at
least one half, for the model fine-tuned for three epochs; the contrary if it is less. AdamW, learning rate
0.001 with warm-up and linear decay, a run for each number of epochs; seconds of storing are of the same
text, without those of calibration. Both have a continuous cache in other columns, fitted on dev. Mended when
the figures were known: it was of perplexities, and those of the base model are so high that any store closes
most of the gap. `benchmarks/finetuning` compares like with like."""
MINUTES = 90.0


def run(lab: Lab) -> Finding:
    """Fine-tune for one and for three epochs, and compare with the store of the same documents."""
    rows, holds, without, both_with = [], [], [], []
    for domain in lab.domains:
        fraction = lab.train_fraction(domain)
        test = lab.base.scored(domain, "test", fraction=fraction)
        stored, part = lab.base.stored(domain), f"1/{fraction}"
        seconds = stored.seconds * stored.tokens[part] / stored.tokens["1/1"]
        dev = lab.base.scored(domain, "dev", fraction=fraction)
        settings = lab.calibrated(domain, fraction=fraction)
        store = test.log_probs(settings).log_probs
        both = test.log_probs(with_cache(dev, settings)).log_probs
        tuned = {epochs: lab.tuned(domain, epochs, fraction) for epochs in (1, 3)}
        read = {epochs: lab.alone(of.model, domain, "test") for epochs, of in tuned.items()}
        once, thrice = (read[epochs].lm_log_probs for epochs in (1, 3))
        cache = with_cache(lab.alone(tuned[3].model, domain, "dev"), KNNSettings(k=1, lam=0.0))
        thrice_and_cache = read[3].log_probs(cache).log_probs
        base = ppl(test.lm_log_probs)
        closed = math.log(base / ppl(store)) / math.log(base / ppl(thrice))
        holds.append(closed >= 0.5)
        without.append(ratio(test, store, thrice))
        both_with.append(ratio(test, both, thrice_and_cache))
        rows.append(
            [domain, tuned[3].tokens, base, interval(test, store), interval(test, both), seconds,
             interval(test, once), tuned[1].seconds, interval(test, thrice), tuned[3].seconds,
             interval(test, thrice_and_cache), f"{closed:.0%}", without[-1], both_with[-1]]
        )  # fmt: skip
    head = ["domain", "tokens", "the model alone", "store", "store and cache", "s",
            "fine-tuned, 1 epoch", "s", "3 epochs", "s", "3 epochs and cache", "gap closed",
            "store ÷ 3 epochs", "both with the cache"]  # fmt: skip
    return Finding(
        settle(holds),
        f"The store closed at least half of the gap in {count(holds)}; store ÷ three epochs: "
        f"{each(without)}. Both with the cache: {each(both_with)}.",
        [Table(head, rows)],
    )
