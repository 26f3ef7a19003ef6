"""Progress as an object that is passed in: the library itself never prints."""


class Progress:
    """Is told how far a long operation is; this one is silent. Subclass it to show something."""

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """Report that an operation begins; `total` is the expected number of units, None if unknown."""

    def expect(self, total: int) -> None:
        """Report a new estimate of the total."""

    def advance(self, amount: int) -> None:
        """Report that more units are done."""

    def finish(self) -> None:
        """Report that the operation ended."""

    def say(self, message: str) -> None:
        """Something that the user should know happened; one line."""
