"""Long work for the engine's thread, done in turns so that the texts have a step between two turns.

`Turns` is the generator that does the work, `Job` runs it.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

Found = TypeVar("Found")

Turns: TypeAlias = Generator[None, None, Found]
"""Generator that yields at the end of each turn, and returns its result."""


class Job(Generic[Found]):
    """Long work and the future of its result.

    The future stays pending until the work is done, so that it can be cancelled between turns.

    Args:
        work: returns the generator. It is called in the first turn.
    """

    def __init__(self, work: Callable[[], Turns[Found]]) -> None:
        self.promised: Future[Found] = Future()
        self._work = work
        self._turns: Turns[Found] | None = None

    def take_turn(self) -> bool:
        """Run the next turn. Returns True if the job is done, failed or cancelled.

        Sets the result or the error of the future. Errors are not raised.
        """
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
        """Close the job, and set the error of its future. A cancelled future is left as it is."""
        self.close()
        with suppress(InvalidStateError):  # it was cancelled a moment ago
            self.promised.set_exception(error)

    def close(self) -> None:
        """Close the generator, so that its `finally` blocks run."""
        if self._turns is not None:
            self._turns.close()
