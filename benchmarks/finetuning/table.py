"""The figures as Markdown: perplexities of test, and their ratios with intervals by document."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from controls import CUT, MIXED, OVERFITTED
from sides import BOTH, CACHED, CHOSEN, FIXED, KEYS, LEARNED, NGRAMS, ROWS, STORE, UNFITTED
from steps import Floats

from knnstore.lm import Interval
from knnstore.lm.scoring import assign_blocks, compute_interval

BASE, TUNED, THRICE = "base", "fine-tuned", "three epochs"
ON_TUNED = f"{TUNED}, "
SIDES = {
    "the model": BASE,
    "with n-grams": NGRAMS,
    "a classic kNN-LM": "classic",
    "keys of the store, one λ and T": FIXED,
    "keys of the store, calibrated": KEYS,
    "the store": STORE,
    "the store, calibrated on its text too": LEARNED,
    "trained rows for each token, no store": ROWS,
    "the store and trained rows": BOTH,
    "fine-tuned": TUNED,
    "fine-tuned, three epochs": THRICE,
    "fine-tuned, with the store": f"{ON_TUNED}{STORE}",
}
"""The rows, and the name of each side."""
RATIOS = {
    "store ÷ three epochs": (STORE, THRICE),
    "store ÷ three epochs, both with the cache": (STORE + CACHED, THRICE + CACHED),
    "calibrated on its text too ÷ three epochs": (LEARNED, THRICE),
    "calibrated on its text too ÷ three epochs, both with the cache": (LEARNED + CACHED, THRICE + CACHED),
    "calibrated on its text too ÷ the store": (LEARNED, STORE),
    "calibrated on its text too ÷ the store, both with the cache": (LEARNED + CACHED, STORE + CACHED),
    "store ÷ best fine-tuned": (STORE, TUNED),
    "store ÷ best fine-tuned, both with the cache": (STORE + CACHED, TUNED + CACHED),
    "fine-tuned with the store ÷ fine-tuned": (f"{ON_TUNED}{STORE}", TUNED),
    "the same, both with the cache": (f"{ON_TUNED}{STORE}{CACHED}", TUNED + CACHED),
    "n-grams ÷ classic kNN-LM": (NGRAMS, "classic"),
    "the store and trained rows ÷ the store": (BOTH, STORE),
    "the store and trained rows ÷ the store, both with the cache": (BOTH + CACHED, STORE + CACHED),
    "keys calibrated ÷ best fixed λ, T, cells": (KEYS, FIXED),
    "store calibrated ÷ best fixed λ, T, cells of its keys": (STORE, FIXED),
    "saved by calibrate, cache included ÷ the same": (CHOSEN, FIXED),
    "keys of the store, one λ and T ÷ the model": (FIXED, BASE),
    "the model and its likeliest tokens, one λ ÷ the model": (CUT, BASE),
    "overfitted ÷ the model": (OVERFITTED, BASE),
    "the model and the overfitted, one λ ÷ the model": (MIXED, BASE),
    "keys of the store at λ = .25, T = 1 ÷ the model": (UNFITTED, BASE),
    "fine-tuned, its keys at λ = .25, T = 1 ÷ fine-tuned": (f"{ON_TUNED}{UNFITTED}", TUNED),
    "fine-tuned, its keys calibrated ÷ fine-tuned": (f"{ON_TUNED}{KEYS}", TUNED),
}


def table(title: str, found: Mapping[str, Floats], notes: Sequence[str]) -> str:
    """One part of one domain."""
    blocks = assign_blocks(found["documents"].astype(np.int64))
    lengths = np.bincount(blocks)

    def ratio(one: str, other: str | None = None) -> Interval | None:
        """Return a perplexity, or with another its quotient."""
        if one not in found or (other is not None and other not in found):
            return None
        gap = found[one] if other is None else found[one] - found[other]
        return compute_interval(-np.bincount(blocks, gap), lengths)

    lines = [
        f"### {title}",
        "",
        "| | perplexity | ÷ fine-tuned | with the cache | ÷ fine-tuned with it |",
        "|---|---|---|---|---|",
    ]
    for row, side in SIDES.items():
        both = (ratio(side), ratio(side, TUNED), ratio(side + CACHED), ratio(side + CACHED, TUNED + CACHED))
        if both[0] is None:
            continue
        plain = [shown(one, bounds=bool(at % 2)) for at, one in enumerate(both)]
        lines.append(f"| {row} | {' | '.join(plain)} |")
    lines += ["", "| | ratio (95 % by document) |", "|---|---|"]
    quotients = {row: ratio(*sides) for row, sides in RATIOS.items()}
    lines += [f"| {row} | {shown(of)} |" for row, of in quotients.items() if of is not None]
    return "\n".join([*lines, "", *notes, ""])


def shown(of: Interval | None, *, bounds: bool = True) -> str:
    """Return a perplexity, or a ratio with its bounds."""
    if of is None:
        return "–"
    return f"{of.ppl:.3f} ({of.low:.3f} – {of.high:.3f})" if bounds else f"{of.ppl:.2f}"


def summary(values: Mapping[str, Any]) -> list[str]:
    """Return the notes below the table."""
    best, thrice = values["best"], values["thrice"]
    return [
        f"{values['tokens']:,} tokens stored, {values['test_tokens']:,} of test in {values['documents']:,} "
        f"documents. Fine-tuned: learning rate {best['rate']:g}, {best['epochs']} epochs, the best of "
        f"{values['runs']} on dev; of three epochs {thrice['rate']:g}. "
        f"`calibrate` chose {values['saved']}. Device: {values['device']}."
    ]
