"""Text that is recognized by its tokens, against sets of tuples."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from knnstore.store.ngrams import RUN, Runs

TEXTS = st.builds(
    lambda length, seed: np.random.default_rng(seed).integers(0, 4, length).tolist(),
    st.just(0) | st.integers(0, 150),
    st.integers(0, 999),
)
"""Lists of tokens. Those that hypothesis draws itself are nearly all shorter than a run."""


@given(st.lists(TEXTS, min_size=1, max_size=4), st.lists(TEXTS, max_size=4), st.data())
def test_shares_and_documents_are_those_of_all_runs(texts, stored, data):
    for one in stored[:2]:  # parts of the texts, in others
        source = data.draw(st.sampled_from(texts))
        start = data.draw(st.integers(0, len(source)))
        one[len(one) // 2 : len(one) // 2] = source[start : start + data.draw(st.integers(0, 80))]
    runs = Runs([np.array(text, np.uint32) for text in texts])
    found = [runs.compare_document(np.array(one, np.uint32)) for one in stored]

    def runs_of(text: list[int], length: int = RUN) -> set[tuple[int, ...]]:
        return {tuple(text[at : at + length]) for at in range(len(text) - length + 1)}

    def covered(text: list[int], wanted: set[tuple[int, ...]], length: int = RUN) -> int:
        starts = [at for at in range(len(text) - length + 1) if tuple(text[at : at + length]) in wanted]
        return len({place for at in starts for place in range(at, at + length)})

    def is_whole_in(short: list[int], text: list[int], one: list[int]) -> bool:
        quarter = RUN // 4
        is_found = covered(text, runs_of(one, quarter), quarter) >= len(short) >= quarter
        return bool(short) and (is_found or text == one)

    shares, elsewhere = runs.covered_shares(), runs.covered_shares(elsewhere=True)
    for number, text in enumerate(texts):
        whole, runs_in, runs_of_others = False, set[tuple[int, ...]](), set[tuple[int, ...]]()
        for one, met in zip(stored, found, strict=True):
            short = min(text, one, key=len)
            shared = covered(text, runs_of(one))
            is_same = is_whole_in(short, text, one) if len(short) < RUN else shared >= len(short) / 2
            assert (number in met.same) == is_same
            assert (number in met.others) == (shared > 0 and not is_same)
            whole |= is_same and len(text) <= len(one)
            runs_in |= runs_of(one)
            runs_of_others |= set() if is_same else runs_of(one)
        if len(text) >= RUN:
            assert shares[number] == covered(text, runs_in) / len(text)
            assert elsewhere[number] == covered(text, runs_of_others) / len(text)
        else:
            assert (shares[number], elsewhere[number]) == (whole, 0)


def test_a_short_text_is_stored_as_a_whole_or_not_at_all():
    runs = Runs([np.arange(20, dtype=np.uint32)])
    for of_it, share in ((range(10), 0.0), (range(20), 1.0)):
        assert runs.compare_document(np.array(of_it, np.uint32)).same == {0}
        assert runs.covered_shares() == [share]
    long = Runs([np.arange(100, dtype=np.uint32)])
    assert long.compare_document(np.arange(40, 60, dtype=np.uint32)).same == {0}
    assert long.covered_shares() == [0]
