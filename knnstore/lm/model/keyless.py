"""Adding text to a store without keys, which takes its tokenizer and no model."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from knnstore.errors import ConfigError
from knnstore.lm.reading import TextReader, add, check_tokenizer
from knnstore.lm.settings import save_default_settings
from knnstore.store import KNNStore


@dataclass
class KeylessText:
    """A store that keeps no keys, open for writing, and the tokenizer of its model.

    Raises:
        FingerprintMismatchError: the store was made with another tokenizer.
    """

    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None

    add = add

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, self.store.identity)

    @property
    def reader(self) -> TextReader:
        """None is here."""
        raise ConfigError("text is read by a model with its tokenizer, and here is none")

    def after_adding(self) -> None:
        """Keep the default settings."""
        save_default_settings(self.store)
