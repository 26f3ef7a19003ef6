"""Admission of waiting tasks: the order in which their prompts are prefilled and scored.

Prompts are prefilled in chunks, round robin, between the decoding steps. A chunk of a prompt whose tokens are
scored is scored right after it is read. `Admission` does this; `count_neighbors` estimates what a search
costs.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from knnstore.lm import ForwardPass, KNNLMForCausalLM, KNNSettings, Purpose, likelihoods
from knnstore.server.engine.prompts import Prefill, Remembered, prefill_together
from knnstore.server.engine.rows import Task
from knnstore.server.engine.tickets import Ticket

_logger = logging.getLogger(__name__)

_MAX_TURN_TOKENS, _CHUNK_TOKENS = 1024, 128
"""`_MAX_TURN_TOKENS` is the number of prompt tokens that one turn prefills at most. `_CHUNK_TOKENS` is
the chunk size of longer prompts while other texts are being decoded; the chunks are larger if more tasks wait
than texts are decoded. Prompts of at most `_CHUNK_TOKENS` tokens are read whole, several in one forward pass:
eight together take little more than half of the time, and a step between them would delay the tasks behind.
Chunks round differently, so a prompt is read whole if no text is being decoded."""


NEIGHBORS_AT_ONCE = 1 << 16
"""Neighbors that are retrieved between two steps, summed over all tokens. This takes about 0.2 s on one core.
It also limits the first turn that scores a prompt, until the time of a turn has been measured."""
_NEIGHBORS_PER_CELL = 64
"""Estimated cost of reading one cell of the index, in neighbors. A cell's records are summed, not sorted."""
_SHORT_SECONDS, _LONG_SECONDS = 0.1, 0.4
"""Seconds. After a turn shorter than `_SHORT_SECONDS` the next turn scores more tokens, after one longer than
`_LONG_SECONDS` fewer."""
_MAX_PACES = 256


class _ScoringPaces:
    """Largest number of tokens that a turn scores, for each scope: the retrieval settings' key, `Task.knn`.

    The number is adjusted so that scoring takes `_SHORT_SECONDS` to `_LONG_SECONDS` of a turn.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()

    def get_max_tokens(self, scope: Hashable, settings: KNNSettings) -> int:
        """Return the number of tokens that a turn may score, between 1 and `_MAX_TURN_TOKENS`.

        A new scope is added, with a number that follows from the neighbors that `settings` retrieve for each
        token. If more than `_MAX_PACES` scopes are kept, the oldest is dropped.
        """
        if scope not in self._tokens:
            neighbors = max(1, count_neighbors(settings))
            self._tokens[scope] = max(1, min(_MAX_TURN_TOKENS, NEIGHBORS_AT_ONCE // neighbors))
            if len(self._tokens) > _MAX_PACES:
                self._tokens.popitem(last=False)
        return self._tokens[scope]

    def adjust(self, scope: Hashable, tokens: int, seconds: float) -> None:
        """Adjust a scope's number of tokens after a turn scored `tokens` tokens in `seconds`.

        After a long turn the number becomes half of `tokens`. It doubles after a short turn that scored as
        many tokens as allowed. An unknown scope is ignored.
        """
        most = self._tokens.get(scope)
        if most is None:
            return
        if seconds > _LONG_SECONDS:
            self._tokens[scope] = max(1, min(most, tokens) // 2)
        elif seconds < _SHORT_SECONDS and tokens >= most:
            self._tokens[scope] = min(_MAX_TURN_TOKENS, 2 * most)


def count_neighbors(settings: KNNSettings) -> int:
    """Return the approximate cost of one token's search, in neighbors; 0 if the settings do not retrieve."""
    if not settings.retrieves:
        return 0
    return settings.probes * _NEIGHBORS_PER_CELL if settings.probes else settings.k


@dataclass(eq=False)
class _Prompt:
    """A prompt whose prefill has begun, until all of its `Task.copies` texts have been started."""

    number: int
    """Index of the prompt in its task."""
    prefill: Prefill
    started: int = 0
    """Number of texts of this prompt that have been started."""
    is_joint: bool = False
    """True while the prompt is selected for a forward pass together with other prompts."""


@dataclass(eq=False)
class _WaitingTask:
    """A waiting task, and its prompts whose prefill has begun."""

    ticket: Ticket
    opened: int = 0
    """Number of prompts of the task whose prefill has begun."""
    prompts: deque[_Prompt] = field(default_factory=deque)
    """Prompts whose prefill has begun, without the prompts whose texts have all been started."""

    @property
    def task(self) -> Task:
        return self.ticket.task

    @property
    def is_done(self) -> bool:
        """True if all texts of the task have been started."""
        return self.opened == len(self.task.prompts) and not self.prompts

    def get_next_prompt(self, lm: KNNLMForCausalLM) -> _Prompt | None:
        """Return the task's prompt to prefill next; None if all are read or selected for a joint pass.

        Creates a `Prefill` for the next prompt if the last one is completely read or selected.
        """
        if self.prompts and self.prompts[-1].prefill.tokens_left and not self.prompts[-1].is_joint:
            return self.prompts[-1]
        if self.opened == len(self.task.prompts):
            return None
        prefill = Prefill(
            lm,
            self.task.prompts[self.opened].tokens,
            is_scored=self.task.score_prompt,
            is_continued=self.task.max_tokens > 0,
        )
        self.prompts.append(_Prompt(self.opened, prefill))
        self.opened += 1
        return self.prompts[-1]


class _Chunk(NamedTuple):
    """A chunk of a prompt that the model has read in this turn, and whose tokens still have to be scored."""

    waiting: _WaitingTask
    prefill: Prefill
    forward_pass: ForwardPass
    targets: Tensor
    """Target of each token of the chunk: the token after it, int64, shape (t,)."""


