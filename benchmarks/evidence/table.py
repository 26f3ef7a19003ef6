"""Tables of what was measured, made from the kept steps alone."""

import json
import math
from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from judging import right_of
from next_lines import NO_LINE
from numpy.typing import NDArray
from selecting import FROM
from sides import ALL, CACHED, LINES, MIXED, MODEL, NGRAMS
from steps import Step, read_step

from knnstore.lm.scoring import Interval, assign_blocks, compute_interval

KNOWN_SHARE = 0.1
"""A document of test is new if the store has less of it, word for word."""
_HEAD = (
    "| | perplexity | ÷ the model | top-1, % | perplexity from 200 | ÷ the model | the same, new documents "
    "| top-1 from 200, % "
    "| − the model, points | rare terms from 200, % | − the model, points |"
)


class Found(NamedTuple):
    """All steps of one domain."""

    arrays: Mapping[str, NDArray[Any]]
    """Log-probabilities and correct predictions of all sides; the target tokens' places, and `rare`."""
    values: Mapping[str, dict[str, Any]]
    """Values of each step, by its name."""


def read_steps(folder: Path) -> Found:
    """Read all kept steps of a domain."""
    arrays: dict[str, NDArray[Any]] = {}
    values: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        found: Step = read_step(folder, file.stem)
        arrays.update(found.log_probs)
        values[file.stem] = found.values
    return Found(arrays, values)


def list_sides(found: Found) -> list[str]:
    """Return the names of the sides, the model first, then as they are named."""
    names = [name for name in found.arrays if right_of(name) in found.arrays]
    return sorted(names, key=lambda name: (name != MODEL, name))


def make_report(domain: str, found: Found) -> str:
    """Return the tables of one domain as Markdown."""
    model = found.values["model"]
    positions = found.arrays["positions"]
    late = positions >= FROM
    rare = late & found.arrays["rare"]
    lines = [
        f"### {domain}",
        "",
        f"{len(positions):,} tokens of test in {model['test_documents']} documents, {int(late.sum()):,} of "
        f"them from token {FROM} on, {int(rare.sum()):,} of these in rare terms. {model['dev_tokens']:,} "
        f"tokens of dev in {model['dev_documents']} documents. {model['store_tokens']:,} tokens to store in "
        f"{model['store_documents']:,} documents. Share of a test document that the store has: at most "
        f"{max(model['shared_with_store']):.1%}, on average {np.mean(model['shared_with_store']):.1%}; a "
        f"tenth or more in {len(list_known_documents(found))}, the others are new.",
        "",
        _HEAD,
        "|---" * (_HEAD.count("|") - 1) + "|",
        *(make_row(found, side) for side in list_sides(found)),
        "",
        *make_gains(found, f"{NGRAMS} of {ALL}{CACHED}"),
        "",
        f"| from token {FROM} on | perplexity ÷ perplexity |",
        "|---|---|",
        *(make_comparison(found, *pair) for pair in list_pairs(found)),
        "",
        *make_lines(found),
        *make_failures(found, f"{NGRAMS} of {ALL}"),
        "| step | what it took and chose |",
        "|---|---|",
        *(f"| {name} | {json.dumps(describe_values(values))} |" for name, values in found.values.items()),
        "",
    ]
    return "\n".join(lines)


