"""A trained substitute of a store: what part of its gain needs no retrieval."""

from knnstore.lm.substitute.head import Heads, load_head
from knnstore.lm.substitute.training import EPOCHS, LEARNING_RATE, TrainedSubstitute, train_substitute

__all__ = [
    "EPOCHS",
    "LEARNING_RATE",
    "Heads",
    "TrainedSubstitute",
    "load_head",
    "train_substitute",
]
