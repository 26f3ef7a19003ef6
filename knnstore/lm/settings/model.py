"""Protocols of a model with a store, for code that scores, calibrates, explains or generates with it."""

from dataclasses import dataclass
from typing import Any, Protocol

from knnstore.lm.reading import TextReader
from knnstore.lm.settings.query import KNNSettings
from knnstore.store import KNNStore, Reader


class ReadingModel(Protocol):
    """A model with a store that is opened for reading; methods that score and explain text take it."""

    knn: KNNSettings
    """Settings for calls that pass no settings."""

    @property
    def store(self) -> Reader:
        """The store that is searched."""

    @property
    def reader(self) -> TextReader:
        """The base model with its tokenizer and windows."""


class KNNModel(ReadingModel, Protocol):
    """A model with a store that may be opened for writing, such as `KNNLMForCausalLM`."""

    @property
    def store(self) -> KNNStore:
        """The store that is searched, open for writing if the caller writes to it."""


class GeneratingModel(KNNModel, Protocol):
    """A model with a store that generates text: `KNNLMForCausalLM`."""

    generation_config: Any
    """Default options of `generate`, a `GenerationConfig` of transformers."""

    def generate(self, *args: Any, knn: KNNSettings | None = None, **kwargs: Any) -> Any:
        """Generate tokens as transformers' `GenerationMixin.generate` does.

        Args:
            *args: arguments of `GenerationMixin.generate`.
            knn: settings of this call; None uses the settings ``self.knn``.
            **kwargs: arguments of `GenerationMixin.generate`.
        """


@dataclass
class ReadingParts:
    """A `ReadingModel` that is created from an open store, a reader and settings."""

    store: Reader
    reader: TextReader
    knn: KNNSettings
