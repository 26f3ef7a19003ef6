"""Stop strings of a text that is generated piece by piece."""

from collections.abc import Sequence


class StopStrings:
    """Finds stop strings in a growing text. Holds back the end of the text while it may begin a stop string.

    Args:
        stops: the stop strings, each of at least one character. An empty sequence holds nothing back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def append_text(self, piece: str) -> tuple[str, bool]:
        """Append a piece of text, and search it for stop strings together with the text that is held back.

        Args:
            piece: the new text; may be empty.

        Returns:
            The text that can be sent to the client, and True if a stop string was found. If one was found,
            the sendable text ends before the first stop string, and the rest is dropped. Otherwise the end of
            the text is held back if it may begin a stop string.
        """
        text = self._held + piece
        starts = [start for start in map(text.find, self._stops) if start >= 0]
        if starts:
            self._held = ""
            return text[: min(starts)], True
        safe = len(text) - max((_overlap_length(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe], False

    def release_held(self) -> str:
        """Return the text that was held back, and hold nothing any more. Call it when the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap_length(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` that `text` ends with; 0 if none."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
