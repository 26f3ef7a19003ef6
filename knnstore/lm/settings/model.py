"""Protocols of a model with a store, for code that scores, calibrates, explains or generates with it."""

from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.lm.reading import TextReader
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import KNNStore, Reader


class ReadingModel(Protocol):
    """A model with a store that is opened for reading."""

    knn: KNNSettings
    """Settings of calls without settings."""

    @property
    def store(self) -> Reader:
        """The store that it retrieves from."""

    @property
    def reader(self) -> TextReader:
        """The base model with its tokenizer and windows."""


class KNNModel(ReadingModel, Protocol):
    """A model with a store that may be opened for writing, such as `KNNLMForCausalLM`."""

    @property
    def store(self) -> KNNStore:
        """The store that it retrieves from, in the mode that the caller needs."""


class WritingModel(KNNModel, Protocol):
    """A model with a store that generates text: `KNNLMForCausalLM`."""

    generation_config: Any
    """Its default options of `generate`, a `GenerationConfig`."""

    def generate(self, *args: Any, knn: KNNSettings | None = None, **kwargs: Any) -> Any:
        """Generate tokens; see `GenerationMixin.generate`."""


@dataclass
class ReadingParts:
    """A `ReadingModel` made of its parts."""

    store: Reader
    reader: TextReader
    knn: KNNSettings
