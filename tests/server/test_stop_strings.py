"""Stop strings of a text that arrives in pieces, compared with a search of the whole text."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from knnstore.server.engine.rows import StopStrings


def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether one came; searched again after each piece."""
    for text in accumulate(pieces):
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], True
    return "".join(pieces), False


@given(
    st.lists(st.text("ab", max_size=3), max_size=6),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_its_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    search, sent, is_ended = StopStrings(stops), "", False
    for piece in pieces:
        text, is_ended = search.append_text(piece)
        sent += text
        if is_ended:
            break
    assert (sent + search.release_held(), is_ended) == cut(pieces, stops)
