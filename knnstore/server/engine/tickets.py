"""The interface between the engine and its callers.

`Ticket` is a submitted task, `Observed` describes a turn of the engine, and two exceptions refuse a task.
"""

from collections.abc import Callable
from dataclasses import dataclass

from knnstore.server.engine.rows import Piece, Task


class EngineBusyError(Exception):
    """The engine refuses a task or a job, because as many wait as may wait."""


class EngineStoppedError(Exception):
    """The engine is stopping, has stopped or was not started."""


@dataclass(frozen=True)
class Observed:
    """Counts of one turn of the engine."""

    rows: int
    """Number of texts in the step; 0 if the turn had no step."""
    tokens: int
    """Number of generated tokens, the first token of each new text included."""
    waiting: int
    """Number of tasks that have not been started and jobs that are not done."""
    seconds: float
    """Duration of the step divided by the number of tokens that it gave each text; 0 without a step."""
    drafted: int = 0
    """Number of draft tokens that the step read."""
    accepted: int = 0
    """Number of draft tokens that were chosen."""
    turns: int = 0
    """Number of turns of jobs, for example explanations, since the step before."""


MOST_BEHIND = 1024
"""Largest number of untaken pieces with which a further text of a task is started."""
MOST_UNREAD = 16_384
"""Largest number of untaken pieces of a task; with more, the task fails."""


class Ticket:
    """A task that is submitted to an engine, with the callback for its results.

    Args:
        task: the task.
        tell: called in the engine's thread with each piece, or with the exception if the task fails.
    """

    def __init__(self, task: Task, tell: Callable[[Piece | Exception], None]) -> None:
        self.task = task
        self.tell = tell
        self.cancelled = False
        """The caller sets it to True to cancel the task; the engine sets it if the task fails."""
        self.told = self.taken = 0
        """Numbers of pieces told to the caller and taken by the client. The caller counts both."""

    @property
    def is_behind(self) -> bool:
        """True if more than `MOST_BEHIND` pieces are not taken, so that no further text is started."""
        return self.told - self.taken > MOST_BEHIND
