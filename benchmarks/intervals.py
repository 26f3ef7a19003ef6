"""What intervals of 95 % cover, by simulation: how often they hold the perplexity of all documents.

    python benchmarks/intervals.py [--rounds 2000] [--documents 8 12 40]
    python benchmarks/intervals.py --smoke          a second, to see that it runs

Populations of documents are simulated, their lengths alike or with a long tail, each loss about its own mean;
samples are drawn, and each way to make an interval is asked whether it holds the mean loss of the
population. Beside what is in use (the jackknife over documents, with as many degrees of freedom as there are
documents by the squares of their lengths): the percentiles of a bootstrap, BCa, the bootstrap-t, and the
jackknife with one degree of freedom less than documents. Then long single files whose losses drift, cut into
blocks. Markdown goes to stdout.
"""

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.scoring import assign_blocks, compute_interval

Floats = NDArray[np.float64]
Population = Callable[[np.random.Generator, int], tuple[Floats, Floats]]
"""Losses of so many documents, and their lengths."""
NORMAL = statistics.NormalDist()
RESAMPLES = 499
TOKEN = 2.5  # nats: the spread of the loss of a token
DRIFTS = (20, 100, 400)  # tokens
FILES = (2_000, 10_000, 40_000)  # tokens


def of_rates(lengths: Floats, rates: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Documents whose tokens lose about so much each."""
    seen = rates + rng.normal(size=len(lengths)) * TOKEN / np.sqrt(lengths)
    return lengths * seen, lengths


def long_tailed(rng: np.random.Generator, count: int) -> Floats:
    """Lengths, some of which are very long."""
    return np.maximum(20, np.floor(np.exp(rng.normal(6, 1, count))))


def alike(rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    return of_rates(np.full(count, 500.0), np.exp(rng.normal(1.3, 0.15, count)), rng)


def uneven(rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    return of_rates(long_tailed(rng, count), np.exp(rng.normal(1.3, 0.15, count)), rng)


def longer_is_easier(rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    lengths = long_tailed(rng, count)
    return of_rates(lengths, np.exp(1.3 - 0.1 * (np.log(lengths) - 6) + rng.normal(0, 0.15, count)), rng)


def outliers(rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    return of_rates(long_tailed(rng, count), -0.8 + 0.25 * rng.standard_t(3, count), rng)


def few_gain(rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
    gains = np.where(rng.random(count) < 0.15, 1.5, 0.1)
    return of_rates(long_tailed(rng, count), -gains + 0.05 * rng.normal(size=count), rng)


POPULATIONS: dict[str, Population] = {
    "of one length": alike,
    "of very different lengths": uneven,
    "and longer ones are easier": longer_is_easier,
    "and a few differ much": outliers,
    "and a seventh has nearly all of the gain": few_gain,
}


def intervals(losses: Floats, lengths: Floats, draws: Floats) -> dict[str, tuple[float, float]]:
    """Bounds of the mean loss of a token in each way; draws says how often each document is, (b, n)."""
    count, mean = len(losses), losses.sum() / lengths.sum()
    drawn = draws @ lengths
    means = draws @ losses / drawn
    without = (losses.sum() - losses) / (lengths.sum() - lengths)
    slopes = without.mean() - without
    bend = (slopes**3).sum() / (6 * (slopes**2).sum() ** 1.5)
    below = np.clip((means < mean).mean() + (means == mean).mean() / 2, 1e-4, 1 - 1e-4)
    start = NORMAL.inv_cdf(float(below))
    shares = [NORMAL.cdf(start + (start + z) / (1 - bend * (start + z))) for z in (-1.96, 1.96)]
    error = math.sqrt(count / (count - 1) * ((losses - mean * lengths) ** 2).sum()) / lengths.sum()
    squares = draws @ losses**2 - 2 * means * (draws @ (losses * lengths)) + means**2 * (draws @ lengths**2)
    errors = np.sqrt(np.maximum(squares, 0) * count / (count - 1)) / drawn
    with np.errstate(all="ignore"):
        ratios = (means - mean) / errors
    low, high = np.quantile(
        np.where(np.isfinite(ratios), ratios, np.sign(means - mean) * 1e9), [0.025, 0.975]
    )
    jackknife = math.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum()) * student(count - 1)
    used = compute_interval(losses, lengths.astype(np.int64))
    return {
        "percentiles": tuple(np.quantile(means, [0.025, 0.975])),
        "BCa": tuple(np.quantile(means, shares)),
        "bootstrap-t": (mean - high * error, mean - low * error),
        "jackknife, t of n-1": (mean - jackknife, mean + jackknife),
        "in use": (math.log(used.low) if used.low else -math.inf, math.log(used.high)),
    }


def student(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t (Cornish and Fisher), for 7 degrees of freedom or more."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def covered(population: Population, count: int, rounds: int, size: int) -> dict[str, float]:
    """Return the share of samples of so many documents whose interval holds the mean of the population."""
    rng = np.random.default_rng(count)
    losses, lengths = population(rng, size)
    truth = losses.sum() / lengths.sum()
    hits: Counter[str] = Counter()
    for _ in range(rounds):
        draws = rng.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(float)
        for way, (low, high) in intervals(*population(rng, count), draws).items():
            hits[way] += low <= truth <= high
    return {way: hit / rounds for way, hit in hits.items()}


def covered_in_file(drift: int, tokens: int, rounds: int) -> float:
    """Return that share for one file, whose loss has a part that is correlated over a number of tokens."""
    rng = np.random.default_rng(tokens)
    kept, hits = math.exp(-1 / drift), 0
    blocks = assign_blocks(np.zeros(tokens, np.int64))
    weights = kept ** np.arange(8 * drift) * math.sqrt(1 - kept**2)
    for _ in range(rounds):
        slow = np.convolve(rng.normal(size=tokens + len(weights) - 1), weights, mode="valid")
        losses = TOKEN * (rng.exponential(1, tokens) - 1) + 0.6 * slow + 3.5
        found = compute_interval(np.bincount(blocks, losses), np.bincount(blocks))
        hits += found.low <= math.exp(3.5) <= found.high
    return hits / rounds


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2_000)
    parser.add_argument("--documents", type=int, nargs="+", default=[8, 12, 40])
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rounds, size = (20, 10_000) if options.smoke else (options.rounds, 2_000_000)
    titles: list[str] = []
    for name, population in POPULATIONS.items():
        for count in options.documents:
            shares = covered(population, count, rounds, size)
            if not titles:
                titles = ["documents", "number", *shares]
                print(line(titles), line("---" for _ in titles).replace(" ", ""), sep="\n")
            print(line([name, count, *(f"{share:.1%}" for share in shares.values())]), flush=True)
    print()
    for drift in DRIFTS[:1] if options.smoke else DRIFTS:
        for tokens in FILES[:1] if options.smoke else FILES:
            share = covered_in_file(drift, tokens, max(1, rounds // 3))
            print(f"One file of {tokens:,} tokens, correlated over {drift}: {share:.1%}.", flush=True)


if __name__ == "__main__":
    main()