def make_summary(domains: Mapping[str, Found]) -> str:
    """Return two tables of all sides in all domains as Markdown, from token `FROM` on.

    Args:
        domains: what was measured, by the name of the domain.
    """
    sides = dict.fromkeys(side for found in domains.values() for side in list_sides(found))
    late = {name: found.arrays["positions"] >= FROM for name, found in domains.items()}
    titles = {
        "perplexity ÷ the model": lambda name, side: shown_ratio(
            perplexity(domains[name], side, late[name], MODEL)
        ),
        "top-1 − the model, points": lambda name, side: shown_points(
            accuracy_gain(domains[name], side, late[name])
        ),
    }
    lines = []
    for title, show in titles.items():
        lines += [f"| {title} | {' | '.join(domains)} |", "|---" * (1 + len(domains)) + "|"]
        for side in sides:
            cells = [show(name, side) if side in found.arrays else "–" for name, found in domains.items()]
            lines.append(f"| {side} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def make_gains(found: Found, side: str) -> list[str]:
    """Return a table of where a side's gain over the model lies, in nats; empty without the side."""
    if side not in found.arrays:
        return []
    gains = found.arrays[side].astype(np.float64) - found.arrays[MODEL]
    positions, before = found.arrays["positions"], found.arrays[MODEL]
    late = positions >= FROM
    total, of_late = gains.sum(), gains[late].sum()
    by_document = np.sort(np.bincount(found.arrays["documents"][late], gains[late]))[::-1]
    highest = np.sort(gains[late])[::-1][: max(1, int(late.sum()) // 100)].sum()
    shares = {
        "of the gain, at a document's first token": gains[positions == 0].sum() / total,
        f"of the gain, at its tokens 1 to {FROM - 1}": gains[(positions > 0) & ~late].sum() / total,
        f"of the gain, from token {FROM} on": of_late / total,
        f"of the gain from {FROM} on, at the hundredth of tokens with the highest": highest / of_late,
        f"of the gain from {FROM} on, in the two documents with the highest": by_document[:2].sum() / of_late,
        f"of the tokens from {FROM} on, more probable than by the model": float((gains[late] > 0).mean()),
        f"of the tokens from {FROM} on, less than .05 probable by the model": float(
            (before[late] < math.log(0.05)).mean()
        ),
        f"of the gain from {FROM} on, at these": gains[late & (before < math.log(0.05))].sum() / of_late,
    }
    rows = [f"| {name} | {100 * share:.0f} % |" for name, share in shares.items()]
    return [f"| share, {side} | |", "|---|---|", *rows]


def make_lines(found: Found) -> list[str]:
    """Return a table of the completed lines; empty if none were completed."""
    lines = [line for values in found.values.values() for line in values.get(LINES, [])]
    if not lines:
        return []
    documents = np.array([line["document"] for line in lines])
    names = list(lines[0]["written"])
    equal = {
        name: np.array([line["written"][name] == line["rest"] for line in lines], np.float64)
        for name in names
    }
    similar = {
        name: np.array([compare_texts(line["written"][name], line["rest"]) for line in lines])
        for name in names
    }
    rows = []
    for name in sorted(names, key=lambda each: (each != MODEL, each)):
        cells = [name]
        for measured in (equal, similar):
            gain = compute_points(measured[name] - measured[MODEL], documents)
            cells += [f"{100 * measured[name].mean():.1f}", shown_points(gain)]
        rows.append(f"| {' | '.join(cells)} |")
    head = (
        f"| {len(lines)} lines of {len(set(documents))} documents | exact, % | − the model, points "
        "| edit similarity, % | − the model, points |"
    )
    return [head, "|---" * 5 + "|", *rows, ""]


def compare_texts(text: str, other: str) -> float:
    """Return the similarity of two texts, 1 for equal ones: twice the matching letters by all letters."""
    return SequenceMatcher(None, text, other, autojunk=False).ratio()


def make_failures(found: Found, side: str) -> list[str]:
    """Return a table of what a side gives the tokens at which the model's greedy lines go wrong.

    A greedy line goes wrong at its first token that is not the most probable one after the document's own
    text. Lines from token `FROM` on count. Empty if the lines were not numbered.
    """
    if LINES not in found.arrays or side not in found.arrays:
        return []
    numbers, positions = found.arrays[LINES], found.arrays["positions"]
    counted = (positions >= FROM) & (numbers != NO_LINE)
    documents = found.arrays["documents"][counted]
    _, starts, line_of = np.unique(
        documents * (numbers.max() + 1) + numbers[counted], return_index=True, return_inverse=True
    )
    right = {name: found.arrays[right_of(name)][counted] for name in (MODEL, side)}
    log_probs = {name: found.arrays[name][counted] for name in (MODEL, side)}
    whole = {name: np.bincount(line_of, ~of_side) == 0 for name, of_side in right.items()}
    # 1) The first wrong token of each line that the model gets wrong.
    wrong = np.flatnonzero(~right[MODEL])
    failing_lines, first = np.unique(line_of[wrong], return_index=True)
    failures = wrong[first]
    # 2) What the side gives these tokens, and whether the line is right then.
    before, after = (log_probs[name][failures] for name in (MODEL, side))
    repaired = right[side][failures]
    shares = {
        "lines that the model gets right": whole[MODEL],
        "lines that the side gets right": whole[side],
        "lines that only the side gets right": whole[side] & ~whole[MODEL],
        "lines that only the model gets right": whole[MODEL] & ~whole[side],
        "the model's first wrong tokens: less than .05 probable by the model": before < math.log(0.05),
        "the same: at the beginning of the line": failures == starts[failing_lines],
        "the same: at least twice as probable by the side": after - before > math.log(2),
        "the same: most probable by the side": repaired,
        "lines whose first wrong token is most probable by the side: right to their end": whole[side][
            failing_lines[repaired]
        ],
    }
    rows = [f"| {name} | {100 * share.mean():.1f} % |" for name, share in shares.items()]
    gain = compute_points(whole[side].astype(np.float64) - whole[MODEL], documents[starts])
    return [
        f"| {len(starts):,} greedy lines from token {FROM} on, {side} | |",
        "|---|---|",
        f"| lines that the side gets right − the model, points | {shown_points(gain)} |",
        *rows,
        f"| wrong tokens in a line that the model gets wrong | {len(wrong) / len(failures):.1f} |",
        "",
    ]


def list_pairs(found: Found) -> list[tuple[str, str]]:
    """Return the pairs of measured sides that are compared with each other."""
    cheap = f"{NGRAMS} of {ALL}{CACHED}"
    mixed = [side for side in list_sides(found) if side.startswith(MIXED) and side.endswith(CACHED)]
    sides = list_sides(found)
    together = [side for side in sides if side.endswith(f" + {NGRAMS}{CACHED}")]
    alone = [side.removesuffix(f" + {NGRAMS}{CACHED}") for side in together]
    pairs = [(side, cheap) for side in (*mixed, *alone, *together)]
    pairs += zip(together, alone, strict=True)
    return [(one, other) for one, other in pairs if one in sides and other in sides]


def make_comparison(found: Found, side: str, other: str) -> str:
    """Return one line of the table of comparisons."""
    late = found.arrays["positions"] >= FROM
    return f"| {side} ÷ {other} | {shown_ratio(perplexity(found, side, late, other))} |"


def describe_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's values without the long ones, with few digits."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in values.items()
        if name not in ("settings", "tried", "shared_with_store", "with everything", LINES)
    }


def make_row(found: Found, side: str) -> str:
    """Return one line of the table of outcomes."""
    every = np.ones(len(found.arrays["positions"]), np.bool_)
    late = found.arrays["positions"] >= FROM
    rare = late & found.arrays["rare"]
    cells = [side]
    new = late & ~np.isin(found.arrays["documents"], list_known_documents(found))
    for tokens in (every, late):
        cells.append(f"{perplexity(found, side, tokens).ppl:.2f}")
        cells.append(shown_ratio(perplexity(found, side, tokens, MODEL)))
        if tokens is late:
            cells.append(f"{perplexity(found, side, new, MODEL).ppl:.3f}" if new.any() else "–")
        cells.append(f"{100 * found.arrays[right_of(side)][tokens].mean():.1f}")
    cells.append(shown_points(accuracy_gain(found, side, late)))
    cells += [f"{100 * found.arrays[right_of(side)][rare].mean():.1f}" if rare.any() else "–"]
    cells.append(shown_points(accuracy_gain(found, side, rare)) if rare.any() else "–")
    return f"| {' | '.join(cells)} |"


def list_known_documents(found: Found) -> list[int]:
    """Return the documents of test of which the store has a tenth or more, word for word."""
    shares = found.values["model"]["shared_with_store"]
    return [number for number, share in enumerate(shares) if share >= KNOWN_SHARE]


def perplexity(found: Found, side: str, tokens: NDArray[np.bool_], other: str | None = None) -> Interval:
    """Return a side's perplexity on some tokens, or its ratio to another side's, with its interval.

    Args:
        found: what was measured.
        side: name of the side.
        tokens: mask of the tokens, shape (n,).
        other: name of the side to divide by.
    """
    losses = -found.arrays[side][tokens].astype(np.float64)
    if other is not None:
        losses += found.arrays[other][tokens].astype(np.float64)
    return compute_mean(losses, found.arrays["documents"][tokens])


def accuracy_gain(found: Found, side: str, tokens: NDArray[np.bool_]) -> Interval:
    """Return a side's gain in accuracy over the model on some tokens, in points, with its interval."""
    right = (found.arrays[right_of(name)][tokens].astype(np.float64) for name in (side, MODEL))
    return compute_points(np.subtract(*right), found.arrays["documents"][tokens])


def compute_points(gains: NDArray[np.float64], documents: NDArray[np.int64]) -> Interval:
    """Return the mean of gains in points, which are not perplexities, with its interval over documents."""
    # `compute_mean` gives exp of a mean; its logarithm is the mean itself.
    mean = compute_mean(gains, documents)
    return Interval(*(100 * math.log(value) if 0 < value < math.inf else value for value in mean))


def compute_mean(values: NDArray[np.float64], documents: NDArray[np.int64]) -> Interval:
    """Return exp of the mean of a value over tokens, with its interval of 95 % over documents."""
    blocks = assign_blocks(documents.astype(np.int64))
    return compute_interval(np.bincount(blocks, values), np.bincount(blocks))


def shown_ratio(ratio: Interval) -> str:
    return f"{ratio.ppl:.3f} ({ratio.low:.3f} – {ratio.high:.3f})"


def shown_points(gain: Interval) -> str:
    return f"{gain.ppl:+.1f} ({gain.low:+.1f} – {gain.high:+.1f})"