class _JointPrefill(NamedTuple):
    """A prompt that is selected for one forward pass together with other prompts."""

    waiting: _WaitingTask
    prompt: _Prompt
    settings: KNNSettings


class Admission:
    """Prefills the prompts of waiting tasks and starts their texts.

    ``len()`` gives the number of waiting tasks.

    Args:
        lm: the model.
        settings_of: returns the settings of a task's `knn`. Equal settings must be the same object.
        receive: processes the engine's inbox, and may so call `add` with new tasks.
        begin: starts a text. Its arguments are the ticket, the index of the text, and the state after its
            prompt.
        fail: called with a ticket and an error if a prompt could not be read or a text not be started.
        admitted: called once for each task that leaves: all its texts are started, it failed or was
            cancelled.
    """

    def __init__(
        self,
        lm: KNNLMForCausalLM,
        settings_of: Callable[[Hashable], KNNSettings],
        receive: Callable[[], object],
        begin: Callable[[Ticket, int, Remembered], None],
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
        """Neighbors that this turn has retrieved to predict the first tokens of texts."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """True if a waiting task was cancelled, or has a client that keeps up with its pieces."""
        return any(waiting.ticket.cancelled or not waiting.ticket.is_behind for waiting in self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets of all waiting tasks."""
        return [waiting.ticket for waiting in self._waiting]

    def add(self, ticket: Ticket) -> None:
        """Append a task to the waiting tasks."""
        self._waiting.append(_WaitingTask(ticket))

    def drop_cancelled(self) -> None:
        """Remove the waiting tasks whose tickets were cancelled."""
        for waiting in [task for task in self._waiting if task.ticket.cancelled]:
            self._remove_task(waiting)

    def prefill_and_start(self, room: int, running: int) -> None:
        """Run one turn: prefill at most `_MAX_TURN_TOKENS` tokens, and start texts whose prompts are read.

        Chunks of scored prompts are scored too. Short prompts that arrive meanwhile are read in this turn.

        Args:
            room: number of texts that may be started.
            running: number of texts that are being decoded already. If there are any, long prompts are read
                in chunks, so that the running texts do not wait long.
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
        """Prefill prompts of the waiting tasks, in their order.

        A task that fails is removed. A task whose prompt was read or scored moves behind the others.

        Args:
            room: number of texts that may be started.
            budget: number of tokens that may be read.
            chunk_budget: number of these tokens for prompts that are read on their own, in chunks.
            may_read_whole: True if no text is being decoded, so that prompts are not cut into chunks.

        Returns:
            The number of tokens read, and the chunks to score, grouped by their settings.
        """
        by_settings: dict[int, tuple[KNNSettings, list[_Chunk]]] = {}
        joint: list[_JointPrefill] = []
        initial_budget, position = budget, 0
        share = 1.0  # part of the turn's scoring time that is left, for all scopes together
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
                # 2) Skip it if the searches for first tokens have used up the turn.
                neighbors = 0
                if not (prefill.is_scored or may_read_whole):
                    neighbors = count_neighbors(self._lm.resolve_settings(settings, Purpose.GENERATION))
                if self._searched and self._searched + neighbors > NEIGHBORS_AT_ONCE:
                    position += 1
                    continue
                # 3) Collect short prompts, to read them in one pass after the loop.
                prompt.is_joint = prefill.can_be_read_with_others and prefill.tokens_left <= max(
                    chunk_budget, _CHUNK_TOKENS
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
        """Prefill the selected prompts in one forward pass.

        If the pass fails, or with one prompt, read each prompt on its own, so that only the tasks whose
        prompts fail are removed. No exception is raised.
        """
        if len(joint) > 1:
            try:
                prefill_together(
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
                    prompt.prefill.read_chunk(settings, prompt.prefill.tokens_left)
            except Exception as error:
                self._fail_task(waiting, error)

    def _score_chunks(self, chunks: Sequence[_Chunk], settings: KNNSettings) -> None:
        """Score chunks of prompts together, and append the likelihoods to the `scores` of their prefills.

        Also adjusts the pace of the scope. If scoring fails, each chunk is scored on its own, so that only
        the tasks whose chunks fail are removed. No exception is raised.
        """
        count = max(chunk.waiting.task.top or 0 for chunk in chunks)
        began = time.perf_counter()
        try:
            targets = [chunk.targets for chunk in chunks]
            likelihoods_of_chunks = likelihoods(
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
        """Start the texts whose prompts are read, at most `room` texts that generate tokens.

        A task starts no further text while its client is behind. A task is removed when all its texts are
        started, or when one fails to start.

        Returns:
            The number of texts that may still be started.
        """
        for waiting in list(self._waiting):
            task = waiting.task
            try:
                while waiting.prompts and not waiting.prompts[0].prefill.tokens_left:
                    prompt = waiting.prompts[0]
                    remembered = prompt.prefill.get_state()
                    while (
                        prompt.started < task.copies
                        and (room > 0 or not task.max_tokens)
                        and not waiting.ticket.is_behind
                    ):
                        self._start_text(
                            waiting.ticket, prompt.number * task.copies + prompt.started, remembered
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
        """Report the error of a waiting task to its client, and remove the task."""
        self._fail(waiting.ticket, error)
        self._remove_task(waiting)

    def _remove_task(self, waiting: _WaitingTask) -> None:
        """Remove a task from the waiting tasks, and report this to the engine. A removed task is ignored."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._admitted()


def _fits_one_pass(prefills: Sequence[Prefill]) -> bool:
    """Check whether one pass can read all prompts, padded to the longest. One prompt always fits."""
    return (
        len(prefills) == 1
        or len(prefills) * max(prefill.tokens_left for prefill in prefills) <= _MAX_TURN_TOKENS
    )
