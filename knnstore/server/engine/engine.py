"""The engine: one thread that owns the model, decodes all texts step by step, and runs jobs between steps."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.lm import KNNLMForCausalLM, KNNSettings, Purpose, TokenTexts
from knnstore.server.engine.admission import NEIGHBORS_AT_ONCE, Admission, count_neighbors
from knnstore.server.engine.batch import Batch, Step
from knnstore.server.engine.jobs import Job, Turns
from knnstore.server.engine.prompts import Remembered, has_attention_only
from knnstore.server.engine.rows import Piece, Row, TokenScore, ends_of, prompt_scores
from knnstore.server.engine.tickets import EngineBusyError, EngineStoppedError, Observed, Ticket

_logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Number of times that a step is tried: another process may write to the store during a step."""

_NOTHING = KNNSettings(lam=0.0)

_LIGHT = 1 << 12
"""Largest number of neighbors for each token with which a text is decoded in the light batch."""

Found = TypeVar("Found")
SettingsOf = Callable[[Hashable], KNNSettings]


class Engine:
    """Generates and scores texts with a model and its store, in a thread of its own.

    Args:
        lm: the model. From now on, other threads may use it through `call` only.
        settings_of: returns the settings of a task's `knn`; called in the engine's thread. Equal settings
            must be the same object, because texts that share it are searched for together. It is called
            before each step, so it sees each change of the store. Prompts are scored with all components;
            texts are generated without the components that are for scoring only.
        max_rows: largest number of texts that are decoded at once.
        max_waiting: largest number of tasks and jobs that wait.
        observe: called in the engine's thread after each step.

    Raises:
        ConfigError: if the model's cache cannot be padded, so that its texts cannot share a batch.
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
        if not has_attention_only(lm.base):
            raise ConfigError("this model keeps a state that cannot be padded: it cannot be served yet")
        self._lm = lm
        self._settings_of = settings_of
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._observe = observe
        self._texts = TokenTexts(lm.reader.tokenizer)
        self._ends = ends_of(lm.generation_config, lm.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs = 0
        self._counting = threading.Lock()
        self._light = Batch(lm)
        self._heavy: deque[Batch] = deque()
        """Batches of texts that retrieve more than `_LIGHT` neighbors for each token. One heavy batch has a
        step after each step of the light batch, so the light texts wait for one heavy batch at a time."""
        self._tickets: dict[Row, Ticket] = {}
        self._waiting = Admission(
            lm, settings_of, lambda: self._receive(wait=False), self._begin, self._give_up, self._begun
        )
        self._calls: deque[Job[Any]] = deque()
        self._firsts = self._turns = 0
        self._scored: tuple[Ticket | None, int, tuple[TokenScore, ...]] = None, 0, ()
        """Ticket, index and scores of the prompt whose scores were last told; its copies share them."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnstore-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended. Unfinished tasks and jobs get EngineStoppedError."""
        self._refuse()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True if the thread runs."""
        return self._thread.is_alive()

    @property
    def rows(self) -> list[Row]:
        """The texts that are being decoded, of all batches."""
        return [row for batch in (self._light, *self._heavy) for row in batch.rows]

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self._ends

    def submit(self, ticket: Ticket) -> None:
        """Add a task. Its pieces are told to the ticket later.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting.
            EngineStoppedError: if the engine is stopped or was not started.
        """
        self._enqueue(lambda: self._waiting.add(ticket))

    def call(self, work: Callable[[], Found], *, is_part: bool = False) -> "Future[Found]":
        """Run a function in the engine's thread, between two steps. Returns a future of its result.

        Args:
            work: the function. It must be short, because every text waits for it.
            is_part: the work belongs to a request that was accepted before, so it never raises
                EngineBusyError.

        Raises:
            EngineBusyError, EngineStoppedError: as in `submit`.
        """

        def turns() -> Turns[Found]:
            return work()
            yield

        return self._promise(turns, is_part=is_part)

    def call_in_turns(self, work: Callable[[], Turns[Found]], *, is_part: bool = False) -> "Future[Found]":
        """Run long work in the engine's thread, in turns with decoding steps between them.

        Several jobs take turns, round robin. If the future is cancelled, the job ends before its next turn. A
        job counts as waiting until it is done.

        Args:
            work: returns a generator that yields at the end of each turn, and returns the result.
            is_part: as in `call`.

        Returns:
            A future of the generator's result.

        Raises:
            EngineBusyError, EngineStoppedError: as in `submit`.
        """
        return self._promise(work, is_part=is_part)

    def wake(self) -> None:
        """Wake the thread to check its tasks again: a client has caught up with its pieces, or has left."""
        self._inbox.put(lambda: None)

    def go_on(self) -> None:
        """Give all texts a step. Call it in the engine's thread only, from work that takes long."""
        if self._receive(wait=False):
            self._write()

    def _promise(self, work: Callable[[], Turns[Found]], *, is_part: bool) -> "Future[Found]":
        job = Job(work)
        self._enqueue(lambda: self._calls.append(job), may_exceed_limit=is_part)
        return job.promised

    def _enqueue(self, received: Callable[[], None], *, may_exceed_limit: bool = False) -> None:
        """Count a job and put it into the inbox of the engine's thread.

        Raises:
            EngineStoppedError: the engine is stopping or has stopped.
            EngineBusyError: too many jobs wait; never with `may_exceed_limit`.
        """
        with self._counting:
            if self._stopping or not self._thread.is_alive():
                raise EngineStoppedError
            if self._jobs >= self._max_waiting and not may_exceed_limit:
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
                self._drop_cancelled_jobs()
                if self._calls:
                    self._take_turn(self._calls.popleft())
                if not self._stopping:
                    self._write()
        finally:
            self._refuse()
            self._receive(wait=False)
            for job in self._calls:
                job.fail(EngineStoppedError())
                self._begun()
            self._fail([*self._tickets.values(), *self._waiting.tickets], EngineStoppedError())

    def _take_turn(self, job: Job[Any]) -> None:
        """Run the next turn of a job. An unfinished job goes to the end of the queue."""
        self._turns += 1
        if job.take_turn():
            self._begun()
        else:
            self._calls.append(job)

    def _drop_cancelled_jobs(self) -> None:
        """Close and remove the jobs whose futures were cancelled."""
        for job in [one for one in self._calls if one.promised.cancelled()]:
            self._calls.remove(job)
            job.close()
            self._begun()

    def _write(self) -> None:
        """Prefill waiting prompts, then run one step of the light batch and one of the next heavy batch."""
        # 1) Remove cancelled tasks.
        self._drop_cancelled()
        # 2) Prefill prompts and start their texts.
        rows = len(self.rows)
        self._waiting.go_on(self._max_rows - rows, rows)
        # 3) Decode.
        self._heavy.rotate(-1)
        batches = [batch for batch in (self._light, *[*self._heavy][:1]) if batch.rows]
        for batch in batches:
            self._step(batch)
            self._firsts = self._turns = 0
        # 4) Report a turn that had no step.
        if self._firsts or self._turns:
            self._observe(Observed(0, self._firsts, self._jobs, 0.0, turns=self._turns))
        self._firsts = self._turns = 0

    def _receive(self, *, wait: bool) -> bool:
        """Process the inbox. Returns False if the engine is stopping.

        Args:
            wait: block until something arrives, if the engine has nothing to do.
        """
        idle = wait and not (self.rows or self._waiting.can_go_on or self._calls or self._stopping)
        with suppress(queue.Empty):
            while True:
                received = self._inbox.get() if idle else self._inbox.get_nowait()
                idle = False
                if received is not None:
                    received()
        return not self._stopping

    def _drop_cancelled(self) -> None:
        self._leave([row for row in self.rows if self._tickets[row].cancelled])
        self._waiting.drop_cancelled()

    def _begin(self, ticket: Ticket, index: int, remembered: Remembered) -> None:
        """Start a text whose prompt is read: tell its prompt's scores, choose its first token, join a batch.

        A task that generates nothing is finished at once, with the reason "length".
        """
        task = ticket.task
        prompt = task.prompts[index // task.copies]
        if task.score_prompt:
            scored = ticket, index // task.copies
            if self._scored[:2] != scored:  # all copies of a prompt share its scores
                self._scored = *scored, prompt_scores(prompt, remembered.scores, task.top, self._texts)
            ticket.tell(Piece(index, tokens=self._scored[2], is_prompt=True))
        if not task.max_tokens:
            ticket.tell(Piece(index, finish="length"))
            return
        assert remembered.next is not None
        row = Row(task, index, self._texts, self._ends)
        # The prefill has predicted the first token: no step is needed for it.
        piece = row.take(remembered.next, int(remembered.next.argmax()))
        self._firsts += 1
        ticket.tell(piece)
        if piece.finish:
            return
        self._batch_for(task.knn).join(row, remembered)
        self._tickets[row] = ticket

    def _batch_for(self, scope: Hashable) -> Batch:
        """Return the batch that a new text of a scope joins. Adds one if all heavy batches are full."""
        neighbors = self._neighbors_of(scope)
        if neighbors <= _LIGHT:
            return self._light
        for batch in self._heavy:
            if sum(self._neighbors_of(row.task.knn) for row in batch.rows) + neighbors <= NEIGHBORS_AT_ONCE:
                return batch
        self._heavy.append(Batch(self._lm))
        return self._heavy[-1]

    def _neighbors_of(self, scope: Hashable) -> int:
        """Return the approximate number of neighbors that a text of a scope retrieves for its next token."""
        return count_neighbors(self._lm.resolve_settings(self._settings_of(scope), Purpose.GENERATION))

    def _give_up(self, ticket: Ticket, error: Exception) -> None:
        _logger.error("a prompt could not be read", exc_info=error)
        self._fail([ticket], error)

    def _step(self, batch: Batch) -> None:
        """Run one step of a batch, which gives each text its next token.

        If the step fails, only the texts whose settings make it fail get the error; all texts, if no settings
        alone make it fail. Finished and failed texts leave.
        """
        started = time.perf_counter()
        rows = batch.rows
        done, taken, drafted = list[Row](), 1, 0
        try:
            step = self._predict(batch)
        except Exception as error:
            _logger.exception("a step failed")
            failing = {scope for scope in {row.task.knn for row in rows} if self._fails(batch, scope)}
            done = [row for row in rows if row.task.knn in failing] or rows
            self._fail([self._tickets[row] for row in done], error)
        else:
            done, taken = self._take(rows, step)
            batch.keep(step, taken)
            drafted = len(step.ahead)
        tokens, seconds = taken * len(rows) + self._firsts, (time.perf_counter() - started) / taken
        observed = Observed(len(rows), tokens, self._jobs, seconds, drafted, taken - 1, self._turns)
        self._leave(done)
        self._observe(observed)

    def _take(self, rows: Sequence[Row], step: Step) -> tuple[list[Row], int]:
        """Give each text its next token; a single text gets more while its tokens equal the draft.

        Returns:
            The texts that ended, and the number of tokens that each text was given.
        """
        done, taken = [], 0
        for ahead, log_probs in zip([*step.ahead, None], step.log_probs.unbind(1), strict=True):
            done = self._take_one(rows, log_probs)
            taken += 1
            if done or rows[0].tokens[-1] != ahead:
                break
        return done, taken

    def _take_one(self, rows: Sequence[Row], log_probs: Tensor) -> list[Row]:
        """Give each text one token, and tell its piece. Returns the texts that ended or failed.

        Args:
            rows: the texts.
            log_probs: log p of each text's next token, shape (b, v).
        """
        done = []
        for row, of_row, likeliest in zip(rows, log_probs, log_probs.argmax(1).tolist(), strict=True):
            try:
                piece = row.take(of_row, likeliest)
            except Exception as error:
                _logger.exception("a token could not be chosen")
                self._fail([self._tickets[row]], error)
                done.append(row)
                continue
            if piece.finish:
                done.append(row)
            self._tickets[row].tell(piece)
        return done

    def _predict(self, batch: Batch) -> Step:
        """Run the forward pass of a step; repeat it after a KnnstoreError, at most `_ATTEMPTS` times in all.

        A step can fail because the store changed during it.
        """
        for attempt in range(_ATTEMPTS):
            try:
                scopes = [row.task.knn for row in batch.rows]
                found = {scope: self._settings_of(scope) for scope in set(scopes)}
                each = [self._lm.resolve_settings(found[scope], Purpose.GENERATION) for scope in scopes]
                return batch.step(each)
            except KnnstoreError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _fails(self, batch: Batch, scope: Hashable) -> bool:
        """Check whether a step fails if one scope retrieves, and all other texts use the model alone."""
        try:
            one = self._settings_of(scope)
            each = [one if row.task.knn == scope else _NOTHING for row in batch.rows]
            batch.step(each)
        except Exception:
            return True
        return False

    def _leave(self, rows: Sequence[Row]) -> None:
        gone = set(rows)
        for batch in [self._light, *self._heavy]:
            batch.leave([row for row in batch.rows if row in gone])
            if not batch.rows and batch is not self._light:
                self._heavy.remove(batch)
        for row in gone:
            del self._tickets[row]

    @staticmethod
    def _fail(tickets: Sequence[Ticket], error: Exception) -> None:
        for ticket in dict.fromkeys(tickets):
            if not ticket.cancelled:
                ticket.cancelled = True  # so that its other texts end too
                ticket.tell(error)
