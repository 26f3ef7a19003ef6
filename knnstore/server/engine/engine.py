"""The engine: one thread that owns the model, decodes all texts, and runs other work between steps."""

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
from knnstore.lm import KNNLM, KNNSettings, Purpose, TokenTexts
from knnstore.server.engine.admission import NEIGHBORS_AT_ONCE, Admission, count_neighbors
from knnstore.server.engine.batch import Batch, Step
from knnstore.server.engine.pairs import PairBatch, make_generation_rules
from knnstore.server.engine.prompts import PromptState, has_first_position_zero, has_only_attention_cache
from knnstore.server.engine.rows import Piece, Row, TokenScore, build_prompt_scores, find_end_tokens
from knnstore.server.engine.tickets import EngineBusyError, EngineStoppedError, Job, Observed, Ticket, Turns

_logger = logging.getLogger(__name__)

_STEP_ATTEMPTS = 3
"""Number of times that a decoding step is tried. A step can fail because another process changed the store
during the step."""

_MODEL_ONLY = KNNSettings(lam=0.0)
"""Settings with which nothing is retrieved: λ is 0, so the model predicts alone."""

_LIGHT_NEIGHBORS = 1 << 12
"""Largest number of neighbors (retrieved records) for each token with which a text is decoded in the light
batch."""

Found = TypeVar("Found")
SettingsOf = Callable[[Hashable], KNNSettings]
"""Function that returns the retrieval settings for a scope (the value of `Task.knn`)."""


