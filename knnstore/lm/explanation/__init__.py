"""Why each token of a text is likely: parts of its probability, records, places, documents."""

from knnstore.lm.explanation.explained import (
    THIS_TEXT,
    DocumentEffect,
    Explanation,
    Part,
    Source,
    TokenExplanation,
)
from knnstore.lm.explanation.explaining import explain, explain_in_turns, explain_tokens

__all__ = [
    "THIS_TEXT",
    "DocumentEffect",
    "Explanation",
    "Part",
    "Source",
    "TokenExplanation",
    "explain",
    "explain_in_turns",
    "explain_tokens",
]
