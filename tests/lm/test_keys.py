"""Key locations and captures, against hooks set by hand on modules known by name."""

import threading

import numpy as np
import pytest
import torch

from knnstore.errors import ConfigError
from knnstore.lm.keys import KeyCapture, KeyLocation, key_dim, locate, run_until_keys, run_without_head
from knnstore.lm.reading import Encoder

IDS = torch.tensor([[5, 17, 42, 99, 3, 8], [60, 61, 62, 5, 17, 42]])


def seen_by_hand(model, path, ids, side):
    """Run the model and return what a plain hook on the named module sees."""
    seen = []

    def pre_hook(_, args):
        seen.append(args[0])

    def hook(_, __, output):
        seen.append(output if torch.is_tensor(output) else output[0])

    module = model.get_submodule(path)
    handle = (
        module.register_forward_pre_hook(pre_hook) if side == "input" else module.register_forward_hook(hook)
    )
    with torch.no_grad():
        model(ids)
    handle.remove()
    return seen[0].reshape(*ids.shape, -1)


def test_ffn_input_is_found_from_the_structure(model, ffn_path):
    location = locate(model, "ffn_input")
    assert str(location) == f"{ffn_path}:input"
    keys, _ = run_without_head(model, location, IDS)
    assert torch.equal(keys, seen_by_hand(model, ffn_path, IDS, "input"))
    assert key_dim(model, location) == 32


def test_final_hidden_is_what_the_head_gets(model, decoder_path):
    location = locate(model, "final_hidden")
    assert str(location) == f"{decoder_path}:output"
    keys, hidden = run_without_head(model, location, IDS)
    assert torch.equal(keys, hidden)
    with torch.no_grad():
        assert torch.equal(model.get_output_embeddings()(keys), model(IDS).logits)


def test_the_canonical_name_locates_the_same_place(model):
    for key in ("ffn_input", "final_hidden"):
        location = locate(model, key)
        assert locate(model, str(location)) == location


def test_a_module_path_is_a_location(make_model):
    model = make_model("gpt2")
    assert locate(model, "transformer.h.0.attn") == locate(model, "transformer.h.0.attn:input")
    for side in ("input", "output"):
        location = locate(model, f"transformer.h.0.mlp:{side}")
        keys, _ = run_without_head(model, location, IDS)
        assert torch.equal(keys, seen_by_hand(model, "transformer.h.0.mlp", IDS, side))
    # The attention gives a tuple of which the first is the hidden state.
    keys, _ = run_without_head(model, locate(model, "transformer.h.0.attn:output"), IDS)
    assert torch.equal(keys, seen_by_hand(model, "transformer.h.0.attn", IDS, "output"))


def test_llama_attention_gets_its_input_by_keyword(make_model):
    model = make_model("llama")
    keys, _ = run_without_head(model, locate(model, "model.layers.1.self_attn:input"), IDS)
    assert torch.equal(keys, seen_by_hand(model, "model.layers.1.input_layernorm", IDS, "output"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("transformer.h.9.mlp", r"transformer\.h\.1\.mlp \(GPT2MLP\)"),
        ("lm_head:middle", "middle"),
        ("", "no module"),
    ],
)
def test_unknown_places_are_refused(make_model, key, message):
    with pytest.raises(ConfigError, match=message):
        locate(make_model("gpt2"), key)


def test_a_model_without_attention_names_its_candidates(make_model):
    model = make_model("mamba")
    with pytest.raises(ConfigError, match=r"backbone\.layers\.1\.mixer \(MambaMixer\)"):
        locate(model)
    keys, _ = run_without_head(model, locate(model, "backbone.layers.1.mixer"), IDS)
    assert keys.shape == (2, 6, 32)


def test_a_place_without_one_vector_a_token_is_refused(make_model):
    model = make_model("gpt2")
    with pytest.raises(ConfigError, match="not one vector"):
        run_without_head(model, locate(model, "transformer.wpe:output"), IDS)
    with pytest.raises(ConfigError, match="no tensor was captured"):
        run_without_head(model, locate(model, "lm_head"), IDS)


