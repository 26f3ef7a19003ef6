"""Finding the settings that are best for a user's own model, store and text.

`calibrate` runs all steps. To measure another method, call the steps one by one: `score_once` scores text,
`compare_candidates` fits candidates on the text and judges them, and a `Judge` computes perplexities with
intervals.
"""

from knnstore.lm.calibration.calibrating import Calibration, calibrate
from knnstore.lm.calibration.candidates import Comparison, FittableMixer, compare_candidates
from knnstore.lm.calibration.evidence import GridEvidence
from knnstore.lm.calibration.fits import fit_temperature_and_lambda
from knnstore.lm.calibration.judging import MIN_DOCUMENTS, MIN_TOKENS, Judge
from knnstore.lm.calibration.scored_text import ScoredText, score_once
from knnstore.lm.calibration.trying import Candidate

__all__ = [
    "MIN_DOCUMENTS",
    "MIN_TOKENS",
    "Calibration",
    "Candidate",
    "Comparison",
    "FittableMixer",
    "GridEvidence",
    "Judge",
    "ScoredText",
    "calibrate",
    "compare_candidates",
    "fit_temperature_and_lambda",
    "score_once",
]
