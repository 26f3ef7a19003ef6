"""Stop strings of a text that is generated piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings, and holds back text that may be the beginning of one.

    Args:
        stops: the stop strings; none is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def take(self, piece: str) -> tuple[str, bool]:
        """Append a piece of text.

        Returns:
            The text that can be given out, and True if a stop string was found. The text ends before the
            first stop string.
        """
        text = self._held + piece
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def end(self) -> str:
        """Return the held text when the text has ended without a stop string, and hold nothing."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with; 0 if none."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
