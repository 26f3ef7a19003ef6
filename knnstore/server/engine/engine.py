"""The one thread that owns the model: it writes all texts step by step, and does jobs between."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from torch import Tensor

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.server.engine.batch import Batch
from knnstore.server.engine.prompts import Reading, Remembered, Waiting
from knnstore.server.engine.rows import Piece, Row, ends_of, prompt_scores
from knnstore.server.engine.tickets import EngineBusyError, EngineStoppedError, Observed, Ticket

_logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # at a step: another process may write to the store meanwhile
_BESIDE, _ALONE = 128, 512
"""Tokens of prompts that are read in a turn, beside texts that are being written and where there are none.
What is read in parts has other rounding, so a prompt is read whole where nobody waits."""

_NOTHING = KNNSettings(lam=0.0)

Found = TypeVar("Found")
SettingsOf = Callable[[Hashable], KNNSettings]


class Engine:
    """Writes texts with a model and its store.

    Args:
        lm: the model; nobody else may use it from now on, but by `call`.
        settings_of: makes the settings of a task's `knn`, in the engine's thread. Equal ones must be the same
            object, for texts that share one are searched for together. It is asked before each step, so it
            sees each change of the store. Prompts are scored with all their components, and texts written
            without those that count in scoring only.
        max_rows: texts that are written at once at most.
        max_waiting: tasks and jobs that may wait.
        observe: told of each step, in the engine's thread.

    Raises:
        ConfigError: texts of this model cannot be written together.
    """

    def __init__(
        self,
        lm: KNNLMForCausalLM,
        settings_of: SettingsOf,
        *,
        max_rows: int = 16,
        max_waiting: int = 64,
        observe: Callable[[Observed], None] = lambda _: None,
    ) -> None:
        if lm.base._is_stateful:
            raise ConfigError("this model keeps a state that cannot be padded: it cannot be served yet")
        self._lm = lm
        self._settings_of = settings_of
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._observe = observe
        self._ends = ends_of(lm.generation_config, lm.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs = 0
        self._counting = threading.Lock()
        self._batch = Batch(lm)
        self._tickets: dict[Row, Ticket] = {}
        self._waiting: deque[Waiting] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnstore-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End: what is being written fails with `EngineStoppedError`; returns when the thread has ended."""
        self._refuse()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def submit(self, ticket: Ticket) -> None:
        """Take in a task.

        Raises:
            EngineBusyError: too much is waiting.
            EngineStoppedError: the engine takes nothing any more.
        """
        self._enter(lambda: self._waiting.append(Waiting(ticket)))

    def call(self, work: Callable[[], Found]) -> "Future[Found]":
        """Do some work in the engine's thread, between two steps.

        Raises:
            EngineBusyError, EngineStoppedError: as `submit`.
        """
        promised: Future[Found] = Future()

        def do() -> None:
            if promised.set_running_or_notify_cancel():
                try:
                    if self._stopping:
                        raise EngineStoppedError
                    promised.set_result(work())
                except BaseException as error:
                    promised.set_exception(error)
            self._begun()

        self._enter(lambda: self._calls.append(do))
        return promised

    def go_on(self) -> None:
        """Let what is being written go on: for work that takes long, in its thread."""
        if self._receive(wait=False):
            self._write()

    def _enter(self, received: Callable[[], None]) -> None:
        with self._counting:
            if self._stopping or not self._thread.is_alive():
                raise EngineStoppedError
            if self._jobs >= self._max_waiting:
                raise EngineBusyError
            self._jobs += 1
            self._inbox.put(received)

    def _refuse(self) -> None:
        with self._counting:
            self._stopping = True

    def _begun(self) -> None:
        with self._counting:
            self._jobs -= 1

    # -- in the thread

    def _run(self) -> None:
        try:
            while self._receive(wait=True):
                if self._calls:
                    self._calls.popleft()()
                if not self._stopping:
                    self._write()
        finally:
            self._refuse()
            self._receive(wait=False)
            for call in self._calls:
                call()  # which finds out that it is too late
            self._fail(
                [*self._tickets.values(), *(one.ticket for one in self._waiting)], EngineStoppedError()
            )

    def _write(self) -> None:
        """Go on with all texts."""
        self._drop_cancelled()
        self._admit()
        if self._batch.rows:
            self._step()

    def _receive(self, *, wait: bool) -> bool:
        """Take in what came, or wait for something where nothing is to be done; False is the end."""
        idle = wait and not (self._batch.rows or self._waiting or self._calls or self._stopping)
        with suppress(queue.Empty):
            while True:
                received = self._inbox.get() if idle else self._inbox.get_nowait()
                idle = False
                if received is not None:
                    received()
        return not self._stopping

    def _drop_cancelled(self) -> None:
        self._leave([row for row in self._batch.rows if self._tickets[row].cancelled])
        for waiting in [one for one in self._waiting if one.ticket.cancelled]:
            self._waiting.remove(waiting)
            self._begun()

    def _admit(self) -> None:
        """Begin texts while there is room, reading so much of prompts that what is being written goes on."""
        beside = bool(self._batch.rows)
        left = _BESIDE if beside else _ALONE
        while self._waiting and len(self._batch.rows) < self._max_rows and left > 0:
            waiting = self._waiting[0]
            task = waiting.ticket.task
            try:
                settings = self._settings_of(task.knn)
                reading = waiting.reading or Reading(self._lm, waiting.prompt.tokens, task.score_prompt)
                waiting.reading = reading
                if reading.left:
                    left -= reading.go_on(settings, left if beside else reading.left)
                if reading.left:
                    return
                self._begin(waiting, reading.remembered())
            except Exception as error:
                _logger.exception("a prompt could not be read")
                self._fail([waiting.ticket], error)
                self._waiting.popleft()
                self._begun()
                continue
            waiting.begun += 1
            if waiting.begun % task.copies == 0:
                waiting.reading = None
                self._waiting.rotate(-1)  # a task of many prompts does not hold up the others
            if waiting.begun == len(task.prompts) * task.copies:
                self._waiting.remove(waiting)
                self._begun()

    def _begin(self, waiting: Waiting, remembered: Remembered) -> None:
        """Begin the next text of a task, whose prompt was read."""
        ticket, task = waiting.ticket, waiting.ticket.task
        row = Row(task, waiting.begun, self._lm.tokenizer, self._ends)
        if task.score_prompt:
            scores = prompt_scores(self._lm.tokenizer, waiting.prompt, remembered.log_probs, task.top)
            ticket.tell(Piece(row.index, tokens=scores, is_prompt=True))
        if not task.max_tokens:
            ticket.tell(Piece(row.index, finish="length"))
            return
        self._batch.join(row, remembered)
        self._tickets[row] = ticket

    def _step(self) -> None:
        started = time.perf_counter()
        rows = self._batch.rows
        done: list[Row] = []
        try:
            log_probs = self._predict()
        except Exception as error:
            _logger.exception("a step failed")
            failing = {scope for scope in {row.task.knn for row in rows} if self._fails(scope)}
            done = [row for row in rows if row.task.knn in failing] or rows
            self._fail([self._tickets[row] for row in done], error)
        else:
            done = self._take(rows, log_probs)
        with self._counting:
            observed = Observed(len(rows), self._jobs, time.perf_counter() - started)
        self._leave(done)
        self._observe(observed)

    def _take(self, rows: Sequence[Row], log_probs: Tensor) -> list[Row]:
        """Give each text its next token; those that end."""
        done = []
        for row, of_row in zip(rows, log_probs, strict=True):
            try:
                piece = row.take(of_row)
            except Exception as error:
                _logger.exception("a token could not be chosen")
                self._fail([self._tickets[row]], error)
                done.append(row)
                continue
            if piece.finish:
                done.append(row)
            self._tickets[row].tell(piece)
        return done

    def _predict(self) -> Tensor:
        """Do a step, again if the store changed in the middle of it."""
        for attempt in range(_ATTEMPTS):
            try:
                scopes = [row.task.knn for row in self._batch.rows]
                found = {scope: self._settings_of(scope) for scope in set(scopes)}
                shared = {id(settings): settings.for_writing for settings in found.values()}
                return self._batch.step([shared[id(found[scope])] for scope in scopes])
            except KnnstoreError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _fails(self, scope: Hashable) -> bool:
        """Whether a step fails with the settings of one scope, all other texts being without a store."""
        try:
            one = self._settings_of(scope)
            each = [one if row.task.knn == scope else _NOTHING for row in self._batch.rows]
            self._batch.step(each, keep=False)
        except Exception:
            return True
        return False

    def _leave(self, rows: Sequence[Row]) -> None:
        self._batch.leave(rows)
        for row in rows:
            del self._tickets[row]

    @staticmethod
    def _fail(tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in dict.fromkeys(tickets):
            if not ticket.cancelled:
                ticket.cancelled = True  # the rest of its texts as well
                ticket.tell(error)
