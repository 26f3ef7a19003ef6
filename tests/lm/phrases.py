"""Random text in the words of the tests' tokenizer, of which much comes again."""

from collections.abc import Sequence

import numpy as np

from knnstore.documents import TextDocument


def words(rng: np.random.Generator, count: int, low: int = 4, high: int = 100) -> str:
    """Words drawn from w``low`` up to, but without, w``high``."""
    return " ".join(f"w{token}" for token in rng.integers(low, high, count))


def phrases(
    rng: np.random.Generator, count: int, low: int = 4, high: int = 60, length: int = 12
) -> list[str]:
    """What texts are made of."""
    return [words(rng, length, low, high) for _ in range(count)]


def text(rng: np.random.Generator, phrases: Sequence[str], count: int = 9) -> str:
    """Some of the phrases in a random order."""
    return " ".join(phrases[at] for at in rng.integers(0, len(phrases), count))


def documents(
    rng: np.random.Generator, phrases: Sequence[str], name: str, count: int, of: int = 9
) -> list[TextDocument]:
    """Documents ``name0``, ``name1``, ... of so many phrases each."""
    return [TextDocument(f"{name}{at}", text(rng, phrases, of)) for at in range(count)]
