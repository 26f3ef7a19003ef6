"""Text that is recognized by its tokens, against sets of tuples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from knnstore.store.ngrams import RUN, Runs

TEXTS = st.lists(st.integers(0, 3), max_size=150)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, max_size=4), st.data())
def test_shares_and_documents_are_those_of_all_runs(texts, stored, data):
    for one in stored[:2]:  # parts of the texts, in others
        source = data.draw(st.sampled_from(texts))
        start = data.draw(st.integers(0, len(source)))
        one[len(one) // 2 : len(one) // 2] = source[start : start + data.draw(st.integers(0, 80))]
    runs = Runs([np.array(text, np.uint32) for text in texts])
    found = [runs.look_at(np.array(one, np.uint32)) for one in stored]

    def runs_of(text: list[int]) -> list[tuple[int, ...]]:
        if len(text) < RUN:
            return [tuple(text)] if text else []
        return [tuple(text[at : at + RUN]) for at in range(len(text) - RUN + 1)]

    everything = {run for one in stored for run in runs_of(one)}
    for number, (text, share) in enumerate(zip(texts, runs.shares(), strict=True)):
        covered = {
            place
            for at, run in enumerate(runs_of(text))
            if run in everything
            for place in range(at, at + len(run))
        }
        assert share == (len(covered) / len(text) if text else 0)
        for one, reached in zip(stored, found, strict=True):
            assert (number in reached) == bool(set(runs_of(one)) & set(runs_of(text)))