def test_hooks_go_away_also_after_an_error(make_model):
    model = make_model("gpt2")
    location = locate(model)
    with pytest.raises(IndexError), KeyCapture(model, location):
        model(torch.tensor([[10**6]]))
    module = model.get_submodule(location.path)
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


@pytest.mark.parametrize("key", ["ffn_input", "final_hidden"])
def test_stopping_at_the_keys_gives_the_same_keys_and_leaves_the_model_whole(model, key):
    location = locate(model, key)
    with torch.no_grad():
        before = model(IDS).logits
    keys, _ = run_without_head(model, location, IDS)
    assert torch.equal(run_until_keys(model, location, IDS), keys)
    at = np.array([0, 3])
    assert torch.equal(Encoder(model, location).compute_keys(IDS, at), keys.flatten(0, 1)[at].float())
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, before)
    module = model.get_submodule(location.path)
    assert not module._forward_pre_hooks
    assert not module._forward_hooks


def test_a_module_that_is_called_twice_is_not_stopped_at(make_model):
    model = make_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp  # as in models that share their layers
    location = KeyLocation("model.layers.0.mlp", "input")
    whole, _ = run_without_head(model, location, IDS)
    assert not torch.equal(run_until_keys(model, location, IDS), whole)
    at = np.arange(IDS.numel())
    assert torch.equal(Encoder(model, location).compute_keys(IDS, at), whole.flatten(0, 1).float())


@pytest.mark.slow
def test_threads_do_not_see_each_others_keys(make_model):
    model = make_model("gpt2")
    location = locate(model)
    rows = [torch.full((1, 4), token) for token in range(8)]
    expected = [run_without_head(model, location, row)[0] for row in rows]
    wrong = []

    def work(i):
        for _ in range(50):
            keys, _ = run_without_head(model, location, rows[i])
            if not torch.allclose(keys, expected[i], atol=1e-6):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_give_float32_keys(make_model, dtype):
    model = make_model("llama").to(dtype)
    encoded = Encoder(model, locate(model)).encode(IDS, torch.tensor([0, 11]))
    by_hand = seen_by_hand(model, "model.layers.1.mlp", IDS, "input")
    assert encoded.keys.dtype == torch.float32
    assert torch.equal(encoded.keys, by_hand.flatten(0, 1)[[0, 11]].float())


def test_encoder_reads_any_positions(model):
    encoder = Encoder(model, locate(model))
    at, gold = torch.tensor([1, 4, 6, 10]), torch.tensor([7, 3, 100, 0])
    encoded = encoder.encode(IDS.numpy(), at.numpy())
    keys, _ = run_without_head(model, encoder.location, IDS)
    assert torch.equal(encoded.keys, keys.flatten(0, 1)[at])
    with torch.no_grad():
        log_probs = model(IDS).logits.flatten(0, 1).double().log_softmax(1)[at, gold]
    found = encoder.target_log_probs(encoded.states, gold.numpy())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), log_probs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "cohere2"])
def test_logits_changed_after_the_head_are_respected(make_model, name):
    model = make_model(name)
    encoder = Encoder(model, locate(model))
    at, gold = torch.arange(12), torch.arange(12)
    with torch.no_grad():
        log_probs = model(IDS).logits.flatten(0, 1).log_softmax(1)[at, gold]
        bare = model.lm_head(model.model(IDS)[0]).flatten(0, 1).log_softmax(1)[at, gold]
    assert (log_probs - bare).abs().max() > 0.1  # else this model would prove nothing
    torch.testing.assert_close(encoder.target_log_probs(encoder.encode(IDS, at).states, gold), log_probs)


def test_probabilities_do_not_depend_on_the_chunk(make_model, monkeypatch):
    model = make_model("gpt2")
    encoder = Encoder(model, locate(model))
    states = encoder.encode(IDS, torch.arange(12)).states
    whole = encoder.target_log_probs(states, torch.arange(12))
    monkeypatch.setattr("knnstore.lm.reading.encoder._CHUNK_VALUES_CPU", 1)
    monkeypatch.setattr("knnstore.lm.reading.encoder._LEAST_ROWS", 5)
    torch.testing.assert_close(encoder.target_log_probs(states, torch.arange(12)), whole)
