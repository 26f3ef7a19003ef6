"""N-grams of a store in programs that call a function on the logits of each step.

An n-gram is a sequence of n tokens; the n-grams of the stored text predict the next token from the last
tokens. `NGramLogitsProcessor` works in transformers' `generate` of any class of models, and in
llama-cpp-python. It uses only the text: no keys, no hidden states, and no wrapper around the model.
"""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import ConfigError
from knnstore.lm.components import NGramSettings
from knnstore.lm.contexts import Contexts
from knnstore.lm.row_mixer import RowMixer, Rows
from knnstore.lm.settings import DEFAULT_NGRAMS, KNNSettings, Overrides, resolve
from knnstore.store import KNNStore, Reader, Selection


class NGramLogitsProcessor:
    """Mixes predictions from the n-grams of a store's text into the logits of the next token.

    The store must have been made with the tokenizer of the model that generates. Documents that another
    process adds or removes count from the next token on. A token that the program has excluded, with a logit
    of -inf, stays excluded.

    Args:
        home: the folder of the store, or a store that is open for reading.
        domains: names of the domains (named sets of documents) whose text is used; None means all. Names that
            do not exist are left out, also when a domain is removed later. If no domain is left, the logits
            do not change.
        weight: λ, the weight of the n-grams, 0 <= λ <= 1, the same for all contexts. None means the store's
            saved weights, which depend on the number of last tokens that the stored text contains.
        order: number of tokens of the longest n-grams, >= 2; None means the store's saved order.
        skip: ids of tokens at the beginning of an input row that are not text: padding, or the start tokens
            of a decoder. If the store puts a BOS token before each document, that token belongs here too.

    Raises:
        StoreNotFoundError: the home has no store.
        ConfigError: `weight` or `order` is out of range.

    Example:
        >>> processors = LogitsProcessorList([NGramLogitsProcessor("news.knn", domains=["news"])])
        ... # doctest: +SKIP
        >>> model.generate(ids, logits_processor=processors)  # doctest: +SKIP
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | Reader,
        *,
        domains: Sequence[str] | None = None,
        weight: float | None = None,
        order: int | None = None,
        skip: Collection[int] = (),
    ) -> None:
        self._store = KNNStore.open(home) if isinstance(home, str | os.PathLike) else home
        self._domains = None if domains is None else tuple(domains)
        self._weight, self._order = weight, order
        self._skip = frozenset(skip)
        self._mixer = RowMixer(self._store)
        self._revision = -1
        self._settings = KNNSettings(lam=0.0)
        default = NGramSettings()  # with the values, which it checks
        replace(
            default,
            lam=default.lam if weight is None else weight,
            order=default.order if order is None else order,
        )

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Mix the n-grams into the scores of the next tokens of b texts, and return the mixed scores.

        Args:
            input_ids: token ids of the texts so far: an integer tensor of shape (b, t), as in transformers;
                or an integer array of shape (t,), as in llama-cpp-python.
            scores: logits or log-probabilities of the next token: a tensor of shape (b, v), or an array of
                shape (v,).

        Returns:
            Log-probabilities of the mixture, in the type, shape and dtype of `scores`. If no domain is left,
            the unchanged `scores` are returned.

        Raises:
            ConfigError: the store's tokenizer has tokens that `scores` lacks.
        """
        if isinstance(scores, np.ndarray):
            mixed = self._mix([np.asarray(input_ids, np.int64)], torch.from_numpy(scores)[None])
            return mixed[0].numpy().astype(scores.dtype)
        return self._mix(list(input_ids.cpu().numpy().astype(np.int64)), scores)

    def _mix(self, texts: list[NDArray[np.int64]], scores: Tensor) -> Tensor:
        """Mix the predictions of the n-grams into scores, and return log-probabilities, shape (b, v).

        If the selected domains no longer exist, the scores are returned unchanged. A score of -inf stays
        -inf.

        Args:
            texts: token ids of each of the b texts so far.
            scores: logits or log-probabilities of the next token, shape (b, v).

        Raises:
            ConfigError: the store's tokenizer has tokens that `scores` lacks.
        """
        settings = self._current_settings()
        if settings.is_model_alone:
            return scores
        if scores.shape[1] < self._store.identity.vocab_size:
            raise ConfigError(
                f"the store's model has a vocabulary of {self._store.identity.vocab_size:,} tokens, but the "
                f"scores have {scores.shape[1]:,}: use a store that was made with this model's tokenizer"
            )
        starts = [self._find_start(text) for text in texts]
        lengths = np.array([len(text) - start for text, start in zip(texts, starts, strict=True)], np.int64)
        contexts = replace(
            Contexts.from_documents([text[start:] for text, start in zip(texts, starts, strict=True)]),
            is_whole=[start > 0 or not self._store.identity.has_prefix for start in starts],
        ).with_positions(np.arange(len(texts)), lengths)
        keys = scores.new_zeros((len(texts), 0), dtype=torch.float32)
        mixed: Tensor = self._mixer.mix(Rows(scores, keys, contexts), [settings])
        return mixed.to(scores.dtype).masked_fill(scores == -torch.inf, -torch.inf)

    def _find_start(self, text: NDArray[np.int64]) -> int:
        """Return the number of tokens at the beginning of an input row that are not text and are skipped.

        These are the tokens before the first token whose id is not in `skip`. If all tokens are in `skip`,
        the length of the row is returned.
        """
        return next((at for at, token in enumerate(text.tolist()) if token not in self._skip), len(text))

    def _current_settings(self) -> KNNSettings:
        """Return retrieval settings that use only n-grams, for the domains that exist now.

        The settings are cached until the store changes. If no domain is left, they use nothing of the store.
        """
        revision = self._store.revision()
        if revision != self._revision:
            domains = self._domains
            if domains is not None:
                known = {domain.name for domain in self._store.domains()}
                domains = tuple(name for name in domains if name in known)
            self._settings = KNNSettings(lam=0.0) if domains == () else self._resolve(domains)
            self._revision = revision
        return self._settings

    def _resolve(self, domains: tuple[str, ...] | None) -> KNNSettings:
        """Return retrieval settings that use only n-grams of the given domains, without using the cache.

        Args:
            domains: names of domains that exist; None means all.
        """
        selection = Selection(domains=domains)
        asked = Overrides(selection=selection, ngram_order=self._order, ngram_lam=self._weight)
        ngrams = resolve(self._store, asked, default_if_unusable=True).ngrams or DEFAULT_NGRAMS
        return KNNSettings(lam=0.0, ngrams=ngrams, selection=selection)
