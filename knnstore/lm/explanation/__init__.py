"""Why each token of a text is likely: parts of its probability, records, places, documents."""

from knnstore.lm.explanation.explain_text import explain, explain_in_turns, explain_tokens
from knnstore.lm.explanation.token_explanations import (
    THIS_TEXT,
    DocumentEffect,
    Explanation,
    Part,
    Source,
    TokenExplanation,
)

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
