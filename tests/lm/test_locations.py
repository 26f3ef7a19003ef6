"""Named key locations in every family, against hooks and hidden states taken without them."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from knnstore.errors import ConfigError
from knnstore.lm.keys import LAYER_PLACES, count_layers, locate, run_without_head

IDS = torch.tensor([[5, 17, 42, 99, 3, 8], [60, 61, 62, 5, 17, 42]])

LLAMA = ("model.layers.{}.self_attn", "model.layers.{}.input_layernorm", "model.layers.{}.mlp",
         "model.layers.{}.post_attention_layernorm", "model.norm")  # fmt: skip
# By family: the attention and its norm, the feed-forward part and its norm, and the norm at the end.
MODULES = {
    "gpt2": ("transformer.h.{}.attn", "transformer.h.{}.ln_1", "transformer.h.{}.mlp",
             "transformer.h.{}.ln_2", "transformer.ln_f"),
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mistral": LLAMA,
    "gpt_neox": ("gpt_neox.layers.{}.attention", "gpt_neox.layers.{}.input_layernorm",
                 "gpt_neox.layers.{}.mlp", "gpt_neox.layers.{}.post_attention_layernorm",
                 "gpt_neox.final_layer_norm"),
    "opt": ("model.decoder.layers.{}.self_attn", "model.decoder.layers.{}.self_attn_layer_norm",
            "model.decoder.layers.{}.fc1", "model.decoder.layers.{}.final_layer_norm",
            "model.decoder.final_layer_norm"),
}  # fmt: skip


def keys_at(model, key):
    return run_without_head(model, locate(model, key), IDS)[0]


def hidden_states(model):
    """What enters each layer, as transformers reports it."""
    with torch.no_grad():
        return model(IDS, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("layer", [0, 1])
def test_each_name_is_the_tensor_that_it_says(family, model, layer) -> None:
    attention, attention_norm, ffn, ffn_norm, _ = (path.format(layer) for path in MODULES[family])
    expected = [f"{ffn}:input", f"{ffn_norm}:input", f"{attention}:input", f"{attention_norm}:input"]
    for at in (layer, layer - 2):  # counted from the front and from the end
        assert [str(locate(model, f"{place}@{at}")) for place in LAYER_PLACES] == expected
    if layer == 1:
        assert [str(locate(model, place)) for place in LAYER_PLACES] == expected
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    residual = hidden_states(model)[layer]
    before = keys_at(model, f"attention_input_before_norm@{layer}")
    assert torch.equal(before, residual)
    with torch.no_grad():
        after = model.get_submodule(attention_norm)(residual)
        assert torch.equal(keys_at(model, f"attention_input@{layer}"), after)
        if family == "gpt_neox":  # in parallel: both parts read what enters the layer
            between = residual
        else:
            output = run_without_head(model, locate(model, f"{attention}:output"), IDS)[0]
            between = residual + output
        assert torch.equal(keys_at(model, f"ffn_input_before_norm@{layer}"), between)
        normed = model.get_submodule(ffn_norm)(between)
        assert torch.equal(keys_at(model, f"ffn_input@{layer}"), normed)


def test_the_final_state_before_its_norm(family, model) -> None:
    *_, norm = MODULES[family]
    assert str(locate(model, "final_hidden_before_norm")) == f"{norm}:input"
    with torch.no_grad():
        after = model.get_submodule(norm)(keys_at(model, "final_hidden_before_norm"))
    assert torch.equal(after, keys_at(model, "final_hidden"))
    assert count_layers(model) == 2


def test_a_model_that_normalises_last(make_model) -> None:
    config = deepcopy(make_model("opt").config)
    assert isinstance(config, OPTConfig)
    config.do_layer_norm_before = False  # as in OPT-350M
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    layers = "model.decoder.layers"
    assert str(locate(model, "ffn_input_before_norm")) == f"{layers}.1.self_attn_layer_norm:input"
    assert str(locate(model, "attention_input_before_norm")) == f"{layers}.0.final_layer_norm:input"
    assert str(locate(model, "final_hidden_before_norm")) == f"{layers}.1.final_layer_norm:input"
    entering = hidden_states(model)
    assert torch.equal(keys_at(model, "attention_input"), entering[1])
    with torch.no_grad():
        norm = model.get_submodule(f"{layers}.1.self_attn_layer_norm")
        between = entering[1] + run_without_head(model, locate(model, f"{layers}.1.self_attn:output"), IDS)[0]
        assert torch.equal(keys_at(model, "ffn_input"), norm(between))
    with pytest.raises(
        ConfigError, match=r"layers\.0\.self_attn:input is not the output of a layer normalization"
    ):
        locate(model, "attention_input_before_norm@0")


def test_parts_that_share_one_norm(make_model) -> None:
    model = make_model("cohere2")
    for place in LAYER_PLACES:
        side = "input_layernorm" if "before" in place else ("mlp" if "ffn" in place else "self_attn")
        assert str(locate(model, place)) == f"model.layers.1.{side}:input"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ffn_input@2", "has 2 layers, 0 to 1 or -2 to -1"),
        ("attention_input_before_norm@-3", "has 2 layers"),
        ("final_hidden@1", "leave the @1 out"),
        ("ffn_input@x", "attention_input_before_norm"),
    ],
)
def test_places_that_are_not_there_are_refused(make_model, key, message) -> None:
    with pytest.raises(ConfigError, match=message):
        locate(make_model("llama"), key)
