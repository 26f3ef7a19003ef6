"""Scoring held-out text: perplexity, audits, scores of tokens, predictions of the store, and passages."""

from knnstore.lm.scoring.auditing import Audit, Check, audit
from knnstore.lm.scoring.confidence_intervals import (
    MIN_DOCUMENT_BLOCKS,
    Interval,
    assign_blocks,
    compute_interval,
)
from knnstore.lm.scoring.evaluation import Evaluation, evaluate
from knnstore.lm.scoring.loss_breakdown import DocumentScore, GroupScore, Intervals
from knnstore.lm.scoring.passage_search import Passage, search
from knnstore.lm.scoring.store_predictions import (
    TextNeighbors,
    compute_keys,
    compute_p_knn,
    export,
    find_neighbors,
)
from knnstore.lm.scoring.token_scores import (
    HeldOut,
    ReadTokens,
    TokenScores,
    group_by_left_out,
    score_held_out,
    score_text_in_turns,
    score_texts,
)
from knnstore.lm.scoring.token_table import TokenTable, replace_file

__all__ = [
    "MIN_DOCUMENT_BLOCKS",
    "Audit",
    "Check",
    "DocumentScore",
    "Evaluation",
    "GroupScore",
    "HeldOut",
    "Interval",
    "Intervals",
    "Passage",
    "ReadTokens",
    "TextNeighbors",
    "TokenScores",
    "TokenTable",
    "assign_blocks",
    "audit",
    "compute_interval",
    "compute_keys",
    "compute_p_knn",
    "evaluate",
    "export",
    "find_neighbors",
    "group_by_left_out",
    "replace_file",
    "score_held_out",
    "score_text_in_turns",
    "score_texts",
    "search",
]