class Engine:
    """Generates and scores texts with a model and its store, in a thread of its own.

    A task is one request: prompts to continue or to score. A text is one continuation of a prompt. A job is
    other work that needs the model, such as an explanation. The thread works in turns: in each turn it
    prefills some prompts, runs one decoding step, and runs a part of one job.

    Args:
        lm: the model. From now on, other threads may use the model through `call` and `call_in_turns` only.
        settings_of: function that returns the retrieval settings for a scope, the value of `Task.knn`. It is
            called in the engine's thread before each step, so a step uses the store's newest state. It must
            return the same object for equal settings, because texts with the same object are searched for
            together. The settings contain all components (sources of predictions); the engine uses all of
            them to score prompts, and leaves out the components for scoring when it generates text.
        max_rows: largest number of texts that are decoded at once.
        max_waiting: largest number of waiting tasks and unfinished jobs together.
        observe: function that is called in the engine's thread after each decoding step, with its counts. It
            is also called after a turn that had no step but started a text or ran a part of a job.

    Raises:
        ConfigError: if the model's cache cannot be padded, so that several texts cannot share a batch; or if
            the model's first position is not 0.
    """

    def __init__(
        self,
        lm: KNNLM,
        settings_of: SettingsOf,
        *,
        max_rows: int = 16,
        max_waiting: int = 64,
        observe: Callable[[Observed], None] = lambda _: None,
    ) -> None:
        if not has_only_attention_cache(lm.base):
            raise ConfigError(
                "this model cannot be served: it keeps a recurrent state, which does not allow padding"
            )
        if not has_first_position_zero(lm.base):
            raise ConfigError(
                "this model cannot be served: it counts positions from the number of its padding token, as "
                "RoBERTa does"
            )
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
        """Batches of texts that retrieve more than `_LIGHT_NEIGHBORS` neighbors for each token. After each
        step of the light batch, one of these batches has a step. So the texts of the light batch never wait
        for more than one heavy batch. All texts of an encoder-decoder model are in batches of this list, and
        its light batch stays empty."""
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
        """Ticket, index of the prompt in the task, and scores of the prompt whose scores were sent last. All
        copies of this prompt get the same scores object."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="knnstore-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread. Returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the engine's thread and wait until it ends.

        Unfinished tasks (requests) and jobs (other work for the thread) get EngineStoppedError.
        """
        self._refuse_new_work()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True while the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def rows(self) -> list[Row]:
        """The texts that are being decoded, of all batches; a new list. Empty if no text is being decoded."""
        return [row for batch in (self._light, *self._heavy) for row in batch.rows]

    @property
    def ends(self) -> frozenset[int]:
        """Ids of the end tokens: a text ends after one of these tokens."""
        return self._ends

    def submit(self, ticket: Ticket) -> None:
        """Add a task (a request to generate or score) to the waiting tasks, and return at once.

        The engine's thread later calls `ticket.tell` with each piece (new text of one of the task's texts),
        or with an exception.

        Args:
            ticket: the task with its callback.

        Raises:
            EngineBusyError: if too many tasks and other jobs are waiting (`max_waiting`).
            EngineStoppedError: if the engine is stopping, has stopped or was not started.
        """
        self._enqueue(lambda: self._admission.add(ticket))

    def call(self, work: Callable[[], Found], *, is_part: bool = False) -> "Future[Found]":
        """Run a short function in the engine's thread, between two decoding steps.

        The method returns at once and does not wait for the function.

        Args:
            work: the function, without arguments. It must be short, because all running texts wait for it.
            is_part: True if the function belongs to a request that was accepted before. The function is then
                accepted even if `max_waiting` tasks and jobs are waiting.

        Returns:
            A future of the function's result, or of its exception.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting, unless `is_part` is True.
            EngineStoppedError: if the engine is stopping, has stopped or was not started.
        """

        def run_in_one_turn() -> Turns[Found]:
            """Run the work in a single turn; the unreachable `yield` makes this a generator."""
            return work()
            yield

        return self._submit_job(run_in_one_turn, is_part=is_part)

    def call_in_turns(self, work: Callable[[], Turns[Found]], *, is_part: bool = False) -> "Future[Found]":
        """Run long work in the engine's thread, in parts with decoding steps between them.

        If several such jobs are unfinished, they run one part each in turn (round robin). If the future is
        cancelled, the job ends before its next part. A job counts as waiting until it is done.

        Args:
            work: function without arguments that returns a generator. The generator does the work; it yields
                at the end of each part, and its return value is the result.
            is_part: True if the work belongs to a request that was accepted before. The work is then accepted
                even if `max_waiting` tasks and jobs are waiting.

        Returns:
            A future of the generator's result, or of its exception.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting, unless `is_part` is True.
            EngineStoppedError: if the engine is stopping, has stopped or was not started.
        """
        return self._submit_job(work, is_part=is_part)

    def wake(self) -> None:
        """Wake the thread, so that it checks its tasks again.

        Call it when a client has caught up or has cancelled.
        """
        self._inbox.put(lambda: None)

    def _submit_job(self, work: Callable[[], Turns[Found]], *, is_part: bool) -> "Future[Found]":
        """Queue a job (long work) for the engine's thread, and return the future of its result.

        Args:
            work: function without arguments that returns the generator that does the work.
            is_part: True accepts the job even if `max_waiting` tasks and jobs are waiting.

        Raises:
            EngineBusyError: if `max_waiting` tasks and jobs are waiting, unless `is_part` is True.
            EngineStoppedError: if the engine is stopping, has stopped or was not started.
        """
        job = Job(work)
        self._enqueue(lambda: self._job_queue.append(job), may_exceed_limit=is_part)
        return job.future

    def _enqueue(self, received: Callable[[], None], *, may_exceed_limit: bool = False) -> None:
        """Pass a new task (request) or job (other work) to the engine's thread, and count it as waiting.

        Args:
            received: function without arguments that adds the task or job to the engine's lists. It is called
                in the engine's thread.
            may_exceed_limit: True accepts the task or job even if `max_waiting` tasks and jobs are waiting.

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
        """Mark the engine as stopping, so that every new task and job is refused with EngineStoppedError."""
        with self._count_lock:
            self._stopping = True

    def _count_done(self) -> None:
        """Subtract 1 from the number of waiting tasks (requests) and jobs (other work of the thread).

        Called when a task no longer waits, and when a job has ended.
        """
        with self._count_lock:
            self._waiting_count -= 1

    # -- in the thread

    def _run(self) -> None:
        """Run the engine: repeat turns until it is stopped. This is the function of the engine's thread.

        A turn runs a part of one job (long work such as an explanation) and one decoding step of the texts.
        At the end all unfinished tasks and jobs get EngineStoppedError.
        """
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
        """Run the next part of a job (long work such as an explanation).

        An unfinished job goes to the end of the queue.
        """
        self._turn_count += 1
        if job.take_turn():
            self._count_done()
        else:
            self._job_queue.append(job)

    def _drop_cancelled_jobs(self) -> None:
        """Remove the jobs (long work) whose futures were cancelled, and close their generators."""
        for job in [queued_job for queued_job in self._job_queue if queued_job.future.cancelled()]:
            self._job_queue.remove(job)
            job.close()
            self._count_done()

    def _run_turn(self) -> None:
        """Run one turn: remove cancelled tasks, prefill prompts, and decode one token of the running texts.

        The turn has a step for the light batch (texts that retrieve few neighbors) and a step for the next
        heavy batch (texts that retrieve many). A batch without texts has no step.

        Calls `observe` after each step. Also calls it for a turn that had no step but started a text or ran a
        part of a job.
        """
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
        """Call all callbacks that other threads have put into the inbox.

        A callback adds a task, adds other work, or only wakes the thread.

        Args:
            wait: True blocks until a callback arrives, if the engine has nothing else to do.

        Returns:
            False if the engine is stopping, otherwise True.
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
        """Remove the waiting and the running texts of tasks that were cancelled.

        Their clients get no message.
        """
        self._remove_rows([row for row in self.rows if self._tickets[row].cancelled])
        self._admission.drop_cancelled()

    def _start_text(self, ticket: Ticket, index: int, prompt_state: PromptState) -> None:
        """Start a text whose prompt was read: send its first results, and add the text to a batch.

        Sends the prompt's scores if they are requested, then chooses and sends the first generated token. If
        the text ends with this token, it is not added to a batch. If the task generates nothing (`max_tokens`
        is 0), the text ends at once with the reason "length".

        Args:
            ticket: the task with the callback of its client.
            index: index of the text in the task: index of the prompt × `Task.copies` + index of the copy.
            prompt_state: state of the model after the prompt.
        """
        task = ticket.task
        prompt = task.prompts[index // task.copies]
        if task.score_prompt:
            scored_prompt = ticket, index // task.copies
            if self._last_scored[:2] != scored_prompt:  # all copies of a prompt share its scores
                self._last_scored = (
                    *scored_prompt,
                    build_prompt_scores(prompt, prompt_state.scores, task.top, self._texts),
                )
            ticket.tell(Piece(index, tokens=self._last_scored[2], is_prompt=True))
        if not task.max_tokens:
            ticket.tell(Piece(index, finish="length"))
            return
        assert prompt_state.next is not None
        rules = make_generation_rules(self._lm, prompt, task.max_tokens) if prompt.source else None
        row = Row(task, index, self._texts, self._ends, rules)
        # The prefill has predicted the first token: no step is needed for it.
        piece = row.choose_token(prompt_state.next, int(prompt_state.next.argmax()))
        self._first_tokens += 1
        ticket.tell(piece)
        if piece.finish:
            return
        self._choose_batch(row).add_row(row, prompt_state)
        self._tickets[row] = ticket

    def _choose_batch(self, row: Row) -> Batch:
        """Return the batch for a new text: the light batch, or a heavy batch that has room.

        A text is light if it retrieves at most `_LIGHT_NEIGHBORS` neighbors for each token, and the model
        reads no source. A heavy batch has room while its texts together retrieve at most `NEIGHBORS_AT_ONCE`
        neighbors for each token. If no heavy batch has room or fits the text, a new one is added.
        """
        reads_source = self._lm.key_encoder.reads_source
        neighbors = self._count_scope_neighbors(row.task.knn)
        if neighbors <= _LIGHT_NEIGHBORS and not reads_source:
            return self._light
        for batch in self._heavy:
            retrieved = sum(self._count_scope_neighbors(other.task.knn) for other in batch.rows)
            if batch.fits(row) and retrieved + neighbors <= NEIGHBORS_AT_ONCE:
                return batch
        self._heavy.append(PairBatch(self._lm) if reads_source else Batch(self._lm))
        return self._heavy[-1]

    def _count_scope_neighbors(self, scope: Hashable) -> int:
        """Return the approximate number of neighbors that a text of a scope retrieves for each new token.

        Args:
            scope: the text's `Task.knn`: the documents to retrieve from, and the settings.
        """
        return count_neighbors(self._lm.resolve_settings(self._settings_of(scope), Purpose.GENERATION))

    def _fail_prompt(self, ticket: Ticket, error: Exception) -> None:
        """Log the error of a prompt that could not be read, cancel its task, and tell the client."""
        _logger.error("a prompt could not be read", exc_info=error)
        self._fail_tickets([ticket], error)

    def _run_step(self, batch: Batch) -> None:
        """Run one step of a batch: predict and send the next token of each of its texts.

        Texts that have ended leave the batch. Draft tokens (guesses of the next tokens) can give a text
        several tokens at once. Calls `observe` at the end.

        If the forward pass fails, no text gets a token. Each scope (`Task.knn`: the documents and settings of
        retrieval) is then tested alone, to find out whose retrieval is broken: see `_scope_fails`. The texts
        of each failing scope get the error and leave the batch; the other texts are tried again in the next
        step. If no scope fails alone, all texts get the error and leave.
        """
        started = time.perf_counter()
        rows = batch.rows
        done, taken, drafted = list[Row](), list[int](), 0
        # 1) Predict. If this fails, end the texts whose retrieval is broken.
        try:
            step = self._predict_with_retries(batch)
        except Exception as error:
            _logger.exception("a step failed")
            failing = {scope for scope in {row.task.knn for row in rows} if self._scope_fails(batch, scope)}
            done = [row for row in rows if row.task.knn in failing] or rows
            self._fail_tickets([self._tickets[row] for row in done], error)
        # 2) Otherwise choose the tokens, and keep their keys and values.
        else:
            done, taken = self._choose_tokens(rows, step)
            batch.keep_accepted_tokens(step, taken)
            drafted = sum(map(len, step.draft_tokens))
        # 3) Remove the texts that ended, and report the step.
        tokens = sum(taken)
        observed = Observed(
            len(rows),
            tokens + self._first_tokens,
            self._waiting_count,
            (time.perf_counter() - started) * len(rows) / max(tokens, len(rows)),
            drafted,
            max(tokens - len(rows), 0),
            self._turn_count,
        )
        self._remove_rows(done)
        self._observe(observed)

    def _choose_tokens(self, rows: Sequence[Row], step: Step) -> tuple[list[Row], list[int]]:
        """Choose and send the next tokens of each text.

        The step has predicted several tokens of a text with draft tokens (guesses of its next tokens). They
        are all chosen, as long as the last chosen token equals its guess.

        Args:
            rows: the texts of the batch.
            step: the predictions for these texts.

        Returns:
            The texts that ended or failed, and the number of tokens that were chosen for each text (at least
            1).
        """
        done, taken = [], []
        for row, draft, log_probs, likeliest in zip(
            rows, step.draft_tokens, step.log_probs, step.log_probs.argmax(-1).tolist(), strict=True
        ):
            for index, ahead in enumerate([*draft, None]):
                is_done = self._choose_token(row, log_probs[index], likeliest[index])
                if is_done or row.tokens[-1] != ahead:
                    break
            taken.append(1 + index)
            if is_done:
                done.append(row)
        return done, taken

    def _choose_token(self, row: Row, log_probs: Tensor, likeliest: int) -> bool:
        """Choose the next token of a text, and send the token's text to the client.

        If choosing fails, the text's task is cancelled and its client gets the error; other texts go on.

        Args:
            row: the text.
            log_probs: log-probabilities of all v tokens as the next token, shape (v,).
            likeliest: id of the most probable token.

        Returns:
            True if the text ended or failed.
        """
        try:
            piece = row.choose_token(log_probs, likeliest)
        except Exception as error:
            _logger.exception("a token could not be chosen")
            self._fail_tickets([self._tickets[row]], error)
            return True
        self._tickets[row].tell(piece)
        return piece.finish is not None

    def _predict_with_retries(self, batch: Batch) -> Step:
        """Run the forward pass of a step and return its predictions. A failed pass is tried again.

        Another process can change the store during the pass, so that the pass raises KnnstoreError. Then the
        pass is tried again with the newest settings, at most `_STEP_ATTEMPTS` times in all.

        Raises:
            KnnstoreError: if the last attempt raises it. Any other exception of an attempt is raised at once.
        """
        for attempt in range(_STEP_ATTEMPTS):
            try:
                scopes = [row.task.knn for row in batch.rows]
                settings_by_scope = {scope: self._resolve_for_generation(scope) for scope in set(scopes)}
                return batch.predict_next([settings_by_scope[scope] for scope in scopes])
            except KnnstoreError:
                if attempt == _STEP_ATTEMPTS - 1:
                    raise
        raise AssertionError

    def _resolve_for_generation(self, scope: Hashable) -> KNNSettings:
        """Return the settings of a scope (`Task.knn`) for generation, at the store's newest revision."""
        return self._lm.resolve_settings(self._settings_of(scope), Purpose.GENERATION)

    def _scope_fails(self, batch: Batch, scope: Hashable) -> bool:
        """Check whether the forward pass fails if only the texts of one scope retrieve.

        Runs the pass once more: all texts of other scopes use λ = 0, so that they do not search the store.
        The predictions of the pass are not used.

        Args:
            batch: the texts.
            scope: the scope to test, a value of `Task.knn`.

        Returns:
            True if the pass raises any exception, or if the settings of the scope cannot be resolved.
        """
        try:
            scope_settings = self._resolve_for_generation(scope)
            row_settings = [scope_settings if row.task.knn == scope else _MODEL_ONLY for row in batch.rows]
            batch.predict_next(row_settings)
        except Exception:
            return True
        return False

    def _remove_rows(self, rows: Sequence[Row]) -> None:
        """Remove texts from their batches, and forget the callbacks of their clients.

        Empty heavy batches are dropped.
        """
        removed = set(rows)
        for batch in [self._light, *self._heavy]:
            batch.remove_rows([row for row in batch.rows if row in removed])
            if not batch.rows and batch is not self._light:
                self._heavy.remove(batch)
        for row in removed:
            del self._tickets[row]

    @staticmethod
    def _fail_tickets(tickets: Sequence[Ticket], error: Exception) -> None:
        """Cancel tasks, and send an error to the client of each task.

        Tasks that are cancelled already are skipped.

        Args:
            tickets: the tasks with the callbacks of their clients. A ticket may occur several times.
            error: the error to send.
        """
        for ticket in dict.fromkeys(tickets):
            if not ticket.cancelled:
                ticket.cancelled = True  # so that its other texts end too
                ticket.tell(error)
