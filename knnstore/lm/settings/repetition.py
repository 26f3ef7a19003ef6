"""Measured repetition of generated text, saved with calibrated settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repetition:
    """Means over continuations. Text that repeats itself has fewer distinct bigrams."""

    of: str
    """Source of the continuations: "text" (the documents), "model" (the model alone), "all" (all components
    of the settings), or "all but ..."."""
    distinct_bigrams: float
    """Number of different bigrams of a continuation, divided by the number of its bigrams."""
    repeated_4grams: float
    """Share of a continuation's 4-grams that occur earlier in it."""
    continuations: int
