"""Scoring held-out text: perplexity, a row for each token, and why each is likely."""

from knnstore.lm.scoring.arrays import TextNeighbors, keys, neighbors, p_knn
from knnstore.lm.scoring.auditing import Audit, Check, audit
from knnstore.lm.scoring.by_document import DocumentScore, GroupScore, Intervals
from knnstore.lm.scoring.evaluating import Evaluation, evaluate
from knnstore.lm.scoring.exporting import export
from knnstore.lm.scoring.held_out import HeldOut, grouped, score_held_out, score_text_in_turns, score_texts
from knnstore.lm.scoring.intervals import FEWEST, Interval, blocks_of, interval_of
from knnstore.lm.scoring.scores import ReadTokens, TokenScores
from knnstore.lm.scoring.searching import Passage, search
from knnstore.lm.scoring.token_table import TokenTable, replacing

__all__ = [
    "FEWEST", "Audit", "Check", "DocumentScore", "Evaluation", "GroupScore", "HeldOut", "Interval",
    "Intervals", "Passage", "ReadTokens", "TextNeighbors", "TokenScores",
    "TokenTable", "audit",
    "blocks_of", "evaluate", "export", "grouped", "interval_of", "keys", "neighbors",
    "p_knn", "replacing", "score_held_out", "score_text_in_turns", "score_texts", "search",
]  # fmt: skip
