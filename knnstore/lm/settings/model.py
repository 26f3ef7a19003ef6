"""What a model with a store is to whoever scores, calibrates or explains with it."""

from dataclasses import dataclass
from typing import Protocol

from knnstore.lm.reading import TextReader
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import KNNStore


class KNNModel(Protocol):
    """`KNNLMForCausalLM`, or anything else with these parts."""

    store: KNNStore
    knn: KNNSettings
    """The settings of calls that give none."""

    @property
    def reader(self) -> TextReader:
        """The model that reads text."""
        ...


@dataclass
class KNNModelParts:
    """The parts by themselves."""

    store: KNNStore
    reader: TextReader
    knn: KNNSettings
