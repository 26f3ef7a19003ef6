"""Mixing a store into the predictions of a program that batches requests, such as vLLM; independent of it.

The program is called the *engine* here. A *step* is one forward pass of the engine over new tokens of several
requests: whole prompts, chunks of prompts, single generated tokens, drafts. For each step the engine calls::

    mixer.begin_step(step)                 # which tokens the pass is over
    mixer.extend_texts(states)             # hidden states of the pass, at the place of the keys
    logits = mixer.mix(logits, rows, ...)  # as often as the engine computes logits of rows of the pass

A *row* is one new token of the pass; the tokens of all requests stand one after the other. The *place of the
keys* is the module of the model whose hidden states the store's keys were made of.

The mixer keeps a `TextState` (the tokens and keys so far) for each request. An error of one request does not
affect the other requests: the rows of the failed request keep the model's logits, and `take_failures` names
this request.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm.contexts import Contexts
from knnstore.lm.hosts.request_options import RequestOptions
from knnstore.lm.keys import Joining, Projection
from knnstore.lm.row_mixer import RowMixer, Rows
from knnstore.lm.settings import KNNSettings, Purpose, resolve
from knnstore.lm.text_state import TextState, append_pass
from knnstore.store import Reader

Numbers = NDArray[np.int64]
"""Array of integers."""

_CACHED_SETTINGS = 256
"""Number of cached settings at which the cache is cleared."""

_logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """The n new tokens of b requests in one forward pass of the engine (the program that runs the model).

    The tokens of all requests stand one after the other; the index of a token in this order is its row.
    """

    requests: Sequence[str]
    """Ids of the b requests, in the order of their tokens."""
    starts: Numbers
    """Row of the first token of each request, and at the end n; int64, shape (b + 1,), ascending. Request i
    has the rows from ``starts[i]`` to ``starts[i + 1] - 1``."""
    tokens: Numbers
    """Id of the token of each row, int64, shape (n,)."""
    positions: Numbers
    """Position (index) of each row's token in the text of its request, int64, shape (n,)."""


@dataclass
class _Request:
    """A request that the engine (the program that runs the model) works on, with its text so far."""

    options: RequestOptions
    """The request's options: which documents it retrieves from, and with which settings."""
    known: Numbers
    """Ids of the prompt's tokens, followed by the tokens that were generated before the engine resumed the
    request."""
    prompt_length: int
    """Number of tokens of the prompt."""
    wants_prompt_scores: bool
    """True if the client asked for the log-probabilities of the prompt."""
    text: TextState = field(default_factory=TextState)
    """The tokens and keys of the text so far: the prompt and the generated tokens."""
    has_keys: bool | None = None
    """True if the settings needed keys in the first step of the request, so that the text has keys; None
    before the first step."""
    error: Exception | None = None
    """The first error of the request; None if it has not failed. A failed request keeps the model's logits
    from then on."""


class HostedSettings:
    """Resolves the options of requests to retrieval settings.

    The settings are cached until the store changes.

    Args:
        store: the store, opened for reading.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._revision = -1
        self._domains: frozenset[str] = frozenset()
        self._settings: dict[tuple[RequestOptions, Purpose], KNNSettings] = {}

    def resolve(self, options: RequestOptions, purpose: Purpose) -> KNNSettings:
        """Return the retrieval settings for the options of a request.

        The settings are cached until the store changes or the cache is full. Domains that no longer exist are
        left out. If none is left, or if the options switch retrieval off, λ is 0: the model predicts alone.

        Args:
            options: the options of the request.
            purpose: `Purpose.GENERATION` to predict next tokens, `Purpose.SCORING` to score the tokens of a
                prompt. Some components are used for scoring only.

        Raises:
            KnnstoreError: the store cannot be read, or cannot do what the options ask for.
        """
        self._refresh_if_changed()
        key = (options, purpose)
        settings = self._settings.get(key)
        if settings is None:
            settings = self._resolve(options, purpose)
            if len(self._settings) >= _CACHED_SETTINGS:
                self._settings.clear()
            self._settings[key] = settings
        return settings

    def find_missing_domains(self, options: RequestOptions) -> list[str]:
        """Return the domain names in the options that the store does not have, sorted; may be empty."""
        self._refresh_if_changed()
        return sorted(set(options.domains or ()) - self._domains)

    def _refresh_if_changed(self) -> None:
        """Read the names of the store's domains again and clear the cache, if the store has changed."""
        revision = self._store.revision()
        if revision != self._revision:
            self._domains = frozenset(domain.name for domain in self._store.domains())
            self._settings.clear()
            self._revision = revision

    def _resolve(self, options: RequestOptions, purpose: Purpose) -> KNNSettings:
        """Return the retrieval settings for the options of a request, without the cache.

        Args:
            options: the options of the request.
            purpose: `Purpose.GENERATION` to predict next tokens, `Purpose.SCORING` to score the tokens of a
                prompt.

        Raises:
            KnnstoreError: the store cannot be read, or cannot do what the options ask for.
        """
        domains = options.domains
        if domains is not None:
            domains = tuple(name for name in domains if name in self._domains)
        if options.is_off or domains == ():
            return KNNSettings(lam=0.0)
        return resolve(self._store, options.overrides(domains), purpose, only_selected=options.only_selected)


