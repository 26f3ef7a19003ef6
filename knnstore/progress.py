"""Progress as an object that is passed in: the library itself never prints."""


class Progress:
    """Receives reports on the progress of a long operation; this base class ignores them.

    Override methods in a subclass to show the progress.
    """

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """Receive the report that an operation begins.

        Args:
            title: name of the operation.
            total: expected number of units; None if unknown.
            unit: name of the unit.
        """

    def expect(self, total: int) -> None:
        """Receive a new estimate of the total number of units of the operation."""

    def advance(self, amount: int) -> None:
        """Receive the report that `amount` more units are done."""

    def finish(self) -> None:
        """Receive the report that the operation has ended."""

    def say(self, message: str) -> None:
        """Receive a message of one line that the user should see."""
