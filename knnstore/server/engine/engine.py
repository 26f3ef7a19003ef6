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
from knnstore.server.engine.rows import Piece, Row, TokenScore, build_prompt_scores, find_end_tokens
from knnstore.server.engine.tickets import EngineBusyError, EngineStoppedError, Observed, Ticket

_logger = logging.getLogger(__name__)

_STEP_ATTEMPTS = 3
"""Number of times that a step is tried: another process may write to the store during a step."""

_MODEL_ONLY = KNNSettings(lam=0.0)

_LIGHT_NEIGHBORS = 1 << 12
"""Largest number of neighbors for each token with which a text is decoded in the light batch."""

Found = TypeVar("Found")
SettingsOf = Callable[[Hashable], KNNSettings]


class Engine:
    """Generates and scores texts with a model and its store, in a thread of its own.

    Args:
        lm: the model. From now on, other threads may use it through `call` only.
        settings_of: returns the retrieval settings for a `Task.knn`; called in the engine's thread. Equal
            settings must be the same object, because texts that share it are searched for together. It is
            called before each step, so it sees each change of the store. Prompts are scored with all
            components; texts are generated without the components that are for scoring only.
        max_rows: largest number of texts that are decoded at once.
        max_waiting: largest number of waiting tasks and unfinished jobs.
        observe: called in the engine's thread after each decoding step, and after each turn without a step
            that started a text or ran a job.

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
        self._ends = find_end_tokens(lm.generation_config, lm.tokenizer)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting_count = 0
        self._count_lock = threading.Lock()
        self._light = Batch(lm)
        self._heavy: deque[Batch] = deque()
        """Batches of texts that retrieve more than `_LIGHT_NEIGHBORS` neighbors for each token. One heavy
        batch has a step after each step of the light batch, so the light texts wait for one heavy batch at a
        time."""
        self._tickets: dict[Row, Ticket] = {}
        self._admission = Admission(
            lm,
            settings_of,
            lambda: self._process_inbox(wait=False),
            self._start_text,
            self._fail_prompt,
            self._count_done,
        )
        self._job_queue: deque[Job[Any]] = deque()
        self._first_tokens = self._turn_count = 0
        self._last_scored: tuple[Ticket | None, int, tuple[TokenScore, ...]] = None, 0, ()
        """Ticket, index and scores of the prompt whose scores were sent last. All texts of the prompt share
        them."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnstore-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it ends. Unfinished tasks and jobs get EngineStoppedError."""
        self._refuse_new_work()
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
        """Add a task and return at once. The thread later calls `ticket.tell` with each piece.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting.
            EngineStoppedError: if the engine is stopped or was not started.
        """
        self._enqueue(lambda: self._admission.add(ticket))

    def call(self, work: Callable[[], Found], *, is_part: bool = False) -> "Future[Found]":
        """Run a function in the engine's thread, between two steps. Returns a future of its result.

        Args:
            work: the function. It must be short, because every text waits for it.
            is_part: True if the work belongs to a request that was accepted before. It is then accepted even
                if too many tasks and jobs wait.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting, unless `is_part` is True.
            EngineStoppedError: if the engine is stopped or was not started.
        """

        def run_in_one_turn() -> Turns[Found]:
            """Run the work in a single turn; the unreachable `yield` makes this a generator."""
            return work()
            yield

        return self._submit_job(run_in_one_turn, is_part=is_part)

    def call_in_turns(self, work: Callable[[], Turns[Found]], *, is_part: bool = False) -> "Future[Found]":
        """Run long work in the engine's thread, in turns with decoding steps between them.

        Several jobs take turns, round robin. If the future is cancelled, the job ends before its next turn. A
        job counts as waiting until it is done.

        Args:
            work: returns a generator that yields at the end of each turn, and returns the result.
            is_part: True if the work belongs to a request that was accepted before. It is then accepted even
                if too many tasks and jobs wait.

        Returns:
            A future of the generator's result.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting, unless `is_part` is True.
            EngineStoppedError: if the engine is stopped or was not started.
        """
        return self._submit_job(work, is_part=is_part)

    def wake(self) -> None:
        """Wake the thread to check its tasks again: a client has caught up, or has cancelled."""
        self._inbox.put(lambda: None)

    def run_extra_step(self) -> None:
        """Run one turn, with a decoding step, from inside long work. Call it in the engine's thread only.

        Does nothing but process the inbox if the engine is stopping.
        """
        if self._process_inbox(wait=False):
            self._run_turn()

    def _submit_job(self, work: Callable[[], Turns[Found]], *, is_part: bool) -> "Future[Found]":
        job = Job(work)
        self._enqueue(lambda: self._job_queue.append(job), may_exceed_limit=is_part)
        return job.future

    def _enqueue(self, received: Callable[[], None], *, may_exceed_limit: bool = False) -> None:
        """Count one more waiting task or job, and put its callback into the inbox of the engine's thread.

        Args:
            received: called in the engine's thread.
            may_exceed_limit: True accepts it even if `max_waiting` tasks and jobs wait.

        Raises:
            EngineStoppedError: if the engine is stopping, has stopped or was not started.
            EngineBusyError: if too many tasks and jobs wait, unless `may_exceed_limit` is True.
        """
        with self._count_lock:
            if self._stopping or not self._thread.is_alive():
                raise EngineStoppedError
            if self._waiting_count >= self._max_waiting and not may_exceed_limit:
                raise EngineBusyError
            self._waiting_count += 1
            self._inbox.put(received)

    def _refuse_new_work(self) -> None:
        with self._count_lock:
            self._stopping = True

    def _count_done(self) -> None:
        with self._count_lock:
            self._waiting_count -= 1

    # -- in the thread

    def _run(self) -> None:
        """Run turns until the engine is stopped, then fail all unfinished jobs and tasks."""
        try:
            while self._process_inbox(wait=True):
                self._drop_cancelled_jobs()
                if self._job_queue:
                    self._take_turn(self._job_queue.popleft())
                if not self._stopping:
                    self._run_turn()
        finally:
            self._refuse_new_work()
            self._process_inbox(wait=False)
            for job in self._job_queue:
                job.fail(EngineStoppedError())
                self._count_done()
            self._fail_tickets([*self._tickets.values(), *self._admission.tickets], EngineStoppedError())

    def _take_turn(self, job: Job[Any]) -> None:
        """Run the next turn of a job. An unfinished job goes to the end of the queue."""
        self._turn_count += 1
        if job.take_turn():
            self._count_done()
        else:
            self._job_queue.append(job)

    def _drop_cancelled_jobs(self) -> None:
        """Close and remove the jobs whose futures were cancelled."""
        for job in [queued_job for queued_job in self._job_queue if queued_job.future.cancelled()]:
            self._job_queue.remove(job)
            job.close()
            self._count_done()

    def _run_turn(self) -> None:
        """Prefill prompts, then run one step of the light batch and one of the next heavy batch."""
        # 1) Remove cancelled tasks.
        self._drop_cancelled_tasks()
        # 2) Prefill prompts and start their texts.
        rows = len(self.rows)
        self._admission.prefill_and_start(self._max_rows - rows, rows)
        # 3) Decode.
        self._heavy.rotate(-1)
        batches = [batch for batch in (self._light, *[*self._heavy][:1]) if batch.rows]
        for batch in batches:
            self._run_step(batch)
            self._first_tokens = self._turn_count = 0
        # 4) Report a turn that had no step.
        if self._first_tokens or self._turn_count:
            self._observe(Observed(0, self._first_tokens, self._waiting_count, 0.0, turns=self._turn_count))
        self._first_tokens = self._turn_count = 0

    def _process_inbox(self, *, wait: bool) -> bool:
        """Call all callbacks in the inbox. Returns False if the engine is stopping.

        Args:
            wait: True blocks until a callback arrives, if the engine has nothing else to do.
        """
        idle = wait and not (self.rows or self._admission.has_work or self._job_queue or self._stopping)
        with suppress(queue.Empty):
            while True:
                received = self._inbox.get() if idle else self._inbox.get_nowait()
                idle = False
                if received is not None:
                    received()
        return not self._stopping

    def _drop_cancelled_tasks(self) -> None:
        self._remove_rows([row for row in self.rows if self._tickets[row].cancelled])
        self._admission.drop_cancelled()

    def _start_text(self, ticket: Ticket, index: int, remembered: Remembered) -> None:
        """Start a text whose prompt is read.

        Sends the prompt's scores if they are requested, chooses and sends the first token, and adds the text
        to a batch unless it has ended already. A task that generates nothing ends at once, with reason
        "length".

        Args:
            ticket: the ticket of the task.
            index: index of the text in the task, as in `Piece`.
            remembered: state of the model after the prompt.
        """
        task = ticket.task
        prompt = task.prompts[index // task.copies]
        if task.score_prompt:
            scored_prompt = ticket, index // task.copies
            if self._last_scored[:2] != scored_prompt:  # all copies of a prompt share its scores
                self._last_scored = (
                    *scored_prompt,
                    build_prompt_scores(prompt, remembered.scores, task.top, self._texts),
                )
            ticket.tell(Piece(index, tokens=self._last_scored[2], is_prompt=True))
        if not task.max_tokens:
            ticket.tell(Piece(index, finish="length"))
            return
        assert remembered.next is not None
        row = Row(task, index, self._texts, self._ends)
        # The prefill has predicted the first token: no step is needed for it.
        piece = row.choose_token(remembered.next, int(remembered.next.argmax()))
        self._first_tokens += 1
        ticket.tell(piece)
        if piece.finish:
            return
        self._choose_batch(task.knn).add_row(row, remembered)
        self._tickets[row] = ticket

    def _choose_batch(self, scope: Hashable) -> Batch:
        """Return the batch for a new text of a scope (`Task.knn`): the light one, or a heavy one with room.

        Adds a heavy batch if all heavy batches are full.
        """
        neighbors = self._count_scope_neighbors(scope)
        if neighbors <= _LIGHT_NEIGHBORS:
            return self._light
        for batch in self._heavy:
            if (
                sum(self._count_scope_neighbors(row.task.knn) for row in batch.rows) + neighbors
                <= NEIGHBORS_AT_ONCE
            ):
                return batch
        self._heavy.append(Batch(self._lm))
        return self._heavy[-1]

    def _count_scope_neighbors(self, scope: Hashable) -> int:
        """Return the approximate number of neighbors that a text of a scope retrieves for each new token."""
        return count_neighbors(self._lm.resolve_settings(self._settings_of(scope), Purpose.GENERATION))

    def _fail_prompt(self, ticket: Ticket, error: Exception) -> None:
        _logger.error("a prompt could not be read", exc_info=error)
        self._fail_tickets([ticket], error)

    def _run_step(self, batch: Batch) -> None:
        """Run one step of a batch, which gives each text its next token.

        If the step fails, each scope is tried with the other texts' retrieval switched off. Only the texts of
        failing scopes get the error, or all texts if no scope fails so. Finished and failed texts leave the
        batch. Calls `observe` at the end.
        """
        started = time.perf_counter()
        rows = batch.rows
        done, taken, drafted = list[Row](), 1, 0
        try:
            step = self._predict_with_retries(batch)
        except Exception as error:
            _logger.exception("a step failed")
            failing = {scope for scope in {row.task.knn for row in rows} if self._scope_fails(batch, scope)}
            done = [row for row in rows if row.task.knn in failing] or rows
            self._fail_tickets([self._tickets[row] for row in done], error)
        else:
            done, taken = self._choose_tokens(rows, step)
            batch.keep_tokens(step, taken)
            drafted = len(step.draft_tokens)
        tokens, seconds = taken * len(rows) + self._first_tokens, (time.perf_counter() - started) / taken
        observed = Observed(
            len(rows), tokens, self._waiting_count, seconds, drafted, taken - 1, self._turn_count
        )
        self._remove_rows(done)
        self._observe(observed)

    def _choose_tokens(self, rows: Sequence[Row], step: Step) -> tuple[list[Row], int]:
        """Choose the next token of each text; of a single text also more, while its tokens equal the draft.

        Returns:
            The texts that ended or failed, and the number of tokens that were chosen for each text.
        """
        done, taken = [], 0
        for ahead, log_probs in zip([*step.draft_tokens, None], step.log_probs.unbind(1), strict=True):
            done = self._choose_one_token_each(rows, log_probs)
            taken += 1
            if done or rows[0].tokens[-1] != ahead:
                break
        return done, taken

    def _choose_one_token_each(self, rows: Sequence[Row], log_probs: Tensor) -> list[Row]:
        """Choose one token for each text, and send the pieces. Returns the texts that ended or failed.

        Args:
            rows: the texts.
            log_probs: log p of each text's next token, shape (b, v).
        """
        ended = []
        for row, row_log_probs, likeliest in zip(rows, log_probs, log_probs.argmax(1).tolist(), strict=True):
            try:
                piece = row.choose_token(row_log_probs, likeliest)
            except Exception as error:
                _logger.exception("a token could not be chosen")
                self._fail_tickets([self._tickets[row]], error)
                ended.append(row)
                continue
            if piece.finish:
                ended.append(row)
            self._tickets[row].tell(piece)
        return ended

    def _predict_with_retries(self, batch: Batch) -> Step:
        """Run the forward pass of a step, at most `_STEP_ATTEMPTS` times while it raises KnnstoreError.

        The pass can fail because another process changed the store during it. The last error is raised.
        """
        for attempt in range(_STEP_ATTEMPTS):
            try:
                scopes = [row.task.knn for row in batch.rows]
                settings_by_scope = {scope: self._settings_of(scope) for scope in set(scopes)}
                row_settings = [
                    self._lm.resolve_settings(settings_by_scope[scope], Purpose.GENERATION)
                    for scope in scopes
                ]
                return batch.predict_next(row_settings)
            except KnnstoreError:
                if attempt == _STEP_ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _scope_fails(self, batch: Batch, scope: Hashable) -> bool:
        """Check whether a step fails if only the texts of one scope retrieve. Other texts use λ = 0."""
        try:
            scope_settings = self._settings_of(scope)
            row_settings = [scope_settings if row.task.knn == scope else _MODEL_ONLY for row in batch.rows]
            batch.predict_next(row_settings)
        except Exception:
            return True
        return False

    def _remove_rows(self, rows: Sequence[Row]) -> None:
        """Remove texts from their batches, and drop the heavy batches that become empty."""
        removed = set(rows)
        for batch in [self._light, *self._heavy]:
            batch.remove_rows([row for row in batch.rows if row in removed])
            if not batch.rows and batch is not self._light:
                self._heavy.remove(batch)
        for row in removed:
            del self._tickets[row]

    @staticmethod
    def _fail_tickets(tickets: Sequence[Ticket], error: Exception) -> None:
        """Cancel each ticket once, and send the error to its client. Cancelled tickets are left out."""
        for ticket in dict.fromkeys(tickets):
            if not ticket.cancelled:
                ticket.cancelled = True  # so that its other texts end too
                ticket.tell(error)
