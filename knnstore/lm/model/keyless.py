"""Creating a store without keys, and adding text to it: this needs the tokenizer, and not the model."""

import os
from dataclasses import dataclass
from typing import Self

from transformers import PreTrainedTokenizerBase

from knnstore.errors import ConfigError
from knnstore.lm.reading import (
    TextReader,
    add,
    check_tokenizer,
    get_model_name,
    identify_text,
    load_text_parts,
    sync,
    warn_if_no_text,
    warn_of_unknown_tokens,
)
from knnstore.lm.settings import save_default_settings
from knnstore.store import KEYLESS, KNNStore, check_new


@dataclass
class KeylessText:
    """A store without keys, opened for writing, with the tokenizer of its model.

    `add` adds documents, and `sync` makes a domain contain exactly the given documents.

    Args:
        store: the store.
        tokenizer: the tokenizer, which is checked against the store; None if no text will be tokenized.

    Raises:
        FingerprintMismatchError: the store was made with another tokenizer.

    Example:
        >>> text = KeylessText.create("news.knn", "google-t5/t5-small")  # doctest: +SKIP
        >>> text.add(["The council met."], domain="news")  # doctest: +SKIP
        >>> text.store.close()  # doctest: +SKIP
    """

    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None

    add = add
    sync = sync

    @classmethod
    def create(
        cls,
        home: str | os.PathLike[str],
        model: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        catalog: str | None = None,
    ) -> Self:
        """Create an empty store without keys for a model of any class, e.g. an encoder-decoder model.

        The weights are not loaded. The n-grams of the store can be used with `NGramLogitsProcessor`. All
        other functions of knnstore need a causal language model. For such a model, use
        ``knnstore.create(..., key=None)`` instead.

        Args:
            home: the folder of the store; new or empty.
            model: folder or hub id of the model, or the path of a GGUF file.
            tokenizer: the model's tokenizer; default is the tokenizer in the model's folder or hub id.
            catalog: SQLAlchemy URL of the catalog; default is SQLite in the home.

        Raises:
            StoreExistsError: the folder has a store already.
            ConfigError: the configuration or the tokenizer of the model cannot be used.
        """
        check_new(home, KEYLESS)
        config, tokenizer = load_text_parts(model, tokenizer)
        identity = identify_text(config, tokenizer, name=get_model_name(model))
        warn_if_no_text(config, identity.model)
        warn_of_unknown_tokens(identity.vocab_size, tokenizer)
        return cls(KNNStore.create(home, identity, store=KEYLESS, catalog=catalog), tokenizer)

    def __post_init__(self) -> None:
        if self.tokenizer is not None:
            check_tokenizer(self.tokenizer, self.store.identity)

    @property
    def reader(self) -> TextReader:
        """Always raise ConfigError, because a store without keys is used without a model that reads text."""
        raise ConfigError(
            "reading text needs a model and its tokenizer, but this store is open without a model"
        )

    def after_adding(self) -> None:
        """Save the default settings in the store, if no settings are saved for the whole store."""
        save_default_settings(self.store)
