"""Mixing a store into the steps of an engine that batches requests; independent of the engine.

A *step* is one forward pass of the engine over new tokens of several requests: whole prompts, chunks of
prompts, single generated tokens, drafts. For each step the engine calls::

    mixer.begin_step(step)                 # which tokens the pass is over
    mixer.extend_texts(states)             # hidden states of the pass, at the place of the keys
    logits = mixer.mix(logits, rows, ...)  # as often as the engine computes logits of rows of the pass

The mixer keeps a `TextState` for each request. An error of one request does not affect the others: the
request's rows keep the model's logits, and `take_failures` names the request.
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

_CACHED_SETTINGS = 256

_logger = logging.getLogger(__name__)


class Step(NamedTuple):
    """The n new tokens of b requests in one forward pass."""

    requests: Sequence[str]
    """Id of each request, in the order of the batch."""
    starts: Numbers
    """First row of each request, and n; int64, shape (b + 1,), ascending."""
    tokens: Numbers
    """Token id of each row, int64, shape (n,)."""
    positions: Numbers
    """Position of each token in its request's text, int64, shape (n,)."""


@dataclass
class _Request:
    """A request that the engine works on."""

    options: RequestOptions
    known: Numbers
    """Token ids of the prompt, then those that were generated before the engine resumed the request."""
    prompt_length: int
    """Number of tokens of the prompt."""
    wants_prompt_scores: bool
    """True if the client asked for the log-probabilities of the prompt."""
    text: TextState = field(default_factory=TextState)
    has_keys: bool | None = None
    """True if the settings needed keys in the first step; None before it."""
    error: Exception | None = None
    """The first error of the request; its rows keep the model's logits from then on."""


class HostedSettings:
    """The settings in force for the options of requests, cached until the store changes.

    Args:
        store: the store, opened for reading.
    """

    def __init__(self, store: Reader) -> None:
        self._store = store
        self._revision = -1
        self._domains: frozenset[str] = frozenset()
        self._settings: dict[tuple[RequestOptions, Purpose], KNNSettings] = {}

    def resolve(self, options: RequestOptions, purpose: Purpose) -> KNNSettings:
        """Return the settings for a request: the same object for equal options until the store changes.

        Domains that no longer exist are left out; if none is left, the model predicts alone.

        Raises:
            KnnstoreError: see `knnstore.lm.resolve`.
        """
        self._refresh()
        key = (options, purpose)
        settings = self._settings.get(key)
        if settings is None:
            settings = self._resolve(options, purpose)
            if len(self._settings) >= _CACHED_SETTINGS:
                self._settings.clear()
            self._settings[key] = settings
        return settings

    def find_missing_domains(self, options: RequestOptions) -> list[str]:
        """Return the names in the options that no domain of the store has, sorted."""
        self._refresh()
        return sorted(set(options.domains or ()) - self._domains)

    def _refresh(self) -> None:
        """Forget everything cached if the store has changed."""
        revision = self._store.revision()
        if revision != self._revision:
            self._domains = frozenset(domain.name for domain in self._store.domains())
            self._settings.clear()
            self._revision = revision

    def _resolve(self, options: RequestOptions, purpose: Purpose) -> KNNSettings:
        """Return the settings for a request, not cached; see `resolve`."""
        domains = options.domains
        if domains is not None:
            domains = tuple(name for name in domains if name in self._domains)
        if options.is_off or domains == ():
            return KNNSettings(lam=0.0)
        return resolve(self._store, options.overrides(domains), purpose, only_selected=options.only_selected)


def needs_keys(settings: KNNSettings) -> bool:
    """Check whether predictions need keys at all; n-grams need only the tokens."""
    return settings.retrieves or settings.cache is not None


def needs_all_states(settings: KNNSettings, joining: Joining) -> bool:
    """Check whether predictions need hidden states of earlier tokens, which a KV cache does not have."""
    return settings.cache is not None or (settings.retrieves and bool(joining.discounts))


