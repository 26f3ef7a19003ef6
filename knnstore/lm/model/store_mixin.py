"""What a model with a store and a tokenizer can do beside what transformers knows."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from knnstore.documents import OnBad, documents_of
from knnstore.errors import ConfigError, InputError
from knnstore.lm.calibration import MAX_K, Calibration, calibrate
from knnstore.lm.keys import KeyLocation, Projection
from knnstore.lm.reading import BATCH_TOKENS, COMMIT_TOKENS, Added, Encoder, add_documents, prefix_of
from knnstore.lm.scoring import (
    Evaluation,
    Pruning,
    TokenExplanation,
    TokenTable,
    evaluate,
    explain_tokens,
    prune,
)
from knnstore.lm.settings import KNNSettings, Substitute, save_default_settings, settings_for
from knnstore.lm.substitute import EPOCHS, LEARNING_RATE, TrainedSubstitute, train_substitute
from knnstore.progress import Progress
from knnstore.store import KNNStore


class StoreMixin:
    """Adding documents, measuring, explaining and writing text; part of `KNNLMForCausalLM`."""

    base: PreTrainedModel
    store: KNNStore
    tokenizer: PreTrainedTokenizerBase | None
    location: KeyLocation
    projection: Projection | None
    knn: KNNSettings

    def add(
        self,
        documents: Iterable[object],
        *,
        domain: str,
        tags: Iterable[str] = (),
        on_bad: OnBad | None = None,
        commit_tokens: int = COMMIT_TOKENS,
        batch_tokens: int = BATCH_TOKENS,
        total_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> Added:
        """Store documents under a domain; see `add_documents`.

        Args:
            documents: rows ``{"id", "text", ...metadata}``, bare texts or `TextDocument`s; any
                iterable, also a `datasets` stream; read once.
            domain: the domain's name; made when it is new.
            tags: set on every document.
            on_bad: called for each document that cannot be used, which is then left out; None
                raises at the first.
            commit_tokens: documents become live in groups of about so many tokens.
            batch_tokens: tokens in one forward pass.
            total_bytes: UTF-8 bytes of all texts, if known, for the time left.
            progress: hears of each batch.

        Raises:
            InputError: a document cannot be used and `on_bad` is None; what was committed stays.
            ReadOnlyError: the store was opened for reading.
        """
        added = add_documents(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            documents_of(documents, on_bad=on_bad),
            domain=domain,
            tags=tags,
            commit_tokens=commit_tokens,
            batch_tokens=batch_tokens,
            total_bytes=total_bytes,
            progress=progress,
        )
        if added.tokens and self.store.settings() is None:
            save_default_settings(self.store)
            if self.knn == KNNSettings(selection=self.knn.selection):  # else its user chose others
                self.knn = settings_for(self.store, self.knn.selection)
        return added

    def evaluate(
        self,
        documents: Iterable[object],
        knn: KNNSettings | None = None,
        *,
        substitute: Substitute | None = None,
        leave_out: bool = False,
        table: TokenTable | None = None,
        progress: Progress | None = None,
    ) -> Evaluation:
        """Measure perplexity on held-out documents with and without the store; see `evaluate`.

        Args:
            documents: as in `add`.
            knn: settings of this call; default ``self.knn``.
            substitute: measured apart, for comparison.
            leave_out: a document that is itself in the store does not retrieve from itself.
            table: takes in a row for each token.
            progress: hears of each batch.
        """
        return evaluate(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            documents_of(documents),
            knn or self.knn,
            substitute=substitute,
            leave_out=leave_out,
            table=table,
            progress=progress,
        )

    def calibrate(
        self,
        documents: Iterable[object],
        *,
        domains: Iterable[str] | None = None,
        max_k: int = MAX_K,
        leave_out: bool = False,
        networks: bool = True,
        skip: float | None = None,
        progress: Progress | None = None,
    ) -> Calibration:
        """Fit all settings on held-out text and save the best; see `calibrate`.

        ``self.knn`` has them from then on if it selects the same domains.

        Args:
            documents: as in `add`.
            domains: what to retrieve from, and what the settings are saved for; default the whole store.
            max_k: neighbours to search for; smaller numbers are tried as well.
            leave_out: a document that is itself in the store does not retrieve from itself; else it
                is refused.
            networks: whether a gate is fitted as one more candidate, and where searches can be left out.
            skip: share of searches that the saved settings leave out, above 0 and below 1; None is none.
            progress: hears of each batch.

        Raises:
            ReadOnlyError: the store was opened for reading.
            InputError: a document is in the store, or there is too little text.
        """
        found = calibrate(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            documents_of(documents),
            domains=domains,
            max_k=max_k,
            leave_out=leave_out,
            networks=networks,
            skip=skip,
            progress=progress,
        )
        if found.record is not None and set(found.record.domains) == set(self.knn.selection.domains or ()):
            self.knn = settings_for(self.store, self.knn.selection)
        return found

    def prune(
        self,
        keep: float,
        *,
        method: str = "merge",
        domains: Iterable[str] = (),
        held_out: Iterable[object] = (),
        leave_out: bool = False,
        seed: int = 0,
        location: str | None = None,
        params: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Pruning:
        """Let only some records of each domain stay, and measure what it costs; see `prune`.

        Args:
            keep: share of each domain's tokens that shall have a record, above 0 and at most 1.
            method: which records go: ``merge``, ``known`` or ``random``.
            domains: the domains to prune; none is all.
            held_out: documents as in `add`, by which the cost is measured before the switch.
            leave_out: a held-out document that is itself in the store does not retrieve from itself; else
                it is refused.
            seed: of ``random``.
            location: a new place for the keys; by default a folder beside the old one, in the home.
            params: the adapter's parameters that differ from those in use.
            progress: hears of each batch.

        Raises:
            ConfigError: the method is unknown, or `keep` is out of range.
            InputError: a held-out document is in the store.
        """
        return prune(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            keep,
            method=method,
            domains=tuple(domains),
            held_out=documents_of(held_out),
            leave_out=leave_out,
            seed=seed,
            location=location,
            params=params,
            progress=progress,
        )

    def train_substitute(
        self,
        *,
        domains: Iterable[str] | None = None,
        rows: int = 1,
        epochs: int = EPOCHS,
        learning_rate: float = LEARNING_RATE,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> TrainedSubstitute:
        """Train and save a substitute of the store, which needs no retrieval; see `train_substitute`.

        Args:
            domains: what to train on, and what it is saved for; default the whole store.
            rows: of each token, >= 1.
            epochs: at most.
            learning_rate: at the beginning.
            seed: of all that is random.
            progress: hears of each batch.

        Raises:
            ReadOnlyError: the store was opened for reading.
            InputError: there are fewer than two documents.
        """
        return train_substitute(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            domains=domains,
            rows=rows,
            epochs=epochs,
            learning_rate=learning_rate,
            seed=seed,
            progress=progress,
        )

    def explain(
        self,
        text: str,
        knn: KNNSettings | None = None,
        *,
        neighbors: int = 8,
        after: str = "",
    ) -> list[TokenExplanation]:
        """Say for each token of a text how likely both models find it, and why.

        Args:
            text: the text to explain.
            knn: settings of this call; default ``self.knn``.
            neighbors: how many sources to name for each token.
            after: a text that comes before and is not explained, e.g. the prompt.
        """
        tokens, skipped = self._tokens(after + text), len(self._tokens(after))
        return explain_tokens(
            self.store,
            self.encoder,
            self._known_tokenizer(),
            tokens,
            knn or self.knn,
            neighbors=neighbors,
            start=skipped,
        )

    def generate_text(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        knn: KNNSettings | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> str:
        """Continue a text.

        Args:
            prompt: the text.
            max_new_tokens: at most so many tokens.
            knn: settings of this call; default ``self.knn``.
            seed: makes sampling repeatable.
            **options: passed on to `generate` (do_sample, temperature, top_p, num_beams, streamer, ...).

        Returns:
            The continuation alone.

        Raises:
            InputError: prompt and continuation exceed the model's window.
        """
        tokenizer = self._known_tokenizer()
        prefix = prefix_of(tokenizer)
        ids = [*([] if prefix is None else [prefix]), *self._tokens(prompt).tolist()]
        window = self.store.identity.max_length
        if len(ids) + max_new_tokens > window:
            raise InputError(
                f"the prompt has {len(ids)} tokens and {max_new_tokens} are to follow, but the window is "
                f"{window}: shorten the prompt or ask for fewer"
            )
        if not ids:
            raise InputError("the prompt is empty, and the tokenizer has no token to begin with")
        if seed is not None:
            set_seed(seed)
        inputs = torch.tensor([ids], device=self.base.device)
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
            options.setdefault("pad_token_id", tokenizer.eos_token_id)
        written = self.generate(  # type: ignore[attr-defined]
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, knn=knn, **options
        )
        return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))

    @property
    def encoder(self) -> Encoder:
        """The base model as a source of keys and gold-token probabilities."""
        if self._encoder is None:
            self._encoder = Encoder(self.base, self.location, self.projection)
        return self._encoder

    _encoder: Encoder | None = None

    def _tokens(self, text: str) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        ids = self._known_tokenizer()(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, np.uint32)

    def _known_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise ConfigError("the model has no tokenizer: give one to from_base, or use knnstore.load")
        return self.tokenizer
