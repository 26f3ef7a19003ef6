"""What passes between an engine and whoever asks it for texts."""

from collections.abc import Callable
from dataclasses import dataclass

from knnstore.server.engine.rows import Piece, Task


class EngineBusyError(Exception):
    """As much is waiting as may wait."""


class EngineStoppedError(Exception):
    """The engine takes nothing any more."""


@dataclass(frozen=True)
class Observed:
    """What happened in one turn of the engine."""

    rows: int
    """Texts that were written on in a step; 0 where there was none."""
    tokens: int
    """That were written, first ones included."""
    waiting: int
    """Tasks and jobs that had not begun."""
    seconds: float
    """Of the step, for each token that it gave to a text."""
    drafted: int = 0
    """Tokens that the step read ahead."""
    accepted: int = 0
    """Of these, that were written."""
    turns: int = 0
    """Turns of other work, as explanations, since the step before."""


MOST_BEHIND = 1024
"""Pieces that are not taken yet, beyond which no further text of a task begins."""
MOST_UNREAD = 16_384
"""Pieces that are not taken yet, beyond which a task fails."""


class Ticket:
    """A task in the engine's hands.

    Args:
        task: what is to be written.
        tell: called in the engine's thread with each piece, and with an exception if it fails.
    """

    def __init__(self, task: Task, tell: Callable[[Piece | Exception], None]) -> None:
        self.task = task
        self.tell = tell
        self.cancelled = False
        """Set to True by whoever wants nothing more of it."""
        self.told = self.taken = 0
        """Pieces that were told, and how many of them its reader has taken; kept by whoever hands them on."""

    @property
    def is_behind(self) -> bool:
        """Whether so much is not taken yet that no further text of the task is to begin."""
        return self.told - self.taken > MOST_BEHIND
