"""Admission of waiting tasks: in which order their prompts are prefilled and scored, and when texts start.

A task is one request with its prompts; a text is one continuation of a prompt. In each turn of the engine,
between two decoding steps, some tokens of the waiting prompts are prefilled. Long prompts are prefilled in
chunks, and the tasks take turns (round robin). If a prompt's own tokens are scored, each chunk is scored
right after it was read.

`Admission` does this; `count_neighbors` estimates the cost of a search.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from knnstore.lm import KNNLM, ForwardPass, KNNSettings, Purpose, score_targets
from knnstore.server.engine.pairs import PairPrefill, read_sources_together
from knnstore.server.engine.prompts import Prefill, PromptState, prefill_together
from knnstore.server.engine.rows import Task
from knnstore.server.engine.tickets import Ticket

_logger = logging.getLogger(__name__)

_MAX_TURN_TOKENS, _CHUNK_TOKENS = 1024, 128
"""One turn prefills at most `_MAX_TURN_TOKENS` prompt tokens.

A prompt of at most `_CHUNK_TOKENS` tokens is read whole, together with other short prompts in one forward
pass: eight prompts together take little more than half of the time of eight passes.

While other texts are being decoded, a longer prompt is read in chunks, so that those texts do not wait long.
A chunk has `_CHUNK_TOKENS` tokens, or more if more tasks wait than texts are decoded. If no text is being
decoded, a prompt is read whole, because the result of a chunked prefill differs slightly (by rounding)."""


NEIGHBORS_AT_ONCE = 1 << 16
"""Largest number of neighbors (retrieved records) that are retrieved between two steps, summed over all
tokens. This takes about 0.2 s on one core. The number also limits the first turn that scores a prompt, until
the time of a turn has been measured."""
_NEIGHBORS_PER_CELL = 64
"""Estimated cost of reading one cell (a part of a domain's records with keys near each other), in neighbors.
The records of a cell are summed up and not sorted, so a cell costs less than its number of records."""
_SHORT_SECONDS, _LONG_SECONDS = 0.1, 0.4
"""Durations in seconds. After scoring for less than `_SHORT_SECONDS`, the next turn scores more tokens; after
scoring for more than `_LONG_SECONDS`, the next turn scores fewer tokens."""
_MAX_PACES = 256
"""Largest number of scopes whose scoring pace is remembered."""


class _ScoringPaces:
    """Learns how many prompt tokens one turn can score without delaying other texts, for each scope.

    A scope is the value of `Task.knn`: the documents and settings of retrieval. The number of tokens is
    adjusted so that scoring takes between `_SHORT_SECONDS` and `_LONG_SECONDS` of a turn.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()

    def get_max_tokens(self, scope: Hashable, settings: KNNSettings) -> int:
        """Return the largest number of prompt tokens that the server scores between two decoding steps.

        The number depends on the scope, that is the documents and the settings of retrieval. It is between 1
        and `_MAX_TURN_TOKENS`. For a new scope the number is `NEIGHBORS_AT_ONCE` divided by the number of
        neighbors that each token retrieves. If more than `_MAX_PACES` scopes are remembered, the scope that
        was added first is dropped.

        Args:
            scope: the value of `Task.knn`: the documents and the settings of retrieval.
            settings: the retrieval settings of the scope; used only if the scope is new.
        """
        if scope not in self._tokens:
            neighbors = max(1, count_neighbors(settings))
            self._tokens[scope] = max(1, min(_MAX_TURN_TOKENS, NEIGHBORS_AT_ONCE // neighbors))
            if len(self._tokens) > _MAX_PACES:
                self._tokens.popitem(last=False)
        return self._tokens[scope]

    def adjust(self, scope: Hashable, tokens: int, seconds: float) -> None:
        """Adjust how many prompt tokens a turn may score for a scope, to the time that scoring took.

        If scoring was longer than `_LONG_SECONDS`, the number is halved. If scoring was shorter than
        `_SHORT_SECONDS` and used the whole number, the number is doubled, up to `_MAX_TURN_TOKENS`. An
        unknown scope is ignored.

        Args:
            scope: the value of `Task.knn`: the documents and the settings of retrieval.
            tokens: number of tokens that the turn has scored.
            seconds: time that scoring took.
        """
        most = self._tokens.get(scope)
        if most is None:
            return
        if seconds > _LONG_SECONDS:
            self._tokens[scope] = max(1, min(most, tokens) // 2)
        elif seconds < _SHORT_SECONDS and tokens >= most:
            self._tokens[scope] = min(_MAX_TURN_TOKENS, 2 * most)


def count_neighbors(settings: KNNSettings) -> int:
    """Return the approximate cost of one token's search, in neighbors; 0 if the settings retrieve nothing.

    Neighbors are retrieved records. Settings with `probes` read that many cells (groups of near records), and
    each cell counts as `_NEIGHBORS_PER_CELL` neighbors. Other settings retrieve k neighbors.
    """
    if not settings.retrieves:
        return 0
    return settings.probes * _NEIGHBORS_PER_CELL if settings.probes else settings.k


@dataclass(eq=False)
class _Prompt:
    """A prompt of a waiting task whose tokens the model has begun to read (prefill).

    It is dropped when all its texts (`Task.copies` continuations) are started.
    """

    number: int
    """Index of the prompt in its task."""
    prefill: Prefill
    """The prefill of the prompt, with the tokens that are read so far."""
    started: int = 0
    """Number of texts (continuations of this prompt) that have been started."""
    is_joint: bool = False
    """True while the prompt is selected to be read in one forward pass together with other prompts."""


@dataclass(eq=False)
class _WaitingTask:
    """A task that still has texts to start, with the progress of its prompts."""

    ticket: Ticket
    """The task with the callback of its client."""
    opened: int = 0
    """Number of prompts of the task whose prefill has begun. The next prompt to begin has this index."""
    prompts: deque[_Prompt] = field(default_factory=deque)
    """The prompts whose prefill has begun, in order, except those whose texts have all been started."""

    @property
    def task(self) -> Task:
        """The waiting task: the prompts to continue or to score."""
        return self.ticket.task

    @property
    def is_done(self) -> bool:
        """True if all texts of the task have been started, so that the task no longer waits."""
        return self.opened == len(self.task.prompts) and not self.prompts

    def get_next_prompt(self, lm: KNNLM) -> _Prompt | None:
        """Return the prompt of this task whose tokens the model should read next, or None.

        The prompts are read in order. A prompt that was returned before is returned again while it has unread
        tokens. After that, the next prompt is returned, and its prefill is created. A prompt that is selected
        to be read together with other prompts (`is_joint`) counts as read.

        Args:
            lm: the model that will read the prompt.

        Returns:
            The prompt; None if all prompts of the task are read.
        """
        if self.prompts and self.prompts[-1].prefill.tokens_left and not self.prompts[-1].is_joint:
            return self.prompts[-1]
        if self.opened == len(self.task.prompts):
            return None
        prompt = self.task.prompts[self.opened]
        prefill = (
            PairPrefill(lm, prompt)
            if prompt.source
            else Prefill(
                lm,
                prompt.tokens,
                is_scored=self.task.score_prompt,
                is_continued=self.task.max_tokens > 0,
            )
        )
        self.prompts.append(_Prompt(self.opened, prefill))
        self.opened += 1
        return self.prompts[-1]


class _Chunk(NamedTuple):
    """A chunk of a prompt that the model has read in this turn, and whose tokens still have to be scored."""

    waiting: _WaitingTask
    """The task of the prompt."""
    prefill: Prefill
    """The prefill of the prompt; the likelihoods are appended to its `scores`."""
    forward_pass: ForwardPass
    """The model's pass over the t tokens of the chunk."""
    targets: Tensor
    """Id of the token after each token of the chunk, int64, shape (t,)."""


class _JointPrefill(NamedTuple):
    """A prompt that is selected to be read in one forward pass together with other prompts."""

    waiting: _WaitingTask
    prompt: _Prompt
    settings: KNNSettings


class Admission:
    """Holds the waiting tasks, prefills their prompts, and starts their texts.

    A task waits until all its texts have been started; then the engine decodes the texts. ``len()`` gives the
    number of waiting tasks. All methods are called in the engine's thread.

    Args:
        lm: the model, with its store.
        settings_of: function that returns the retrieval settings for a task's `knn`. It must return the same
            object for equal settings.
        receive: function without arguments that calls the callbacks in the engine's inbox. A callback may
            call `add` with a new task.
        begin: function that starts a text. Its arguments are the ticket of the task, the index of the text in
            the task, and the model's state after the prompt.
        fail: function that is called with a ticket and an error if a prompt of the task cannot be read or a
            text cannot be started.
        admitted: function without arguments that is called once for each task that no longer waits, because
            its texts are all started, or it failed or was cancelled.
    """

    def __init__(
        self,
        lm: KNNLM,
        settings_of: Callable[[Hashable], KNNSettings],
        receive: Callable[[], object],
        begin: Callable[[Ticket, int, PromptState], None],
        fail: Callable[[Ticket, Exception], None],
        admitted: Callable[[], None],
    ) -> None:
        self._lm = lm
        self._settings_of = settings_of
        self._receive = receive
        self._start_text, self._fail, self._admitted = begin, fail, admitted
        self._waiting: list[_WaitingTask] = []
        self._paces = _ScoringPaces()
        self._searched = 0
        """Number of neighbors that were retrieved in this turn to predict the first tokens of new texts."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if a waiting task was cancelled, or has a client that takes its results fast enough.

        False if no task waits, or if the clients of all waiting tasks are slow (`Ticket.is_behind`).
        """
        return any(waiting.ticket.cancelled or not waiting.ticket.is_behind for waiting in self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """All waiting tasks with the callbacks of their clients, in the order of waiting; a new list."""
        return [waiting.ticket for waiting in self._waiting]

    def add(self, ticket: Ticket) -> None:
        """Append a new task to the end of the waiting tasks."""
        self._waiting.append(_WaitingTask(ticket))

    def drop_cancelled(self) -> None:
        """Remove the waiting tasks (requests) that were cancelled. Their clients get no message."""
        for waiting in [task for task in self._waiting if task.ticket.cancelled]:
            self._remove_task(waiting)

    def prefill_and_start(self, room: int, running: int) -> None:
        """Do the admission work of one turn: prefill and score prompts, and start texts of complete prompts.

        At most `_MAX_TURN_TOKENS` prompt tokens are read. Tasks that arrive during the turn are accepted too,
        and their short prompts are read in the same turn.

        Args:
            room: number of texts that may be started, so that not too many texts are decoded at once.
            running: number of texts that are being decoded already. If it is not 0, long prompts are read in
                chunks, so that the running texts do not wait long for their next step.
        """
        budget = chunk_budget = _MAX_TURN_TOKENS
        self._searched = 0
        if running:
            chunk_budget = min(_MAX_TURN_TOKENS, _CHUNK_TOKENS * max(1, len(self._waiting) // running))
        room = self._start_texts(room)
        while budget > 0:
            token_count, to_score = self._prefill_prompts(
                room, budget, chunk_budget, may_read_whole=not running
            )
            for settings, chunks in to_score:
                self._score_chunks(chunks, settings)
            room = self._start_texts(room)
            if not token_count:
                break
            budget, chunk_budget = budget - token_count, 0
            self._receive()

    def _prefill_prompts(
        self, room: int, budget: int, chunk_budget: int, *, may_read_whole: bool
    ) -> tuple[int, list[tuple[KNNSettings, list[_Chunk]]]]:
        """Make the model read prompts of the waiting tasks (prefill), until `budget` tokens are used up.

        A task that fails is removed, and its client gets the error. So that no task delays the others, a task
        moves to the end of the waiting tasks in three cases: one of its prompts was read completely, a prompt
        was selected to be read with other prompts, or a part of a prompt is to be scored.

        Args:
            room: number of texts that may be started. If it is 0 or less, only prompts of tasks that generate
                nothing are read.
            budget: number of tokens that may be read.
            chunk_budget: number of tokens out of `budget` that may be used for long prompts, which are read
                in chunks. 0 reads only short prompts, several in one forward pass.
            may_read_whole: True if no text is being decoded, so that long prompts need not be cut into
                chunks.

        Returns:
            The number of tokens that were read, and the chunks that the caller must score, grouped by
            retrieval settings.
        """
        by_settings: dict[int, tuple[KNNSettings, list[_Chunk]]] = {}
        joint: list[_JointPrefill] = []
        initial_budget, position = budget, 0
        share = 1.0  # fraction of the turn's scoring time that is left, for all scopes together
        scored: list[_WaitingTask] = []
        while budget > 0 and position < len(self._waiting):
            waiting = self._waiting[position]
            try:
                # 1) Select the task's next prompt, unless it has no room or its client is behind.
                needs = waiting.task.copies if waiting.task.max_tokens else 0
                settings = self._settings_of(waiting.task.knn)
                has_room = (room > 0 or not needs) and not waiting.ticket.is_behind
                prompt = waiting.get_next_prompt(self._lm) if has_room else None
                if prompt is None:
                    position += 1
                    continue
                prefill = prompt.prefill
                # 2) Skip the prompt if this turn's searches have retrieved enough neighbors already.
                neighbors = 0
                if not (prefill.is_scored or may_read_whole):
                    neighbors = count_neighbors(self._lm.resolve_settings(settings, Purpose.GENERATION))
                if self._searched and self._searched + neighbors > NEIGHBORS_AT_ONCE:
                    position += 1
                    continue
                # 3) Collect short prompts, to read them in one pass after the loop.
                prompt.is_joint = prefill.can_be_read_with_others and (
                    prefill.is_read_whole or prefill.tokens_left <= max(chunk_budget, _CHUNK_TOKENS)
                )
                if prompt.is_joint and not _fits_one_pass(
                    [*(selected.prompt.prefill for selected in joint), prefill]
                ):
                    prompt.is_joint = False
                    position += 1
                    continue
                if prompt.is_joint:
                    joint.append(_JointPrefill(waiting, prompt, settings))
                    budget -= prefill.tokens_left
                # 4) Read any other prompt now, in chunks.
                while prefill.tokens_left and chunk_budget > 0 and not prompt.is_joint:
                    chunk_size = prefill.tokens_left if may_read_whole else chunk_budget
                    if prefill.is_scored:
                        most_scored = self._paces.get_max_tokens(waiting.task.knn, settings)
                        chunk_size = min(chunk_size, round(most_scored * share))
                        if chunk_size <= 0:
                            break
                    forward_pass, targets = prefill.read_chunk(settings, chunk_size)
                    budget, chunk_budget = budget - len(targets), chunk_budget - len(targets)
                    if prefill.is_scored:
                        share -= len(targets) / most_scored
                        if waiting not in scored:
                            scored.append(waiting)
                        chunks = by_settings.setdefault(id(settings), (settings, []))[1]
                        chunks.append(_Chunk(waiting, prefill, forward_pass, targets))
            except Exception as error:
                self._fail_task(waiting, error)
                continue
            if prompt.is_joint or not prefill.tokens_left:
                room -= needs
                self._searched += neighbors
                # Move the task to the end, so that its many prompts do not delay the other tasks.
                self._waiting.append(self._waiting.pop(position))
            else:
                position += 1  # short prompts do not wait for a long one
        # 5) Move the scored tasks to the end: the other tasks come first in the next turn.
        for waiting in scored:
            if waiting in self._waiting:
                self._waiting.append(self._waiting.pop(self._waiting.index(waiting)))
        self._prefill_jointly(joint)
        return initial_budget - budget, list(by_settings.values())

    def _prefill_jointly(self, joint: Sequence[_JointPrefill]) -> None:
        """Make the model read the selected prompts (prefill) in one forward pass.

        If there is only one prompt, or if the pass fails, each prompt is read alone. So a task is removed
        only if its own prompt fails; its client gets the error. No exception is raised. An empty sequence
        does nothing.

        Args:
            joint: the selected prompts.
        """
        if len(joint) > 1:
            read_together: Any = (
                read_sources_together if self._lm.key_encoder.reads_source else prefill_together
            )
            try:
                read_together(
                    self._lm,
                    [selected.prompt.prefill for selected in joint],
                    [selected.settings for selected in joint],
                )
            except Exception:
                _logger.debug("prompts could not be read together", exc_info=True)
        for waiting, prompt, settings in joint:
            prompt.is_joint = False
            try:
                if prompt.prefill.tokens_left:
                    prompt.prefill.read_whole(settings)
            except Exception as error:
                self._fail_task(waiting, error)

    def _score_chunks(self, chunks: Sequence[_Chunk], settings: KNNSettings) -> None:
        """Score chunks of prompts: compute the likelihoods of their tokens with the model and the store.

        The likelihoods are appended to `Prefill.scores` of each prompt. Then the time that scoring took
        adjusts the number of tokens that the next turns score. If scoring fails, each chunk is scored alone,
        so that a task is removed only if its own chunk fails; its client gets the error. No exception is
        raised.

        Args:
            chunks: the chunks that the model has read, at least one.
            settings: the retrieval settings of all chunks.
        """
        count = max(chunk.waiting.task.top or 0 for chunk in chunks)
        began = time.perf_counter()
        try:
            targets = [chunk.targets for chunk in chunks]
            likelihoods_of_chunks = score_targets(
                self._lm, [chunk.forward_pass for chunk in chunks], targets, settings, count
            )
        except Exception as error:
            if len(chunks) == 1:
                self._fail_task(chunks[0].waiting, error)
            for chunk in chunks if len(chunks) > 1 else ():
                self._score_chunks([chunk], settings)
            return
        for chunk, scores in zip(chunks, likelihoods_of_chunks, strict=True):
            chunk.prefill.scores.append(scores)
        tokens = sum(len(chunk.targets) for chunk in chunks)
        self._paces.adjust(chunks[0].waiting.task.knn, tokens, time.perf_counter() - began)

    def _start_texts(self, room: int) -> int:
        """Start the texts (continuations) of prompts whose prefill is complete.

        A task is a request with one or more prompts. A task starts no further text while its client is slow
        (`Ticket.is_behind`). A task is removed from the waiting tasks when all its texts are started, or when
        a text fails to start.

        Args:
            room: number of texts that may be started. A text that generates no tokens does not count.

        Returns:
            The number of texts that may still be started afterwards.
        """
        for waiting in list(self._waiting):
            task = waiting.task
            try:
                while waiting.prompts and not waiting.prompts[0].prefill.tokens_left:
                    prompt = waiting.prompts[0]
                    prompt_state = prompt.prefill.get_state()
                    while (
                        prompt.started < task.copies
                        and (room > 0 or not task.max_tokens)
                        and not waiting.ticket.is_behind
                    ):
                        self._start_text(
                            waiting.ticket, prompt.number * task.copies + prompt.started, prompt_state
                        )
                        prompt.started += 1
                        room -= bool(task.max_tokens)
                    if prompt.started < task.copies:
                        break
                    waiting.prompts.popleft()
            except Exception as error:
                self._fail_task(waiting, error)
            if waiting.is_done:
                self._remove_task(waiting)
        return room

    def _fail_task(self, waiting: _WaitingTask, error: Exception) -> None:
        """Send an error to the client of a waiting task, and remove the task."""
        self._fail(waiting.ticket, error)
        self._remove_task(waiting)

    def _remove_task(self, waiting: _WaitingTask) -> None:
        """Remove a task from the waiting tasks, and call `admitted`.

        Does nothing if the task is not waiting.
        """
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._admitted()


def _fits_one_pass(prefills: Sequence[Prefill]) -> bool:
    """Check whether one forward pass can read several prompts, padded to the longest of them.

    The padded prompts may have at most `_MAX_TURN_TOKENS` tokens together. A single prompt always fits.
    """
    return (
        len(prefills) == 1
        or len(prefills) * max(prefill.tokens_left for prefill in prefills) <= _MAX_TURN_TOKENS
    )
