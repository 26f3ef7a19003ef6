"""Scoring held-out text: perplexity, a row for each token, and why each is likely."""

from knnstore.lm.scoring.evaluating import Evaluation, evaluate
from knnstore.lm.scoring.explaining import Source, TokenExplanation, explain_tokens
from knnstore.lm.scoring.held_out import score_held_out
from knnstore.lm.scoring.pruning import Pruning, PruningCost, prune
from knnstore.lm.scoring.token_table import TokenTable, replacing

__all__ = [
    "Evaluation",
    "Pruning",
    "PruningCost",
    "Source",
    "TokenExplanation",
    "TokenTable",
    "evaluate",
    "explain_tokens",
    "prune",
    "replacing",
    "score_held_out",
]
