"""Windows and batches, against the plain statement of what they must do."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import GPT2Config, MptConfig

from knnstore.errors import ConfigError
from knnstore.lm.reading.windows import Window, cut_windows, pack_windows, prefix_of, read_max_length

PREFIX = 7


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int]:
    max_length = draw(st.integers(2, 12))
    return max_length, draw(st.integers(1, max_length - 1))


@given(length=st.integers(0, 60), cut=cuts(), prefix_length=st.integers(0, 3))
def test_windows_predict_every_token_once(length, cut, prefix_length):
    max_length, stride = cut
    assume(prefix_length < max_length)
    origin = -prefix_length
    found = list(cut_windows(length, max_length, stride, prefix_length=prefix_length))
    predicted = [p for window in found for p in range(window.first, window.stop)]
    assert predicted == list(range(0 if prefix_length else 1, length))
    for window in found:
        assert origin <= window.start < window.first < window.stop <= length
        assert window.stop - window.start <= max_length
        # Context: all that there is, or at least max_length - stride tokens.
        assert window.first - window.start >= min(window.first - origin, max_length - stride)
    if found:
        assert found[0].start == origin
        assert found[-1].stop == length
        assert all(w.stop - w.start == max_length for w in found[1:])
        assert all(b.stop - a.stop == stride for a, b in itertools.pairwise(found[:-1]))


def test_the_example_of_the_documentation():
    assert list(cut_windows(10, 6, 3, prefix_length=1)) == [
        Window(-1, 5, 0),
        Window(2, 8, 5),
        Window(4, 10, 8),
    ]


@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    cut=cuts(),
    batch_tokens=st.integers(1, 64),
    prefix=st.sampled_from([[], [PREFIX], [PREFIX, PREFIX + 1]]),
)
def test_batches_read_each_token_after_its_own_context(lengths, cut, batch_tokens, prefix):
    max_length, stride = cut
    assume(len(prefix) < max_length)
    origin = -len(prefix)
    # Every token of every document is different, so any mix-up shows.
    edges = np.cumsum([100, *lengths])
    documents = [np.arange(a, b, dtype=np.int32) for a, b in itertools.pairwise(edges)]
    seen = []
    for batch in pack_windows(
        documents, prefix=prefix, max_length=max_length, stride=stride, batch_tokens=batch_tokens
    ):
        rows, width = batch.input_ids.shape
        assert rows == 1 or rows * width <= batch_tokens
        assert batch.input_ids.dtype == np.int64
        assert width < max_length
        for at, document, position, gold in zip(
            batch.at.tolist(),
            batch.documents.tolist(),
            batch.positions.tolist(),
            batch.gold.tolist(),
            strict=True,
        ):
            whole = np.concatenate([prefix, documents[document]])
            assert gold == documents[document][position]
            row, column = divmod(at, width)
            context = batch.input_ids[row, : column + 1]
            before = whole[: position - origin]
            assert np.array_equal(context, before[len(before) - len(context) :])
            assert len(context) >= min(len(before), max_length - stride)
            seen.append((document, position))
    first = 0 if prefix else 1
    expected = [(d, p) for d, length in enumerate(lengths) for p in range(first, length)]
    assert sorted(seen) == expected
    # A document's tokens are together and in order, which the continuous cache relies on.
    runs = [[*run] for _, run in itertools.groupby(seen, key=lambda token: token[0])]
    assert len({run[0][0] for run in runs}) == len(runs)
    assert all(run == sorted(run) for run in runs)


def test_nothing_to_predict_gives_no_batch():
    options = {"max_length": 4, "stride": 2, "batch_tokens": 8}
    assert list(pack_windows([], prefix=[PREFIX], **options)) == []
    assert list(pack_windows([np.zeros(0, np.int64)], prefix=[PREFIX], **options)) == []
    assert list(pack_windows([np.array([3])], prefix=[], **options)) == []


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=8),
    cut=cuts(),
    batch_tokens=st.integers(1, 64),
)
def test_every_window_has_the_whole_source_of_its_document(lengths, cut, batch_tokens):
    max_length, stride = cut
    sources = [np.full(size, 100 + document) for document, (_, size) in enumerate(lengths)]
    texts = [np.full(size, document) for document, (size, _) in enumerate(lengths)]
    options = {"prefix": [PREFIX], "max_length": max_length, "stride": stride, "batch_tokens": batch_tokens}
    counts = np.zeros(len(texts), int)
    for batch in pack_windows(texts, sources=sources, **options):
        ids, mask = batch.source
        rows = len(batch.input_ids)
        assert len(ids) == len(mask) == rows
        assert rows == 1 or rows * max(ids.shape[1], batch.input_ids.shape[1]) <= batch_tokens
        for at, document in zip(batch.at.tolist(), batch.documents.tolist(), strict=True):
            row = at // batch.input_ids.shape[1]
            assert ids[row][mask[row] == 1].tolist() == sources[document].tolist()
            assert mask[row].tolist() == sorted(mask[row].tolist(), reverse=True)
            counts[document] += 1
    assert counts.tolist() == [len(text) for text in texts]


@pytest.mark.parametrize(("max_length", "stride"), [(1, 1), (4, 0), (4, 4), (4, 5)])
def test_bad_sizes_are_refused(max_length, stride):
    with pytest.raises(ConfigError):
        list(cut_windows(10, max_length, stride, prefix_length=1))
    with pytest.raises(ConfigError):
        list(pack_windows([], prefix=[], max_length=max_length, stride=stride, batch_tokens=8))


def test_a_prefix_that_fills_a_window_is_refused():
    with pytest.raises(ConfigError, match="2 tokens precede every document"):
        list(cut_windows(10, 2, 1, prefix_length=2))
    assert len(list(cut_windows(10, 3, 1, prefix_length=2))) == 10


def test_prefix_is_bos_then_eos():
    assert prefix_of(SimpleNamespace(bos_token_id=0, eos_token_id=2)) == (0,)
    assert prefix_of(SimpleNamespace(bos_token_id=None, eos_token_id=2)) == (2,)
    assert prefix_of(SimpleNamespace(bos_token_id=None, eos_token_id=None)) == ()


def test_max_length_comes_from_the_configuration():
    assert read_max_length(GPT2Config(n_positions=48)) == 48
    assert read_max_length(MptConfig(max_seq_len=52)) == 52
    with pytest.raises(ConfigError, match="max_length"):
        read_max_length(SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="bloom")))