class StepMixer:
    """Keeps the texts of an engine's requests and mixes a store into their logits.

    Not safe for several threads.

    Args:
        store: the store, opened for reading. Documents that another process adds or removes count from the
            next step on.
        prefix: the token that precedes every document; None if documents have no prefix.
        most_drafts: largest number of draft tokens of a request in a step, which the engine may reject.
    """

    def __init__(self, store: Reader, prefix: int | None, most_drafts: int = 0) -> None:
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
        """Register a request. A request with the option ``knn_off`` is ignored; with a wrong option it fails.

        Args:
            name: id of the request.
            values: its extra values, see `RequestOptions.parse`.
            prompt: token ids of the prompt.
            generated: token ids that were generated before, if the engine resumes the request.
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
            self._fail(name, request, error)

    def remove_request(self, name: str) -> None:
        """Forget a request. Does nothing if it is not registered."""
        self._requests.pop(name, None)

    def take_failures(self) -> set[str]:
        """Return the ids of the requests that failed since the last call. The log has their errors."""
        failures, self._failures = self._failures, set()
        return failures

    def begin_step(self, step: Step | None) -> None:
        """Begin a step. None ends the last one, so that `mix` changes nothing until the next step."""
        self._step, self._keys = step, None

    @property
    def is_idle(self) -> bool:
        """True if no request of the step uses the store."""
        return self._step is None or not any(name in self._requests for name in self._step.requests)

    def extend_texts(self, states: Tensor) -> None:
        """Append the tokens of the step to the texts of their requests, and compute their keys.

        Tokens of a text from the step's first position on are replaced: the engine rejected drafts, or
        computes a preempted request again.

        Args:
            states: hidden states of the pass at the place of the keys, shape (n, width), any floating dtype;
                further rows are padding.
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
                self._fail(name, request, error)
                continue
            if not request.has_keys:
                request.text.append_without_keys(step.tokens[start:stop])
            else:
                by_length.setdefault(stop - start, []).append((name, request, start))
        for length, members in by_length.items():
            try:
                self._extend_batch(step, states, members, length)
            except Exception as error:
                for name, request, _ in members:
                    self._fail(name, request, error)
        if self._keys is None:
            self._keys = states.new_zeros((len(step.tokens), 0), dtype=torch.float32)

    def _extend_batch(
        self, step: Step, states: Tensor, members: Sequence[tuple[str, _Request, int]], length: int
    ) -> None:
        """Extend the texts of requests with `length` new tokens each; `members` has the first row of each."""
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
            self._drop_unneeded(request)

    def mix(self, logits: Tensor, rows: Numbers, purpose: Purpose) -> Tensor:
        """Mix the store into the logits of rows of the step.

        Args:
            logits: logits of the model, shape (m, v), any floating dtype; they are not changed.
            rows: the row of the pass that each was computed from, int64, shape (m,).
            purpose: `Purpose.GENERATION` for the next token after each row; `Purpose.SCORING` for the tokens
                of the prompt, in requests that want their scores.

        Returns:
            Shape (m, v): log-probabilities of the mixture, float32; or the unchanged `logits` if nothing is
            mixed. Rows of requests that are off or failed keep the model's logits.
        """
        step = self._step
        if step is None or self._keys is None or not len(rows):
            return logits
        # 1) Choose the rows that are mixed, and their settings.
        owners = np.searchsorted(step.starts, rows, side="right") - 1
        positions = step.positions[rows]
        members = [self._requests.get(name) for name in step.requests]
        settings = [self._settings_for(row, members[row], purpose) for row in range(len(members))]
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
                self._fail(name, self._requests[name], error)
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
        """Mix the store into some rows of logits.

        Args:
            logits: see `mix`.
            rows: see `mix`.
            picked: indices of the logits to mix, int64, shape (p,).
            owners: index of the request of each row, int64, shape (m,).
            members: the requests of the step.
            settings: the settings of each request.

        Returns:
            See `mix`.
        """
        step = self._step
        assert step is not None
        assert self._keys is not None
        is_all = len(picked) == len(rows)
        index = torch.from_numpy(picked).to(logits.device)
        keys = self._keys[torch.from_numpy(rows[picked]).to(self._keys.device)]
        contexts = self._contexts(members, owners[picked], step.positions[rows[picked]] + 1)
        chosen_rows = Rows(logits if is_all else logits[index], keys, contexts)
        each = [one for owner in owners[picked].tolist() if (one := settings[owner]) is not None]
        mixed = self._mix_or_fail(chosen_rows, each, [step.requests[owner] for owner in owners[picked]])
        if mixed is chosen_rows.logits:
            return logits
        if is_all:
            return mixed.to(torch.float32)
        result = logits.to(torch.float32, copy=True)
        result[index] = mixed.to(torch.float32)
        return result

    def _mix_or_fail(self, rows: Rows, each: list[KNNSettings], names: list[str]) -> Tensor:
        """Mix rows; after an error mix the rows of each request alone, so that only its own request fails."""
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
                self._fail(name, self._requests[name], error)
            else:
                mixed[torch.from_numpy(at).to(mixed.device)] = part.float()
        return mixed

    def _settings_for(self, row: int, request: _Request | None, purpose: Purpose) -> KNNSettings | None:
        """Return the settings of a request; None if its rows keep the model's logits."""
        assert self._step is not None
        if request is None or request.error is not None:
            return None
        if purpose is Purpose.SCORING and not request.wants_prompt_scores:
            return None
        try:
            settings = self._settings.resolve(request.options, purpose)
        except Exception as error:
            self._fail(self._step.requests[row], request, error)
            return None
        if settings.cache is not None and not request.text.has_all_keys:
            settings = settings.without("cache")  # calibrated since the request began
        if settings.retrieves and not request.has_keys:
            self._fail(
                self._step.requests[row],
                request,
                ConfigError("the settings need keys since the request began: ask again"),
            )
            return None
        return None if settings.is_model_alone else settings

    def _contexts(self, members: Sequence[_Request | None], owners: Numbers, ends: Numbers) -> Contexts:
        """Return the contexts of positions, given the request and the number of tokens up to each."""
        used, texts = np.unique(owners, return_inverse=True)
        states = [member.text for row in used.tolist() if (member := members[row]) is not None]
        return Contexts.of_texts(states, [text.length for text in states], self._prefix, texts, ends)

    def _rewind(self, request: _Request, position: int) -> None:
        """Make a text end before `position`: drop rejected tokens, or add the prompt's reused tokens.

        Raises:
            KnnstoreError: tokens are missing that are not in the prompt, or the request needs the states of
                tokens that no pass computes.
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

    def _drop_unneeded(self, request: _Request) -> None:
        """Free the keys and states of a text that later steps do not need."""
        text = request.text
        settings = self._settings.resolve(request.options, Purpose.SCORING)
        if settings.cache is None:
            text.drop_keys(text.length)
        text.drop_states(text.length - len(self._joining.discounts) - self._most_drafts)

    def _project(self, states: Tensor) -> Tensor:
        """Convert joined states, shape (..., width), to the store's keys, float32, shape (..., d)."""
        return states.float() if self._projection is None else self._projection(states)

    def _fail(self, name: str, request: _Request, error: Exception) -> None:
        """Mark a request as failed."""
        _logger.warning("request %s: the store failed: %s", name, error)
        request.error = error
        self._failures.add(name)
