"""Prefill: tasks that wait, and the order in which their prompts are read and scored.

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
from knnstore.server.engine.prompts import Reading, Remembered, read_together
from knnstore.server.engine.rows import Task
from knnstore.server.engine.tickets import Ticket

_logger = logging.getLogger(__name__)

_AT_MOST, _IN_PARTS = 1024, 128
"""`_AT_MOST` is the number of prompt tokens that one turn prefills at most. `_IN_PARTS` is the chunk size of
longer prompts while other texts are being decoded; the chunks are larger if more tasks wait than texts are
decoded. Prompts of at most `_IN_PARTS` tokens are read whole, several in one forward pass: eight together
take little more than half of the time, and a step between them would delay the tasks behind. Chunks round
differently, so a prompt is read whole if no text is being decoded."""


NEIGHBORS_AT_ONCE = 1 << 16
"""Neighbors that are retrieved between two steps, summed over all tokens. This takes about 0.2 s on one core.
It also limits the first turn that scores a prompt, until the time of a turn has been measured."""
_CELL = 64
"""Number of neighbors that reading one cell costs as much as: its records are summed and not sorted."""
_SHORT, _LONG = 0.1, 0.4
"""Seconds. After a turn shorter than `_SHORT` the next turn scores more tokens, after one longer than `_LONG`
fewer."""
_PACES_KEPT = 256


class _Paces:
    """Number of tokens that a turn scores, for each scope, adjusted so that a turn takes 0.1 to 0.4 s."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()

    def most(self, scope: Hashable, settings: KNNSettings) -> int:
        """Return the number of tokens that a turn may score, between 1 and `_AT_MOST`.

        For a new scope it follows from the neighbors that `settings` retrieve for each token.
        """
        if scope not in self._tokens:
            neighbors = max(1, count_neighbors(settings))
            self._tokens[scope] = max(1, min(_AT_MOST, NEIGHBORS_AT_ONCE // neighbors))
            if len(self._tokens) > _PACES_KEPT:
                self._tokens.popitem(last=False)
        return self._tokens[scope]

    def learn(self, scope: Hashable, tokens: int, seconds: float) -> None:
        """Adjust a scope's number of tokens after a turn scored `tokens` tokens in `seconds`.

        The number is halved after a long turn, and doubled after a short turn that used it up. An unknown
        scope is ignored.
        """
        most = self._tokens.get(scope)
        if most is None:
            return
        if seconds > _LONG:
            self._tokens[scope] = max(1, min(most, tokens) // 2)
        elif seconds < _SHORT and tokens >= most:
            self._tokens[scope] = min(_AT_MOST, 2 * most)


def count_neighbors(settings: KNNSettings) -> int:
    """Return the approximate number of neighbors retrieved for each token; 0 without retrieval."""
    if not settings.retrieves:
        return 0
    return settings.probes * _CELL if settings.probes else settings.k


@dataclass(eq=False)
class _Prompt:
    """A prompt that is being prefilled, or some of whose copies have not been started."""

    number: int
    """Index of the prompt in its task."""
    reading: Reading
    begun: int = 0
    """Number of its copies that have been started."""
    is_taken: bool = False
    """True while it is selected for a forward pass together with other prompts."""


@dataclass(eq=False)
class _Waiting:
    """A waiting task, and its prompts whose prefill has begun."""

    ticket: Ticket
    opened: int = 0
    """Number of its prompts whose prefill has begun."""
    prompts: deque[_Prompt] = field(default_factory=deque)
    """Opened prompts, without those whose copies have all been started."""

    @property
    def task(self) -> Task:
        return self.ticket.task

    @property
    def is_done(self) -> bool:
        """True if all its texts have been started."""
        return self.opened == len(self.task.prompts) and not self.prompts

    def to_read(self, lm: KNNLMForCausalLM) -> _Prompt | None:
        """Return the prompt to read next; None if all are read or selected to be read with others.

        Opens the next prompt if the last opened one has been read.
        """
        if self.prompts and self.prompts[-1].reading.left and not self.prompts[-1].is_taken:
            return self.prompts[-1]
        if self.opened == len(self.task.prompts):
            return None
        reading = Reading(
            lm,
            self.task.prompts[self.opened].tokens,
            is_scored=self.task.score_prompt,
            is_continued=self.task.max_tokens > 0,
        )
        self.prompts.append(_Prompt(self.opened, reading))
        self.opened += 1
        return self.prompts[-1]


class _Part(NamedTuple):
    """A chunk of a prompt that this turn has read and still has to score."""

    waiting: _Waiting
    reading: Reading
    read: ForwardPass
    came: Tensor
    """Target of each token of the chunk: the token after it, int64, shape (t,)."""


class _Taken(NamedTuple):
    """A prompt that is read together with others, in one forward pass."""

    waiting: _Waiting
    prompt: _Prompt
    settings: KNNSettings


class Admission:
    """Prefills the prompts of waiting tasks and starts their texts.

    Its length is the number of waiting tasks.

    Args:
        lm: the model.
        settings_of: returns the settings of a task's `knn`. Equal settings must be the same object.
        receive: processes the engine's inbox. It may call `add`.
        begin: starts a text. It gets the ticket, the index of the text, and the state after its prompt.
        fail: called with a ticket and an error if a prompt could not be read or a text not be started.
        admitted: called once for each task that stops waiting: started, failed or cancelled.
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
        self._begin, self._fail, self._admitted = begin, fail, admitted
        self._waiting: list[_Waiting] = []
        self._paces = _Paces()
        self._searched = 0
        """Number of neighbors that this turn has retrieved for the first tokens of texts."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_go_on(self) -> bool:
        """True if `go_on` can do something: a task was cancelled, or its client keeps up with its pieces."""
        return any(one.ticket.cancelled or not one.ticket.is_behind for one in self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """Tickets of all waiting tasks."""
        return [one.ticket for one in self._waiting]

    def add(self, ticket: Ticket) -> None:
        """Append a task to the waiting tasks."""
        self._waiting.append(_Waiting(ticket))

    def drop_cancelled(self) -> None:
        """Remove the waiting tasks whose tickets were cancelled."""
        for waiting in [one for one in self._waiting if one.ticket.cancelled]:
            self._leave(waiting)

    def go_on(self, room: int, beside: int) -> None:
        """Prefill at most `_AT_MOST` tokens of prompts, and start the texts whose prompts are read.

        Short prompts that arrive meanwhile are read in the same turn.

        Args:
            room: number of texts that may be added to those being decoded.
            beside: number of texts being decoded. If it is not 0, long prompts are read in chunks.
        """
        left = in_parts = _AT_MOST
        self._searched = 0
        if beside:
            in_parts = min(_AT_MOST, _IN_PARTS * max(1, len(self._waiting) // beside))
        room = self._begin_texts(room)
        while left > 0:
            read, to_score = self._read(room, left, in_parts, is_alone=not beside)
            for settings, parts in to_score:
                self._score(parts, settings)
            room = self._begin_texts(room)
            if not read:
                break
            left, in_parts = left - read, 0
            self._receive()

    def _read(
        self, room: int, left: int, in_parts: int, *, is_alone: bool
    ) -> tuple[int, list[tuple[KNNSettings, list[_Part]]]]:
        """Prefill prompts of the waiting tasks, in their order.

        A task that fails is removed. A task whose prompt was read or scored moves behind the others.

        Args:
            room: as in `go_on`.
            left: number of tokens that may be read.
            in_parts: number of these for prompts that are not read together with others.
            is_alone: no text is being decoded, so prompts are not cut into chunks.

        Returns:
            The number of tokens read, and the chunks to score, grouped by their settings.
        """
        by_settings: dict[int, tuple[KNNSettings, list[_Part]]] = {}
        taken: list[_Taken] = []
        most, at = left, 0
        share = 1.0  # part of the turn's scoring time that is left, for all scopes together
        scored: list[_Waiting] = []
        while left > 0 and at < len(self._waiting):
            waiting = self._waiting[at]
            try:
                # 1) Select the task's next prompt, unless it has no room or its client is behind.
                needs = waiting.task.copies if waiting.task.max_tokens else 0
                settings = self._settings_of(waiting.task.knn)
                has_room = (room > 0 or not needs) and not waiting.ticket.is_behind
                prompt = waiting.to_read(self._lm) if has_room else None
                if prompt is None:
                    at += 1
                    continue
                reading = prompt.reading
                # 2) Skip it if the searches for first tokens have used up the turn.
                neighbors = 0
                if not (reading.is_scored or is_alone):
                    neighbors = count_neighbors(self._lm.resolve_settings(settings, Purpose.GENERATION))
                if self._searched and self._searched + neighbors > NEIGHBORS_AT_ONCE:
                    at += 1
                    continue
                # 3) Collect short prompts, to read them in one pass after the loop.
                prompt.is_taken = reading.can_be_read_with_others and reading.left <= max(in_parts, _IN_PARTS)
                if prompt.is_taken and not _fit([*(one.prompt.reading for one in taken), reading]):
                    prompt.is_taken = False
                    at += 1
                    continue
                if prompt.is_taken:
                    taken.append(_Taken(waiting, prompt, settings))
                    left -= reading.left
                # 4) Read any other prompt now, in chunks.
                while reading.left and in_parts > 0 and not prompt.is_taken:
                    part, scope = reading.left if is_alone else in_parts, waiting.task.knn
                    if reading.is_scored:
                        most_scored = self._paces.most(scope, settings)
                        part = min(part, round(most_scored * share))
                        if part <= 0:
                            break
                    read, came = reading.go_on(settings, part)
                    left, in_parts = left - len(came), in_parts - len(came)
                    if reading.is_scored:
                        share -= len(came) / most_scored
                        if waiting not in scored:
                            scored.append(waiting)
                        parts = by_settings.setdefault(id(settings), (settings, []))[1]
                        parts.append(_Part(waiting, reading, read, came))
            except Exception as error:
                self._give_up(waiting, error)
                continue
            if prompt.is_taken or not reading.left:
                room -= needs
                self._searched += neighbors
                # Move the task to the end, so that its many prompts do not delay the other tasks.
                self._waiting.append(self._waiting.pop(at))
            else:
                at += 1  # short prompts do not wait for a long one
        # 5) Move the scored tasks to the end: the other tasks come first in the next turn.
        for waiting in scored:
            if waiting in self._waiting:
                self._waiting.append(self._waiting.pop(self._waiting.index(waiting)))
        self._read_together(taken)
        return most - left, list(by_settings.values())

    def _read_together(self, taken: Sequence[_Taken]) -> None:
        """Read prompts in one forward pass.

        If it fails, read each prompt alone, so that only the tasks at fault fail.
        """
        if len(taken) > 1:
            try:
                read_together(
                    self._lm, [one.prompt.reading for one in taken], [one.settings for one in taken]
                )
            except Exception:
                _logger.debug("prompts could not be read together", exc_info=True)
        for waiting, prompt, settings in taken:
            prompt.is_taken = False
            try:
                if prompt.reading.left:
                    prompt.reading.go_on(settings, prompt.reading.left)
            except Exception as error:
                self._give_up(waiting, error)

    def _score(self, parts: Sequence[_Part], settings: KNNSettings) -> None:
        """Score chunks of prompts together, and append the results to their readings.

        If it fails, score each chunk alone, so that only the tasks at fault fail.
        """
        count = max(part.waiting.task.top or 0 for part in parts)
        began = time.perf_counter()
        try:
            came = [part.came for part in parts]
            found = likelihoods(self._lm, [part.read for part in parts], came, settings, count)
        except Exception as error:
            if len(parts) == 1:
                self._give_up(parts[0].waiting, error)
            for part in parts if len(parts) > 1 else ():
                self._score([part], settings)
            return
        for part, scores in zip(parts, found, strict=True):
            part.reading.scores.append(scores)
        tokens = sum(len(part.came) for part in parts)
        self._paces.learn(parts[0].waiting.task.knn, tokens, time.perf_counter() - began)

    def _begin_texts(self, room: int) -> int:
        """Start the texts whose prompts are read, at most `room` texts that generate tokens.

        Tasks whose client is behind start no further text. Tasks that are completely started or fail leave.

        Returns:
            The remaining room.
        """
        for waiting in list(self._waiting):
            task = waiting.task
            try:
                while waiting.prompts and not waiting.prompts[0].reading.left:
                    prompt = waiting.prompts[0]
                    remembered = prompt.reading.remembered()
                    while (
                        prompt.begun < task.copies
                        and (room > 0 or not task.max_tokens)
                        and not waiting.ticket.is_behind
                    ):
                        self._begin(waiting.ticket, prompt.number * task.copies + prompt.begun, remembered)
                        prompt.begun += 1
                        room -= bool(task.max_tokens)
                    if prompt.begun < task.copies:
                        break
                    waiting.prompts.popleft()
            except Exception as error:
                self._give_up(waiting, error)
            if waiting.is_done:
                self._leave(waiting)
        return room

    def _give_up(self, waiting: _Waiting, error: Exception) -> None:
        self._fail(waiting.ticket, error)
        self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._admitted()


def _fit(readings: Sequence[Reading]) -> bool:
    """Check whether one forward pass can read all prompts, padded to the longest. One prompt always fits."""
    return len(readings) == 1 or len(readings) * max(one.left for one in readings) <= _AT_MOST
