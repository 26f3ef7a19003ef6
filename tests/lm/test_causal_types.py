"""Every type of causal language model in transformers, built small: create, add, evaluate, generate, load."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import knnstore
from knnstore import KNNSettings
from knnstore.errors import ConfigError
from knnstore.server.engine import Engine
from knnstore.server.engine.prompts import has_first_position_zero

TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name != "knnstore"]

QUICK = ("mamba", "mixtral", "rembert")
"""Types that run with the quick tests: without attention, of experts, with heads in odd places."""

IN_CI = (
    "bamba", "bert", "deepseek_v3", "gemma4_text", "gpt_oss", "llama", "llama4_text", "minimax",
    "mistral", "opt", "phi3", "qwen3", "qwen3_next", "rwkv", "trocr", "whisper", "xlnet", "zamba2",
)  # fmt: skip
"""Types that CI runs beside these, one of each kind. The rest are `exhaustive`."""

SIZES = {
    name: size
    for size, names in {
        1: "first_k_dense_replace n_group n_shared_experts num_mtp_layers num_nextn_predict_layers "
        "num_shared_experts topk_group",
        2: "decoder_layers depth encoder_layers moe_k moe_topk n_layer n_layers num_decoder_layers "
        "num_encoder_layers num_experts_per_tok num_experts_per_token num_key_value_heads num_layers "
        "top_k_experts",
        4: "decoder_attention_heads encoder_attention_heads index_n_heads index_topk linear_num_heads "
        "linear_num_key_heads linear_num_value_heads moe_num_experts n_head n_heads n_routed_experts "
        "num_attention_heads num_experts num_heads num_local_experts rotary_dim",
        8: "global_head_dim head_dim index_head_dim kv_channels linear_head_dim linear_key_head_dim "
        "linear_value_head_dim qk_nope_head_dim qk_rope_head_dim swa_head_dim swa_v_head_dim v_head_dim",
        16: "embedding_size input_embedding_size kv_lora_rank mamba_d_head mamba_d_state o_lora_rank "
        "output_embedding_size q_lora_rank state_size",
        32: "attention_hidden_size d_model dim dim_head hidden_dim hidden_size lru_width n_embd "
        "out_hidden_size word_embed_proj_dim",
        48: "d_ff d_inner decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size intermediate_size "
        "moe_intermediate_size n_inner shared_expert_intermediate_size",
        64: "max_position_embeddings max_seq_len n_ctx n_positions",
        101: "unpadded_vocab_size vocab_size vocab_size_per_layer_input",
    }.items()
    for name in names.split()
}
"""By the name of a configuration's field, to what it is brought down."""

DECODER = {"is_decoder": True}
FOUR_HEADS = {"num_key_value_heads": 4}  # where keys and values are compressed, or no number is the default
NARROW = {"head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16}

CHANGES: dict[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        (
            "bert",
            "bert-generation",
            "big_bird",
            "camembert",
            "data2vec-text",
            "electra",
            "ernie",
            "megatron-bert",
            "rembert",
            "roberta",
            "roberta-prelayernorm",
            "roformer",
            "xlm-roberta",
            "xlm-roberta-xl",
        ),
        DECODER,
    ),
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "minicpm3",
            "sarvam_mla",
            "youtu",
        ),
        FOUR_HEADS,
    ),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), NARROW),
    "bailing_hybrid": {**FOUR_HEADS, "num_local_experts": 8, "n_group": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cpmant": {"prompt_length": 4},
    "ctrl": {"dff": 48},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {**FOUR_HEADS, "topk_method": "greedy", "num_experts_per_tok": 2},
    "dots3_note_text": {**FOUR_HEADS, "shared_experts_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "laurel_rank": 4, "hidden_size_per_layer_input": 8},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {**FOUR_HEADS, "zero_expert_num": 2, "expert_ffn_hidden_size": 48},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    "nemotron": {**FOUR_HEADS, "head_dim": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "chunk_size": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "hc_lowrank": 8,
        "split_ngram_parts": 1,
        "heads_per_ngram": 2,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {**DECODER, "axial_pos_embds": False, "attention_head_size": 8},
    "roc_bert": {**DECODER, "pronunciation_vocab_size": 8, "shape_vocab_size": 8},
    "xlm": {"emb_dim": 32, "causal": True, "embed_init_std": 0.1},
    "xlstm": {"hidden_size": 128},
    "xmod": {**DECODER, "languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "attention_hidden_size": 64,
    },
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 4, "attention_hidden_size": 64},
}
"""What else must be said for a type's configuration to be small and sound."""
CHANGES["dots3_note"] = {
    "text_config": CHANGES["dots3_note_text"],
    "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
}
CHANGES["qwen4_exp"] = {"text_config": CHANGES["qwen4_exp_text"]}

OTHER_POSITIONS = frozenset(
    ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod")
)
"""Types whose first position is 0 in transformers' `generate` and another in a plain forward pass: so what is
written has other states than what was stored, with the bare model too."""

LEFT_OUT = {
    "blt": "reads bytes in patches; its parts cannot be built small",
    "cpmant": "takes padding to be on the left",
    "emu3": "AutoModelForCausalLM does not know the configuration of its text model",
    "gemma3n": "its picture encoder needs the package timm",
    "gemma4_assistant": "drafts for another model and needs that model's states",
    "gemma4_unified_assistant": "drafts for another model and needs that model's states",
    "mllama": "AutoModelForCausalLM does not know the configuration of its text model",
    "musicgen": "writes codes of sound, several at each step",
    "musicgen_melody": "writes codes of sound, several at each step",
    "prophetnet": "its predictions depend on the length of the row, padding counted",
    "xlm": "`generate` appends a mask token to the text, and predicts from that",
    "xlnet": "reads in both directions",
}
"""Types that cannot go through it, and why."""


def shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """The values of a configuration that make it small, of those that it has."""
    fields, values = config.to_dict(), {}
    for name, value in fields.items():
        if name in config.sub_configs and getattr(config, name) is not None:
            values[name] = shrunk(getattr(config, name))
        elif name in SIZES and type(value) is int:
            values[name] = SIZES[name] if name == "vocab_size" else min(SIZES[name], value)
        elif name.startswith("forced_"):
            values[name] = None  # `generate` would end with it
        elif name.endswith("_token_id") and isinstance(value, int | list):
            values[name] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}.get(name, 3)
    # Lists with a value for each layer: one layer of each kind stays.
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return values
    of_layers = {
        name: value
        for name, value in fields.items()
        if isinstance(value, list | tuple) and len(value) == count and count > 2
    }
    kinds: dict[str, int] = {}
    for at, kind in enumerate(zip(*of_layers.values(), strict=True)):
        kinds.setdefault(repr(kind), at)
    kept = sorted(kinds.values())[:4] if len(kinds) > 1 else [0, 1]
    values |= {name: [value[at] for at in kept] for name, value in of_layers.items()}
    if "num_hidden_layers" in fields:
        values["num_hidden_layers"] = min(count, len(kept))
    return values


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with changes, which may be those of a configuration inside."""
    inside = {
        name: merged(values[name], of)
        for name, of in changes.items()
        if isinstance(of, dict) and name in values
    }
    return {**values, **changes, **inside}


def build(name: str) -> PreTrainedModel:
    """A small model of a type, its weights random but large enough that predictions depend on the text."""
    kind, changes = CONFIG_MAPPING[name], CHANGES.get(name, {})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**merged(shrunk(kind()), changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model


DOCUMENTS = {"first": "w5 w6 w7 w8 w9 w10 w11 w12", "second": "w40 w41 w42 w43 w5 w6 w50"}
NEAREST = KNNSettings(k=1, lam=1, temperature=1.0)
HALF = KNNSettings(k=2, lam=0.5, temperature=1.0)
NOTHING = KNNSettings(lam=0)


def perplexity(model: Any, tokenizer: Any, **options: Any) -> float:
    """Of both documents, each read alone in one pass."""
    losses = []
    for text in DOCUMENTS.values():
        ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            log_probs = model(ids, **options).logits.float().log_softmax(-1)
        losses.append(-log_probs[0, :-1].gather(1, ids[0, 1:, None])[:, 0])
    return float(torch.cat(losses).mean().exp())


def live_through(name: str, tokenizer: Any, folder: Any) -> None:
    """Create a store for a type of model, fill it, evaluate, generate, save, load and remove."""
    build(name).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with knnstore.create(folder / "home", folder / "model", tokenizer=tokenizer, max_length=32) as lm:
        lm.add([{"id": id, "text": text} for id, text in DOCUMENTS.items()], domain="d")
        alone, mixed = (lm.evaluate(DOCUMENTS.values(), knn) for knn in (NOTHING, HALF))
        bare = perplexity(lm.base, tokenizer)
        assert [alone.base_ppl, alone.knn_ppl, mixed.base_ppl] == pytest.approx([bare] * 3, rel=1e-3)
        assert mixed.knn_ppl == pytest.approx(perplexity(lm, tokenizer, knn=HALF), rel=1e-3)
        assert mixed.knn_ppl < bare

        prompt = torch.tensor([[0, 5, 6, 7]])
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 2}
        options["attention_mask"] = torch.ones_like(prompt)
        written = lm.base.generate(prompt, **options)
        assert torch.equal(lm.generate(prompt, knn=NOTHING, **options), written)
        continued = lm.generate(prompt, knn=NEAREST, **options)
        assert has_first_position_zero(lm.base) == (name not in OTHER_POSITIONS)
        if name not in OTHER_POSITIONS:
            assert continued.tolist() == [[0, 5, 6, 7, 8, 9, 10, 11, 12]]
        lm.save_pretrained(folder / "saved")
    with knnstore.load(folder / "home", "a", tokenizer=tokenizer) as lm:
        assert torch.equal(lm.generate(prompt, knn=NEAREST, **options), continued)
        lm.store.remove_document("first")
        assert lm.store.record_count() == 7
        assert torch.equal(lm.generate(prompt, knn=NOTHING, **options), written)


def choose_marks(name: str) -> list[pytest.MarkDecorator]:
    if name in QUICK:
        return []
    return [pytest.mark.slow] if name in IN_CI else [pytest.mark.slow, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", [pytest.param(name, marks=choose_marks(name)) for name in TYPES])
def test_every_type_of_causal_model_lives_through_it(name: str, tokenizer, tmp_path) -> None:
    if name not in LEFT_OUT:
        live_through(name, tokenizer, tmp_path)
        return
    try:
        live_through(name, tokenizer, tmp_path)
    except Exception:  # whatever form the reason takes
        return
    pytest.fail(f"{name} works: take it out of LEFT_OUT")


def test_the_lists_name_types_that_there_are() -> None:
    assert {*QUICK, *IN_CI, *CHANGES, *OTHER_POSITIONS, *LEFT_OUT} <= {*TYPES}


def test_the_server_refuses_a_model_whose_first_position_is_not_zero(tokenizer, tmp_path) -> None:
    build("roberta").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with (
        knnstore.create(tmp_path / "home", tmp_path / "model", tokenizer=tokenizer, max_length=32) as lm,
        pytest.raises(ConfigError, match="counts positions from the number of its padding token"),
    ):
        Engine(lm, lambda _: NOTHING)
