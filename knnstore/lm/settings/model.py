"""What a model with a store is to whoever scores, calibrates or explains with it."""

from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.lm.reading import TextReader
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import KNNStore, Reader


class ReadingModel(Protocol):
    """A model with a store that is only read."""

    knn: KNNSettings
    """The settings of calls that give none."""

    @property
    def store(self) -> Reader:
        """Where it retrieves from."""

    @property
    def reader(self) -> TextReader:
        """The model that reads text."""


class KNNModel(ReadingModel, Protocol):
    """`KNNLMForCausalLM`, or anything else with these parts."""

    @property
    def store(self) -> KNNStore:
        """Where it retrieves from, opened for whatever is to be done."""


class WritingModel(KNNModel, Protocol):
    """A model that writes: `KNNLMForCausalLM`."""

    generation_config: Any
    """Its options of `generate`, a `GenerationConfig`."""

    def generate(self, *args: Any, knn: KNNSettings | None = None, **kwargs: Any) -> Any:
        """Write tokens as `GenerationMixin.generate` does."""


@dataclass
class ReadingParts:
    """The parts of a `ReadingModel` by themselves."""

    store: Reader
    reader: TextReader
    knn: KNNSettings
