"""How much written text repeats itself, as it is kept with saved settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Repetition:
    """Means over some continuations; the more text repeats itself, the fewer bigrams are distinct."""

    of: str
    """Who wrote them: "text" (the documents themselves), "model" (alone), "all" (every component of the
    settings), or "all but ..."."""
    distinct_bigrams: float
    """Different bigrams of a continuation, as a share of its bigrams."""
    repeated_4grams: float
    """The share of its 4-grams that stood earlier in it."""
    continuations: int
