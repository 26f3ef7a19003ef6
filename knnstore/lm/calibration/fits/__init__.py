"""Fits of each part of the settings, on text that was scored once."""

from knnstore.lm.calibration.fits.domains import MOST_DOMAINS, DomainEvidence, fit_domains
from knnstore.lm.calibration.fits.gate import fit_gate
from knnstore.lm.calibration.fits.joint import fit_joint, fit_together, fit_with_ngrams
from knnstore.lm.calibration.fits.mixers import best_fixed, fit_bins, fit_fixed

__all__ = [
    "MOST_DOMAINS",
    "DomainEvidence",
    "best_fixed",
    "fit_bins",
    "fit_domains",
    "fit_fixed",
    "fit_gate",
    "fit_joint",
    "fit_together",
    "fit_with_ngrams",
]
