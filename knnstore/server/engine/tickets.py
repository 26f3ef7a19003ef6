"""The interface between the engine and its callers.

`Ticket` is a submitted task with its callback. `Job` is long work that the engine runs in turns (parts)
between the decoding steps; `Turns` is the type of the generator that does it. `Observed` has the counts of a
turn of the engine, and two exceptions refuse a task.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from knnstore.server.engine.rows import Piece, Task

MOST_BEHIND = 1024
"""Largest backlog of a task, in pieces. While a client has more pieces (parts of the result) left to take,
the engine starts no further text of its task."""
MOST_UNREAD = 16_384
"""Largest number of pieces of a task that its client has not taken yet. With more pieces the task fails."""
Found = TypeVar("Found")
Turns: TypeAlias = Generator[None, None, Found]
"""Generator that does long work: it yields at the end of each turn, and its return value is the result."""


class EngineBusyError(Exception):
    """Raised if the engine refuses new work, because too many tasks (requests) and other jobs are waiting."""


class EngineStoppedError(Exception):
    """Raised for unfinished or new work if the engine is stopping, has stopped or was not started."""


@dataclass(frozen=True)
class Observed:
    """Counts of one turn of the engine, and the duration of the turn's decoding step, for the metrics.

    In a turn the engine lets the model read prompts, and runs a decoding step. Between the steps it runs
    parts of jobs (long work, such as explanations).
    """

    rows: int
    """Number of texts that the step decoded; 0 if the turn had no step."""
    tokens: int
    """Number of tokens generated in the turn, including the first token of each text that was started."""
    waiting: int
    """Number of waiting tasks (tasks whose texts have not all been started) and of unfinished jobs."""
    seconds: float
    """Duration of the step in seconds, divided by the mean number of tokens that a text got from the step; 0
    without a step."""
    drafted: int = 0
    """Number of draft tokens (guesses of the next tokens) that the step read."""
    accepted: int = 0
    """Number of draft tokens that equal the tokens that were chosen. Each of them saved one step."""
    turns: int = 0
    """Number of parts of jobs that were run since the previous step."""


class Ticket:
    """A task for `Engine.submit`, with the callback that gets its results.

    Args:
        task: the task: prompts to continue or to score.
        tell: function that is called in the engine's thread with each piece (new text or scores of one text
            of the task), or with the exception if the task fails.
    """

    def __init__(self, task: Task, tell: Callable[[Piece | Exception], None]) -> None:
        self.task = task
        self.tell = tell
        self.cancelled = False
        """True cancels the task. The caller sets it to cancel the task, and the engine sets it when the task
        has failed."""
        self.told = self.taken = 0
        """Number of pieces that `tell` was called with (`told`), and number of pieces that the client has
        taken (`taken`). The caller of the engine counts both numbers."""

    @property
    def is_behind(self) -> bool:
        """True if the client is slow: it has more than `MOST_BEHIND` parts of its results left to take.

        The engine then starts no further text of the task.
        """
        return self.told - self.taken > MOST_BEHIND


class Job(Generic[Found]):
    """Long work that the engine runs in turns, with a future for the result.

    `future` gets the result or the exception. It can be cancelled between two turns, because it stays in the
    state "pending" until the work is done.

    Args:
        work: function without arguments that returns the generator that does the work. It is called by the
            first turn.
    """

    def __init__(self, work: Callable[[], Turns[Found]]) -> None:
        self.future: Future[Found] = Future()
        self._work = work
        self._turns: Turns[Found] | None = None

    def take_turn(self) -> bool:
        """Run the job's generator up to its next `yield`, and return whether the job is over.

        The job is over when its generator has returned or raised, or when its future was cancelled. The
        result or the exception of the generator is set in `future`; the exception is not raised here.

        Returns:
            True if the job is over, else False.
        """
        if self.future.cancelled():
            self.close()
            return True
        try:
            if self._turns is None:
                self._turns = self._work()
            next(self._turns)
        except StopIteration as end:
            if self.future.set_running_or_notify_cancel():
                self.future.set_result(end.value)
        except BaseException as error:
            self.fail(error)
        else:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Close the generator, and set the error in `future`.

        A cancelled or finished future stays as it is.
        """
        self.close()
        with suppress(InvalidStateError):  # it was cancelled a moment ago
            self.future.set_exception(error)

    def close(self) -> None:
        """Close the generator, so that its `finally` blocks run.

        Does not change `future`. Does nothing before the first turn.
        """
        if self._turns is not None:
            self._turns.close()
