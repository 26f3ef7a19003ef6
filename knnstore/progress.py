"""Progress as an object that is passed in: the library itself never prints."""


class Progress:
    """Is told how far a long operation is; this one is silent. Subclass it to show something."""

    def start(self, title: str, *, total: int | None = None, unit: str = "tok") -> None:
        """An operation begins; `total` units are expected, None when that is not known."""

    def expect(self, total: int) -> None:
        """The estimate of the total changed."""

    def advance(self, amount: int) -> None:
        """So many more units are done."""

    def finish(self) -> None:
        """The operation ended."""

    def say(self, message: str) -> None:
        """Something that the user should know happened; one line."""
