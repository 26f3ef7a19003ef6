"""A trained substitute of a store: what part of its gain needs no retrieval."""

from knnstore.lm.substitute.head import Heads, load_head
from knnstore.lm.substitute.training import train_substitute

__all__ = ["Heads", "load_head", "train_substitute"]
