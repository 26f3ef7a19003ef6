"""Work for the engine's thread that is done in turns, so that texts have a step between each two of them."""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

Found = TypeVar("Found")

Turns: TypeAlias = Generator[None, None, Found]
"""Work that yields where a turn ends, and returns its result."""


class Job(Generic[Found]):
    """One work with its result to come.

    The future stays pending until the work is done, so that it can be cancelled between turns.

    Args:
        work: makes the generator; it is called in the first turn.
    """

    def __init__(self, work: Callable[[], Turns[Found]]) -> None:
        self.promised: Future[Found] = Future()
        self._work = work
        self._turns: Turns[Found] | None = None

    def take_turn(self) -> bool:
        """Do the next part of the work; returns whether there is no further one."""
        if self.promised.cancelled():
            self.close()
            return True
        try:
            if self._turns is None:
                self._turns = self._work()
            next(self._turns)
        except StopIteration as end:
            if self.promised.set_running_or_notify_cancel():
                self.promised.set_result(end.value)
        except BaseException as error:
            self.fail(error)
        else:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Give the work up; the future tells why."""
        self.close()
        with suppress(InvalidStateError):  # it was cancelled a moment ago
            self.promised.set_exception(error)

    def close(self) -> None:
        """Let go what the work holds."""
        if self._turns is not None:
            self._turns.close()
