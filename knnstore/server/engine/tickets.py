"""The interface between the engine and its callers.

`Ticket` is a submitted task, `Observed` describes a turn of the engine, and two exceptions refuse a task.
"""

from collections.abc import Callable
from dataclasses import dataclass

from knnstore.server.engine.rows import Piece, Task


class EngineBusyError(Exception):
    """Raised if the engine refuses a task or job because too many tasks and jobs are waiting."""


class EngineStoppedError(Exception):
    """Raised for a task or job of an engine that is stopping, has stopped or was not started."""


@dataclass(frozen=True)
class Observed:
    """Counts of one turn of the engine, with the duration of its decoding step, for the metrics."""

    rows: int
    """Number of texts in the step; 0 if the turn had no step."""
    tokens: int
    """Number of generated tokens, the first token of each new text included."""
    waiting: int
    """Number of waiting tasks, some of whose texts have not begun, and of unfinished jobs."""
    seconds: float
    """Duration of the step divided by the number of tokens that it gave each text; 0 without a step."""
    drafted: int = 0
    """Number of draft tokens that the step read."""
    accepted: int = 0
    """Number of draft tokens that equal the chosen tokens, and so needed no step of their own."""
    turns: int = 0
    """Number of turns of jobs, for example explanations, since the previous step."""


MOST_BEHIND = 1024
"""Largest number of pieces of a task that its client has not taken yet, if the engine shall start a further
text of the task."""
MOST_UNREAD = 16_384
"""Largest number of pieces of a task that its client has not taken yet. With more, the task fails."""


class Ticket:
    """A task for `Engine.submit`, with the callback that gets its pieces of text.

    Args:
        task: the task.
        tell: called in the engine's thread with each piece, or with the exception if the task fails.
    """

    def __init__(self, task: Task, tell: Callable[[Piece | Exception], None]) -> None:
        self.task = task
        self.tell = tell
        self.cancelled = False
        """True cancels the task. The caller sets it to cancel, and the engine sets it when the task has
        failed."""
        self.told = self.taken = 0
        """Number of pieces that `tell` has got, and number of pieces that the client has taken. The caller of
        the engine counts both."""

    @property
    def is_behind(self) -> bool:
        """True if more than `MOST_BEHIND` pieces are not taken, so the engine starts no further text."""
        return self.told - self.taken > MOST_BEHIND
