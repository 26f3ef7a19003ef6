"""Tasks whose texts have not all begun: prompts are read in turns; what a turn reads is scored at once."""

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
"""Tokens of prompts that are read in a turn; and of those longer than this, which are read in parts beside
texts that are being written, more where more tasks wait than texts do. Short prompts are read whole, at once:
eight together take little more than half of the time, and a step between would hold up those behind it.
Parts have other rounding, so any prompt is read whole where nobody waits."""


NEIGHBORS_AT_ONCE = 1 << 16
"""Neighbors that are searched for between two steps of the other texts, for all tokens together: some .2 s on
one core. Prompts that are scored begin with so many, until it is known how long that takes."""
_CELL = 64
"""How many neighbors a visit of one cell counts as in that turn: its records are summed and not sorted."""
_SHORT, _LONG = 0.1, 0.4
"""Seconds: after a shorter turn more tokens are scored in the next one, after a longer one fewer."""
_PACES_KEPT = 256


class _Paces:
    """How many tokens are scored in a turn, for each scope: as many as take a part of a second."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[Hashable, int] = OrderedDict()

    def most(self, scope: Hashable, settings: KNNSettings) -> int:
        """Tokens that may be scored in a turn, between 1 and `_AT_MOST`."""
        if scope not in self._tokens:
            neighbors = max(1, count_neighbors(settings))
            self._tokens[scope] = max(1, min(_AT_MOST, NEIGHBORS_AT_ONCE // neighbors))
            if len(self._tokens) > _PACES_KEPT:
                self._tokens.popitem(last=False)
        return self._tokens[scope]

    def learn(self, scope: Hashable, tokens: int, seconds: float) -> None:
        """Learn how long it took to score some tokens in one turn."""
        most = self._tokens.get(scope)
        if most is None:
            return
        if seconds > _LONG:
            self._tokens[scope] = max(1, min(most, tokens) // 2)
        elif seconds < _SHORT and tokens >= most:
            self._tokens[scope] = min(_AT_MOST, 2 * most)


def count_neighbors(settings: KNNSettings) -> int:
    """Return for how many neighbors each token is searched for, about; 0 where none is."""
    if not settings.retrieves:
        return 0
    return settings.probes * _CELL if settings.probes else settings.k


@dataclass(eq=False)
class _Prompt:
    """A prompt that is being read, or whose texts have not all begun."""

    number: int
    reading: Reading
    begun: int = 0
    is_taken: bool = False
    """Whether it is about to be read with others."""


@dataclass(eq=False)
class _Waiting:
    """A task, and those of its prompts of which reading has begun."""

    ticket: Ticket
    opened: int = 0
    prompts: deque[_Prompt] = field(default_factory=deque)

    @property
    def task(self) -> Task:
        return self.ticket.task

    @property
    def is_done(self) -> bool:
        """Whether all its texts have begun."""
        return self.opened == len(self.task.prompts) and not self.prompts

    def to_read(self, lm: KNNLMForCausalLM) -> _Prompt | None:
        """The prompt that is to be read on; None where all were read."""
        if self.prompts and self.prompts[-1].reading.left and not self.prompts[-1].is_taken:
            return self.prompts[-1]
        if self.opened == len(self.task.prompts):
            return None
        reading = Reading(
            lm, self.task.prompts[self.opened].tokens,
            is_scored=self.task.score_prompt, is_continued=self.task.max_tokens > 0,
        )  # fmt: skip
        self.prompts.append(_Prompt(self.opened, reading))
        self.opened += 1
        return self.prompts[-1]


class _Part(NamedTuple):
    """What was read of a prompt in this turn, and is to be scored."""

    waiting: _Waiting
    reading: Reading
    read: ForwardPass
    came: Tensor


class _Taken(NamedTuple):
    """A prompt that is to be read with others."""

    waiting: _Waiting
    prompt: _Prompt
    settings: KNNSettings


class Admission:
    """Reads prompts and has their texts begun.

    Args:
        lm: the model.
        settings_of: makes the settings of a task's `knn`; equal ones are the same object.
        receive: takes in what came, perhaps adding tasks.
        begin: begins a text of a task by its number, after its prompt.
        fail: told of a task of which a prompt could not be read, or a text not begun.
        admitted: told of each task that does not wait any more, whatever became of it.
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
        """Neighbors that were searched for in this turn, for the first tokens of texts."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def can_go_on(self) -> bool:
        """Whether a task waits for anything but its own reader."""
        return any(one.ticket.cancelled or not one.ticket.is_behind for one in self._waiting)

    @property
    def tickets(self) -> list[Ticket]:
        """Of all tasks that wait."""
        return [one.ticket for one in self._waiting]

    def add(self, ticket: Ticket) -> None:
        """Let a task wait."""
        self._waiting.append(_Waiting(ticket))

    def drop_cancelled(self) -> None:
        """Forget the tasks of which nobody wants anything any more."""
        for waiting in [one for one in self._waiting if one.ticket.cancelled]:
            self._leave(waiting)

    def go_on(self, room: int, beside: int) -> None:
        """Read a little, and begin texts; short prompts that come meanwhile do not wait for a step.

        Args:
            room: how many texts more may be written.
            beside: how many are being written, which are not to wait long.
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
        """Read prompts in turn: how many tokens, and what is to be scored, by settings."""
        by_settings: dict[int, tuple[KNNSettings, list[_Part]]] = {}
        taken: list[_Taken] = []
        most, at = left, 0
        share = 1.0  # of the time in which prompts are scored in a turn, for all scopes together
        scored: list[_Waiting] = []
        while left > 0 and at < len(self._waiting):
            waiting = self._waiting[at]
            try:
                needs = waiting.task.copies if waiting.task.max_tokens else 0
                settings = self._settings_of(waiting.task.knn)
                has_room = (room > 0 or not needs) and not waiting.ticket.is_behind
                prompt = waiting.to_read(self._lm) if has_room else None
                if prompt is None:
                    at += 1
                    continue
                reading = prompt.reading
                # Each prompt ends with a search for its first token.
                neighbors = 0
                if not (reading.is_scored or is_alone):
                    neighbors = count_neighbors(self._lm.resolve_settings(settings, Purpose.GENERATION))
                if self._searched and self._searched + neighbors > NEIGHBORS_AT_ONCE:
                    at += 1
                    continue
                prompt.is_taken = reading.can_be_read_with_others and reading.left <= max(in_parts, _IN_PARTS)
                if prompt.is_taken and not _fit([*(one.prompt.reading for one in taken), reading]):
                    prompt.is_taken = False
                    at += 1
                    continue
                if prompt.is_taken:
                    taken.append(_Taken(waiting, prompt, settings))
                    left -= reading.left
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
                # A task of many prompts does not hold up the others.
                self._waiting.append(self._waiting.pop(at))
            else:
                at += 1  # short ones do not wait for a long one
        for waiting in scored:  # in the next turn the others come first
            if waiting in self._waiting:
                self._waiting.append(self._waiting.pop(self._waiting.index(waiting)))
        self._read_together(taken)
        return most - left, list(by_settings.values())

    def _read_together(self, taken: Sequence[_Taken]) -> None:
        """Read prompts in one pass; if it fails each alone, so that what fails fails alone."""
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
        """Score parts of prompts; what fails fails alone."""
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
        """Begin texts whose prompts were read, as many as there is room for; how much is left."""
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
    """Whether prompts may be read in one pass, in which each is padded to the longest; one always may."""
    return len(readings) == 1 or len(readings) * max(one.left for one in readings) <= _AT_MOST
