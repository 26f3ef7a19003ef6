"""The state of a text: what it keeps, and that it follows its text through every mode of generation."""

import copy

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from knnstore.errors import ConfigError
from knnstore.lm import KNNLMForCausalLM, KNNSettings, TextState, TextStateLayer
from knnstore.lm.keys import Joining
from knnstore.lm.model.text_layer import attach_texts, check_rows_not_reordered, get_cached_texts
from knnstore.lm.text_state import append_pass

IDS = torch.tensor([[2, 2, 2, 0, 40, 41], [0, 9, 8, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
WIDTH = 3


def values_of(tokens: list[int]) -> torch.Tensor:
    """A row for each token, which no other token has."""
    return torch.tensor(tokens, dtype=torch.float32)[:, None] * torch.tensor([1.0, 10.0, 100.0])


def append(text: TextState, tokens: list[int]) -> None:
    text.append(np.array(tokens, np.int64), values_of(tokens), -values_of(tokens))


def check(text: TextState, tokens: list[int]) -> None:
    length = len(tokens)
    assert text.length == length
    assert text.tokens(0, length).tolist() == tokens
    if tokens:
        assert torch.equal(text.keys(0, length), values_of(tokens))
    like = torch.zeros(1, WIDTH)
    expected = torch.cat([torch.zeros(2, WIDTH), -values_of(tokens)])[-2:]
    assert torch.equal(text.last_states(2, like), expected)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 3), st.lists(st.integers(1, 99), max_size=90)),
        st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 100)),
        st.tuples(st.just("fork"), st.integers(0, 3), st.integers(0, 3)),
        st.tuples(st.just("deepcopy"), st.integers(0, 3), st.integers(0, 3)),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_texts_are_lists_that_know_nothing_of_each_other(operations) -> None:
    texts, lists = [TextState() for _ in range(4)], [list[int]() for _ in range(4)]
    for name, row, value in operations:
        if name == "append":
            append(texts[row], value)
            lists[row] += value
        elif name == "truncate":
            texts[row].truncate(value)
            del lists[row][value:]
        else:
            texts[value] = texts[row].fork() if name == "fork" else copy.deepcopy(texts[row])
            lists[value] = [*lists[row]]
        for text, tokens in zip(texts, lists, strict=True):
            check(text, tokens)


def test_tokens_that_were_given_as_embeddings_are_not_known() -> None:
    text = TextState()
    text.append(None, values_of([5, 6]), None)
    append(text, [7])
    assert not text.has_all_tokens
    assert not text.fork().has_all_tokens
    text.truncate(0)
    assert text.has_all_tokens


@given(
    passes=st.lists(
        st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6), max_size=5
    ),
    count=st.integers(0, 2),
)
def test_keys_of_padded_passes_are_those_of_whole_texts(passes, count) -> None:
    """Each pass is (t, 3) of whether a position is text; the texts are then read at once, one by one."""
    rng, joining = np.random.default_rng(0), Joining.from_state_count(1 + count)
    texts, whole, keys = [TextState() for _ in range(3)], [[] for _ in range(3)], [[] for _ in range(3)]
    for columns in passes:
        is_text = np.array(columns).T
        states = torch.from_numpy(rng.normal(size=(*is_text.shape, 4)).astype(np.float32))
        tokens = torch.from_numpy(rng.integers(0, 9, is_text.shape))
        made, batch = append_pass(texts, tokens, states, is_text, joining, lambda joined: joined)
        assert batch.starts == [len(row) for row in whole]
        for row in range(3):
            whole[row] += list(states[row][is_text[row]])
            keys[row] += list(made[row][is_text[row]])
        assert list(batch.stops) == [text.length for text in texts] == [len(row) for row in whole]
    for row in range(3):
        if whole[row]:
            expected = joining(torch.stack(whole[row])[None])[0]
            torch.testing.assert_close(torch.stack(keys[row]), expected)
            torch.testing.assert_close(texts[row].keys(0, texts[row].length), expected)


def test_rows_that_are_taken_twice_are_copied() -> None:
    texts = [TextState(), TextState()]
    append(texts[0], [1])
    append(texts[1], [2])
    layer = TextStateLayer(texts)
    layer.reorder_cache(torch.tensor([1, 1]))
    append(layer.texts[0], [3])
    check(layer.texts[0], [2, 3])
    check(layer.texts[1], [2])
    layer.batch_repeat_interleave(2)
    layer.batch_select_indices(torch.tensor([False, True, True, False]))
    layer.crop(-1)
    check(layer.texts[0], [2])
    check(layer.texts[1], [])
    layer.reset()
    assert layer.texts == []


def test_texts_ride_with_a_state_that_is_no_cache() -> None:
    """As RWKV has it: a list of tensors, which `generate` hands from pass to pass."""
    output, texts = {"state": [torch.zeros(1)]}, [TextState()]
    attach_texts(output, texts)
    assert get_cached_texts(output) is texts
    assert isinstance(output["state"], list)
    append(texts[0], [4, 5, 6])
    check_rows_not_reordered(output, torch.tensor([[4, 5, 6, 7]]), 1)
    with pytest.raises(ConfigError, match="generate with use_cache=False"):
        check_rows_not_reordered(output, torch.tensor([[4, 5, 9, 7]]), 1)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}, {"do_sample": True}], ids=str)
def test_the_state_of_every_row_is_its_text(make_model, make_store, options) -> None:
    base = make_model("gpt2")
    model = KNNLMForCausalLM(base, make_store(base, [[0, 40, 41, 42]]), KNNSettings(k=4, temperature=20.0))
    read = list[list[int]]()
    extend = model.extend_texts

    def watch(texts, *args):
        made = extend(texts, *args)
        read.extend(text.tokens(0, text.length).tolist() for text in texts)
        return made

    model.extend_texts = watch
    torch.manual_seed(7)
    out = model.generate(
        IDS, attention_mask=MASK, max_new_tokens=5, min_new_tokens=5, pad_token_id=2, **options
    )
    for row, mask in zip(out.tolist(), MASK, strict=True):
        start = int((mask == 0).sum())
        assert all(row[start:stop] in read for stop in range(IDS.shape[1], len(row)))
