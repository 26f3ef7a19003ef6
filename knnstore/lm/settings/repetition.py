"""Measured repetition of generated text, saved with calibrated settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repetition:
    """How much generated continuations repeat themselves, as means over the continuations."""

    of: str
    """Source of the continuations: "text" (the documents), "model" (the model alone), "all" (all components
    of the settings), or "all but ..."."""
    distinct_bigrams: float
    """Number of different bigrams of a continuation, divided by the number of its bigrams."""
    repeated_4grams: float
    """Share of a continuation's 4-grams that occur earlier in it."""
    continuations: int
    """Number of continuations."""
