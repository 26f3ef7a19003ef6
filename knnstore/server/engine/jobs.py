"""Long work for the engine's thread, split into turns (parts).

The engine runs a decoding step between two turns.

`Turns` is the type of the generator that does the work. `Job` runs the generator.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Generic, TypeAlias, TypeVar

Found = TypeVar("Found")

Turns: TypeAlias = Generator[None, None, Found]
"""Generator that does long work: it yields at the end of each turn, and its return value is the result."""


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
