"""Strings that end a text that comes piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Holds text back as long as it may be the beginning of a string that ends the text.

    Args:
        stops: the strings; none is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def take(self, piece: str) -> tuple[str, bool]:
        """Go on with a text.

        Returns:
            What of it can be given out, and whether a stop string came, which is no part of it.
        """
        text = self._held + piece
        found = [at for at in map(text.find, self._stops) if at >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        sure = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[sure:]
        return text[:sure], False

    def end(self) -> str:
        """What was held back, when the text ends without it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How long an end of the text is that the stop string begins with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
