"""State along a text in generation: found again by the tokens, whatever happens to the rows."""

import numpy as np
import pytest
import torch

from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.retrieval.prefix_states import PrefixStates, prefix_names, sequence_ids_of, unpadded

IDS = torch.tensor([[2, 2, 2, 0, 40, 41], [0, 9, 8, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def test_what_was_not_used_for_longest_is_forgotten_first():
    states = PrefixStates[int](capacity=3)
    for name, value in ((b"a", 1), (b"b", 2), (b"c", 3)):
        states.put([name], [value])
    assert states.get([b"a"]) == [1]
    states.put([b"d"], [4])
    assert [states.get([name])[0] for name in (b"a", b"b", b"c", b"d")] == [1, None, 3, 4]
    assert len(states) == 3


def test_a_call_that_needs_more_finds_all_of_it_in_the_next():
    states, names = PrefixStates[int](capacity=1), prefix_names(np.arange(20))
    states.put(names, range(20))
    assert states.get(names) == list(range(20))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"use_cache": False}, {"do_sample": True}], ids=str)
def test_forward_knows_the_text_of_every_row_in_generation(make_model, make_store, options):
    base = make_model("gpt2")
    model = KNNLMForCausalLM(base, make_store(base, [[0, 40, 41, 42]]), KNNSettings(k=4, temperature=20.0))
    texts = []

    def watch(_, __, inputs):
        texts.extend(row.tolist() for row in unpadded(inputs["sequence_ids"]))
        assert torch.equal(inputs["sequence_ids"][:, -1], inputs["input_ids"][:, -1])

    model.register_forward_pre_hook(watch, with_kwargs=True)
    torch.manual_seed(7)
    out = model.generate(
        IDS, attention_mask=MASK, max_new_tokens=5, min_new_tokens=5, pad_token_id=2, **options
    )
    for row, prompt in zip(out.tolist(), unpadded(sequence_ids_of(IDS, MASK)), strict=True):
        text = [*prompt.tolist(), *row[IDS.shape[1] :]]
        assert all(text[:stop] in texts for stop in range(len(prompt), len(text)))


def test_a_state_that_is_kept_anew_is_not_the_next_to_be_forgotten():
    states = PrefixStates[int](capacity=2)
    for name in (b"a", b"b", b"a", b"c"):
        states.put([name], [1])
    assert states.get([b"a", b"b", b"c"]) == [1, None, 1]
