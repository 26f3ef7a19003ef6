"""Finding the settings that are best for a user's own model, store and text."""

from knnstore.lm.calibration.calibrating import Calibration, calibrate
from knnstore.lm.calibration.candidates import Comparison
from knnstore.lm.calibration.probing import Probe, Probed, probe_keys

__all__ = [
    "Calibration", "Comparison", "Probe", "Probed", "calibrate", "probe_keys",
]  # fmt: skip
