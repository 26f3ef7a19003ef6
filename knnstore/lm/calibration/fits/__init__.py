"""Fits of each part of the settings, on text that was scored once."""

from knnstore.lm.calibration.fits.domains import MOST_DOMAINS, DomainEvidence, fit_domains
from knnstore.lm.calibration.fits.gate import fit_gate
from knnstore.lm.calibration.fits.joint import fit_all_components, fit_joint, fit_with_ngrams
from knnstore.lm.calibration.fits.mixers import fit_bins, fit_fixed, fit_temperature_and_lambda

__all__ = [
    "MOST_DOMAINS",
    "DomainEvidence",
    "fit_all_components",
    "fit_bins",
    "fit_domains",
    "fit_fixed",
    "fit_gate",
    "fit_joint",
    "fit_temperature_and_lambda",
    "fit_with_ngrams",
]