def needs_keys(settings: KNNSettings) -> bool:
    """Check whether predictions with these settings need the keys of a text; n-grams need only its tokens."""
    return settings.retrieves or settings.cache is not None


def needs_all_states(settings: KNNSettings, joining: Joining) -> bool:
    """Check whether predictions with these settings need hidden states of earlier tokens of a text.

    The continuous cache and keys that join several tokens need them. An engine that reuses its KV cache for a
    part of a text has no hidden states of that part.

    Args:
        settings: the retrieval settings.
        joining: the rule by which the store's keys are made: of the hidden states of one token or of several.
    """
    return settings.cache is not None or (settings.retrieves and bool(joining.discounts))


class StepMixer:
    """Mixes a store into the logits of a program that batches requests (the engine), step by step.

    The engine registers its requests, and then calls `begin_step`, `extend_texts` and `mix` in each step
    (forward pass). For each request the mixer keeps the text: its tokens, and the keys with which the store
    is searched. Not safe for several threads.

    Args:
        store: the store, opened for reading. Documents that another process adds or removes count from the
            next step on.
        prefix: the tokens that precede every document; empty if documents have no prefix.
        most_drafts: largest number of draft tokens (guessed next tokens) of a request in a step. The engine
            may reject them after the step.
    """

    def __init__(self, store: Reader, prefix: Sequence[int], most_drafts: int = 0) -> None:
        self._store = store
        self._prefix = prefix
        self._most_drafts = most_drafts
        _, self._joining = Joining.parse(store.identity.key)
        self._projection = Projection.load(store)
        self._settings = HostedSettings(store)
        self._rows = RowMixer(store)
        self._requests: dict[str, _Request] = {}
        self._failures: set[str] = set()
        self._step: Step | None = None
        self._keys: Tensor | None = None

    def add_request(
        self,
        name: str,
        values: Mapping[str, Any] | None,
        prompt: Sequence[int],
        *,
        generated: Sequence[int] = (),
        wants_prompt_scores: bool = False,
    ) -> None:
        """Register a request, so that the store is mixed into its logits.

        A request whose options switch retrieval off (``knn_off``) is not registered, and keeps the model's
        logits. A request with a wrong option fails at once: no exception is raised, but `take_failures` names
        it.

        Args:
            name: id of the request.
            values: extra values of the request, among them the options with the prefix ``knn_``
                (`RequestOptions.parse`); None means no options.
            prompt: token ids of the prompt.
            generated: ids of the tokens that were generated before, if the engine resumes the request;
                otherwise empty.
            wants_prompt_scores: True if the engine also computes log-probabilities of the prompt's tokens.
        """
        error = None
        try:
            options = RequestOptions.parse(values)
        except KnnstoreError as failure:
            options, error = RequestOptions(), failure
        if options.is_off:
            return
        known = np.asarray([*prompt, *generated], np.int64)
        request = _Request(options, known, len(prompt), wants_prompt_scores)
        self._requests[name] = request
        if error is not None:
            self._mark_failed(name, request, error)

    def remove_request(self, name: str) -> None:
        """Forget a request and its text. Does nothing if the request is not registered."""
        self._requests.pop(name, None)

    def take_failures(self) -> set[str]:
        """Return the ids of the requests that have failed since the last call.

        Their errors are in the log.
        """
        failures, self._failures = self._failures, set()
        return failures

    def begin_step(self, step: Step | None) -> None:
        """Begin a step, which is one forward pass of the engine (the program that runs the model).

        Args:
            step: the tokens of the step. None ends the last step, so that `mix` returns its logits unchanged
                until the next step.
        """
        self._step, self._keys = step, None

    @property
    def is_idle(self) -> bool:
        """True if no request of the current step uses the store, or if there is no step."""
        return self._step is None or not any(name in self._requests for name in self._step.requests)

    def extend_texts(self, states: Tensor) -> None:
        """Append the new tokens of the step to the texts of their requests, and compute the tokens' keys.

        A step is one forward pass of the engine (the program that runs the model). If a text already has
        tokens at the positions of the step, they are replaced: the engine has rejected draft tokens (guessed
        tokens), or it interrupted the request and computes its tokens again. If a request fails, no exception
        is raised, but `take_failures` names the request.

        Args:
            states: hidden states of the n tokens of the step, shape (n or more, width), any floating dtype.
                They are the outputs of one module of the model; the store's keys were taken from the same
                module. Rows after the first n are padding.
        """
        step = self._step
        assert step is not None
        # Requests with the same number of new tokens, for example all that generate, are one batch.
        by_length: dict[int, list[tuple[str, _Request, int]]] = {}
        for row, name in enumerate(step.requests):
            request = self._requests.get(name)
            if request is None or request.error is not None:
                continue
            start, stop = int(step.starts[row]), int(step.starts[row + 1])
            try:
                self._rewind(request, int(step.positions[start]))
                if request.has_keys is None:
                    request.has_keys = needs_keys(self._settings.resolve(request.options, Purpose.SCORING))
            except Exception as error:
                self._mark_failed(name, request, error)
                continue
            if not request.has_keys:
                request.text.append_without_keys(step.tokens[start:stop])
            else:
                by_length.setdefault(stop - start, []).append((name, request, start))
        for length, members in by_length.items():
            try:
                self._append_step_tokens(step, states, members, length)
            except Exception as error:
                for name, request, _ in members:
                    self._mark_failed(name, request, error)
        if self._keys is None:
            self._keys = states.new_zeros((len(step.tokens), 0), dtype=torch.float32)

    def _append_step_tokens(
        self, step: Step, states: Tensor, members: Sequence[tuple[str, _Request, int]], length: int
    ) -> None:
        """Append the new tokens of several requests to their texts, and store the tokens' keys for `mix`.

        All these requests have the same number of new tokens.

        Args:
            step: the step.
            states: hidden states as in `extend_texts`.
            members: a tuple (id of the request, the request, row of its first new token) for each request.
            length: number of new tokens of each request.
        """
        rows = np.array([start for _, _, start in members])[:, None] + np.arange(length)
        index = torch.from_numpy(rows.ravel()).to(states.device)
        keys, _ = append_pass(
            [request.text for _, request, _ in members],
            torch.from_numpy(step.tokens[rows]),
            states[index].reshape(*rows.shape, -1),
            None,
            self._joining,
            self._project,
        )
        if self._keys is None:
            self._keys = keys.new_zeros((int(step.starts[-1]), keys.shape[-1]))
        self._keys[index] = keys.flatten(0, 1)
        for _, request, _ in members:
            self._free_unneeded_states(request)

    def mix(self, logits: Tensor, rows: Numbers, purpose: Purpose) -> Tensor:
        """Mix the store's predictions into logits of the current step, and return the result.

        A row is one new token of the step. A row keeps the model's logits if its request is not registered or
        has failed. For generation, the rows before a prompt's last token keep the model's logits too, because
        the engine drops these predictions. If there is no step, or if nothing is mixed, `logits` is returned
        unchanged. No exception is raised if the store fails; `take_failures` names the failed requests.

        Args:
            logits: logits of the model, shape (m, v), any floating dtype; not changed.
            rows: row (index of a new token in the step) from which each of the m logits was computed, int64,
                shape (m,).
            purpose: `Purpose.GENERATION` to predict the token after each row; `Purpose.SCORING` to score the
                tokens of prompts. For scoring, the store is mixed only into requests that want prompt scores.

        Returns:
            Log-probabilities of the mixture, float32, shape (m, v); rows into which nothing is mixed hold
            logits of the model.
        """
        step = self._step
        if step is None or self._keys is None or not len(rows):
            return logits
        # 1) Choose the rows that are mixed, and their settings.
        owners = np.searchsorted(step.starts, rows, side="right") - 1
        positions = step.positions[rows]
        members = [self._requests.get(name) for name in step.requests]
        settings = [self._resolve_settings(row, members[row], purpose) for row in range(len(members))]
        chosen = list[int]()
        for at, (owner, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
            request = members[owner]
            if request is None or settings[owner] is None:
                continue
            # The engine drops what is predicted after a chunk of a prompt.
            is_dropped = purpose is Purpose.GENERATION and position < request.prompt_length - 1
            if not is_dropped:
                chosen.append(at)
        if not chosen:
            return logits
        # 2) Mix them.
        picked = np.array(chosen, np.int64)
        names = [step.requests[owner] for owner in owners[picked].tolist()]
        try:
            return self._mix_rows(logits, rows, picked, owners, members, settings)
        except Exception as error:
            for name in dict.fromkeys(names):
                self._mark_failed(name, self._requests[name], error)
            return logits

    def _mix_rows(
        self,
        logits: Tensor,
        rows: Numbers,
        picked: Numbers,
        owners: Numbers,
        members: Sequence[_Request | None],
        settings: Sequence[KNNSettings | None],
    ) -> Tensor:
        """Mix the store into the logits of the picked rows, and return all logits.

        Args:
            logits: logits of the model, shape (m, v).
            rows: row of the step from which each of the m logits was computed, int64, shape (m,).
            picked: indices of the p logits to mix, int64, shape (p,).
            owners: index in the step of the request of each of the m logits, int64, shape (m,).
            members: the requests of the step; None for a request that is not registered.
            settings: the retrieval settings of each request; None for a request that keeps the model's
                logits.

        Returns:
            Log-probabilities of the mixture in the picked rows and the model's logits in the other rows,
            float32, shape (m, v); or the unchanged `logits` if nothing was found in the store.
        """
        step = self._step
        assert step is not None
        assert self._keys is not None
        is_all = len(picked) == len(rows)
        index = torch.from_numpy(picked).to(logits.device)
        keys = self._keys[torch.from_numpy(rows[picked]).to(self._keys.device)]
        contexts = self._build_contexts(members, owners[picked], step.positions[rows[picked]] + 1)
        chosen_rows = Rows(logits if is_all else logits[index], keys, contexts)
        each = [one for owner in owners[picked].tolist() if (one := settings[owner]) is not None]
        mixed = self._mix_apart_on_error(
            chosen_rows, each, [step.requests[owner] for owner in owners[picked]]
        )
        if mixed is chosen_rows.logits:
            return logits
        if is_all:
            return mixed.to(torch.float32)
        result = logits.to(torch.float32, copy=True)
        result[index] = mixed.to(torch.float32)
        return result

    def _mix_apart_on_error(self, rows: Rows, each: list[KNNSettings], names: list[str]) -> Tensor:
        """Mix the store into p rows, so that an error affects only the request that causes it.

        All rows are mixed at once. If that raises an exception, the rows of each request are mixed alone. A
        request that fails then is marked as failed, and its rows keep the model's logits.

        Args:
            rows: the p rows: logits, query vectors and texts.
            each: the retrieval settings of each row.
            names: the id of the request of each row.

        Returns:
            Log-probabilities or logits of the p rows, shape (p, v); ``rows.logits`` itself if nothing was
            found in the store.
        """
        try:
            mixed: Tensor = self._rows.mix(rows, each)
            return mixed
        except Exception:  # the second attempt finds the request whose store failed
            _logger.debug("mixing the requests one by one", exc_info=True)
        mixed = rows.logits.to(torch.float32, copy=True)
        for name in dict.fromkeys(names):
            at = np.array([row for row, owner in enumerate(names) if owner == name])
            try:
                part = self._rows.mix(rows.select(at), [each[row] for row in at])
            except Exception as error:
                self._mark_failed(name, self._requests[name], error)
            else:
                mixed[torch.from_numpy(at).to(mixed.device)] = part.float()
        return mixed

    def _resolve_settings(self, row: int, request: _Request | None, purpose: Purpose) -> KNNSettings | None:
        """Return the retrieval settings of a request; None if its rows keep the model's logits.

        The rows keep the model's logits in three cases: the request is not registered or has failed; it wants
        no prompt scores and `purpose` is `Purpose.SCORING`; or its settings use nothing of the store. If the
        settings cannot be resolved, or need keys that the text does not have, the request is marked as failed
        and None is returned.

        Args:
            row: index of the request in the step.
            request: the request; None if it is not registered.
            purpose: `Purpose.GENERATION` to predict next tokens, `Purpose.SCORING` to score tokens of the
                prompt.
        """
        assert self._step is not None
        if request is None or request.error is not None:
            return None
        if purpose is Purpose.SCORING and not request.wants_prompt_scores:
            return None
        try:
            settings = self._settings.resolve(request.options, purpose)
        except Exception as error:
            self._mark_failed(self._step.requests[row], request, error)
            return None
        if settings.cache is not None and not request.text.has_all_keys:
            settings = settings.without_components("cache")  # calibrated since the request began
        if settings.retrieves and not request.has_keys:
            self._mark_failed(
                self._step.requests[row],
                request,
                ConfigError(
                    "the settings changed during the request and need keys now: send the request again"
                ),
            )
            return None
        return None if settings.is_model_alone else settings

    def _build_contexts(self, members: Sequence[_Request | None], owners: Numbers, ends: Numbers) -> Contexts:
        """Return the contexts of p rows: for each row the text that ends with the row's token.

        N-grams and other components predict the next token from the context.

        Args:
            members: the requests of the step; None for a request that is not registered.
            owners: for each row, the index in `members` of the row's request, int64, shape (p,). None of
                these requests may be None.
            ends: number of tokens of each row's context, int64, shape (p,).
        """
        used, texts = np.unique(owners, return_inverse=True)
        states = [member.text for row in used.tolist() if (member := members[row]) is not None]
        return Contexts.from_texts(states, [text.length for text in states], self._prefix, texts, ends)

    def _rewind(self, request: _Request, position: int) -> None:
        """Make the text of a request end before a position, so that the step's tokens can be appended there.

        Tokens from this position on are dropped: they are rejected draft tokens (guessed tokens), or are
        computed again. If tokens before the position are missing, because the engine reuses its KV cache for
        the beginning of the prompt, they are added without keys.

        Args:
            request: the request.
            position: position of the first new token of the request in this step.

        Raises:
            KnnstoreError: tokens are missing that are not in the prompt, or the settings need the hidden
                states of the missing tokens, which no pass computes.
        """
        text = request.text
        text.truncate(position)
        if text.length == position:
            return
        reused = request.known[text.length : position]
        if text.length + len(reused) < position:
            raise KnnstoreError("the engine reuses the KV cache of generated tokens, whose text is not known")
        if needs_all_states(self._settings.resolve(request.options, Purpose.GENERATION), self._joining):
            raise KnnstoreError(
                "the engine reuses the KV cache of earlier tokens, whose hidden states the settings need"
            )
        text.append_without_keys(reused)

    def _free_unneeded_states(self, request: _Request) -> None:
        """Free the keys and hidden states of a request's text that later steps do not need."""
        text = request.text
        settings = self._settings.resolve(request.options, Purpose.SCORING)
        if settings.cache is None:
            text.drop_keys(text.length)
        text.drop_states(text.length - len(self._joining.discounts) - self._most_drafts)

    def _project(self, states: Tensor) -> Tensor:
        """Return the keys for hidden states, in the form of the store's keys.

        Args:
            states: hidden states, joined if the keys join several tokens, shape (..., width).

        Returns:
            Keys, float32, shape (..., d); the states themselves if the store has no projection (a matrix that
            makes keys shorter).
        """
        return states.float() if self._projection is None else self._projection(states)

    def _mark_failed(self, name: str, request: _Request, error: Exception) -> None:
        """Mark a request as failed, log its error, and add its id to the result of `take_failures`."""
        _logger.warning("request %s: the store failed: %s", name, error)
        request.error = error
        self._failures.add(name)
