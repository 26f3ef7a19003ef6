"""Making a store that fails, in whatever way, leaves nothing; and models in GGUF files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

import knnstore
from knnstore import KNNLMForCausalLM
from knnstore.errors import ConfigError
from knnstore.model_names import split_gguf_file


def everything_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mode for path in folder.rglob("*")}


class BrokenLayer(torch.nn.Module):
    def forward(self, *_, **__):
        raise RuntimeError("a layer that does not work\nwith details")


def stop(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("there", [False, True], ids=["no folder", "an empty folder"])
@pytest.mark.parametrize("failure", ["head", "key", "codes", "probe", "folder", "interrupted", "at the end"])
def test_a_store_that_cannot_be_made_leaves_nothing(
    make_model, tokenizer, tmp_path, monkeypatch, failure, there
) -> None:
    home, base, options = tmp_path / "a" / "b" / "home", make_model("llama"), {}
    if there:
        home.mkdir(parents=True, mode=0o750)
    (tmp_path / "empty").mkdir()
    before, error, match = everything_in(tmp_path), ConfigError, None
    if failure == "head":
        base, match = base.model, "does not predict text|cannot read text"
    elif failure == "key":
        options, match = {"key": "model.layers.9"}, "no module"
    elif failure == "codes":
        options, match = {"params": {"codes": "zip"}}, "zip"
    elif failure == "probe":
        base.model.layers[1].mlp = BrokenLayer()
        match = "cannot read text: LlamaForCausalLM fails on three tokens: a layer that does not work$"
    elif failure == "folder":
        base, match = str(tmp_path / "empty"), "this folder has no config.json"
    elif failure == "interrupted":
        error = KeyboardInterrupt
        base.model.layers[1].mlp.forward = stop
    else:
        error = KeyboardInterrupt
        monkeypatch.setattr(KNNLMForCausalLM, "from_base", stop)
    given = {} if failure == "folder" else {"tokenizer": tokenizer}
    with pytest.raises(error, match=match):
        knnstore.create(home, base, **given, **options)
    assert everything_in(tmp_path) == before
    monkeypatch.undo()
    with knnstore.create(home, make_model("llama"), tokenizer=tokenizer) as lm:
        assert lm.store.record_count() == 0


def test_a_model_that_looks_ahead_is_named(tokenizer, tmp_path, caplog) -> None:
    shape = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    for is_decoder in (False, True):
        torch.manual_seed(0)
        base = BertLMHeadModel(BertConfig(**shape, intermediate_size=48, is_decoder=is_decoder)).eval()
        with torch.no_grad():
            for weight in base.parameters():
                if weight.ndim >= 2:
                    weight.normal_(std=0.2)
        caplog.clear()
        knnstore.create(tmp_path / str(is_decoder), base, tokenizer=tokenizer, max_length=32).store.close()
        said = [record.message for record in caplog.records if record.name.startswith("knnstore")]
        assert any("looks at later tokens" in line for line in said) is not is_decoder


def write_gguf(path: Path) -> None:
    """Write a tiny Llama with random weights, and a vocabulary of letters and some words."""
    gguf = pytest.importorskip("gguf")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [f"▁{letter}" for letter in "abcdefghij"] + list("abcdefghij") + ["▁"]
    sizes = LlamaConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    weights = LlamaForCausalLM(sizes).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(at) for at in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 21])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        **{
            f"model.layers.{at}.{ours}": f"blk.{at}.{theirs}"
            for at in range(2)
            for ours, theirs in {
                "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
                "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
                "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
                "post_attention_layernorm": "ffn_norm",
            }.items()
        },
    }  # fmt: skip
    for name, value in weights.items():
        writer.add_tensor(f"{names[name.removesuffix('.weight')]}.weight", value.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
def test_a_model_in_a_gguf_file_is_found_again(tmp_path, monkeypatch) -> None:
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    write_gguf(file)
    monkeypatch.chdir(tmp_path)
    for number, (model, options) in enumerate(
        ((str(file), {}), ("models/tiny.gguf", {}), ("models", {"gguf_file": "tiny.gguf"}))
    ):
        home = tmp_path / f"home{number}"
        with knnstore.create(home, model, **options) as lm:
            assert lm.store.identity.model == str(file)
            lm.add(["a b c d e f g h"], domain="d")
            text = lm.generate_text("a b c", 3)
            lm.save_pretrained(tmp_path / f"saved{number}")
        with knnstore.load(home) as lm:
            assert lm.generate_text("a b c", 3) == text
        with KNNLMForCausalLM.from_pretrained(tmp_path / f"saved{number}") as lm:
            assert lm.base.name_or_path == str(file)
    with pytest.raises(ConfigError, match=r"this folder has no other\.gguf"):
        knnstore.create(tmp_path / "new", "models/other.gguf")
    assert split_gguf_file("org/repo/q4/a.GGUF") == ("org/repo", "q4/a.GGUF")
    assert split_gguf_file("org/repo") == ("org/repo", None)
