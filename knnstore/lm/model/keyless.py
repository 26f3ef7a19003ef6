"""Adding text to a store without keys: this needs the tokenizer, and not the model."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from knnstore.errors import ConfigError
from knnstore.lm.reading import TextReader, add, check_tokenizer
from knnstore.lm.settings import save_default_settings
from knnstore.store import KNNStore


@dataclass
class KeylessText:
    """A store without keys, opened for writing, with the tokenizer of its model; `add` adds documents.

    Args:
        store: the store.
        tokenizer: the tokenizer, which is checked against the store; None if no text will be tokenized.

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
        """Always raise ConfigError, because a store without keys is used without a model that reads text."""
        raise ConfigError("text is read by a model with its tokenizer, and here is none")

    def after_adding(self) -> None:
        """Save the default settings in the store, if no settings are saved for the whole store."""
        save_default_settings(self.store)
