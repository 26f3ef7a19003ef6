"""What follows the end of a text in stored documents, against a search through all of them."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from knnstore.store.ngrams import DEPTH, SortedText, draft_continuation

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def matched_before(document: list[int], at: int, text: list[int]) -> int:
    """How many tokens before a place are the last of a text."""
    length = 0
    while length < min(at, len(text)) and document[at - 1 - length] == text[-1 - length]:
        length += 1
    return length


@pytest.mark.slow
@given(st.lists(TOKENS, min_size=1, max_size=5), TOKENS, st.integers(0, 30), st.integers(1, 6))
@example([[0, 1, 2, 3, 3, 2, 1, 0, 2, 0, 1], [3, 1, 2, 3, 3, 2, 1, 0, 2, 3]], [3], 9, 3)
def test_it_stands_there_after_the_longest_end(texts, text, repeated, most) -> None:
    text = text + texts[0][:repeated]  # so that long ends are found too
    stored = SortedText.from_texts(
        [np.array(one, np.uint32) for one in texts], np.zeros(len(texts), np.int64), 5
    )
    draft = draft_continuation(stored, np.array(text, np.int64), most)
    # Every place with a token, with the length of the end before it and the tokens there.
    places = [(matched_before(one, at, text), one[at : at + most]) for one in texts for at in range(len(one))]
    longest = min(DEPTH - 1, max((length for length, _ in places), default=0))
    if longest < 2:
        assert draft.matched == len(draft.tokens) == 0
        return
    assert draft.matched == longest
    ended_with = [tokens for length, tokens in places if length >= draft.matched]
    assert draft.tokens.tolist() in ended_with


@given(st.lists(st.integers(0, 1), min_size=30, max_size=60))
def test_the_next_token_is_the_one_that_comes_most_often(tokens) -> None:
    stored = SortedText.from_texts([np.array(tokens, np.uint32)], np.zeros(1, np.int64), 3)
    draft = draft_continuation(stored, np.array([1, 0]), 1)
    after = [tokens[at + 2] for at in range(len(tokens) - 2) if tokens[at : at + 2] == [1, 0]]
    if not after:
        assert draft.matched == 0
    else:
        counts = np.bincount(after)
        assert counts[draft.tokens[0]] == counts.max()
        assert draft.shares.tolist() == pytest.approx([counts.max() / len(after) if len(after) > 1 else 0])
