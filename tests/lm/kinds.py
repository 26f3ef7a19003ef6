"""Tiny random models of every kind of memory: full and sliding attention, convolutions, recurrent states."""

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.lm.conftest import LLAMA, SPECIAL

WINDOW = 8
"""Tokens of the sliding windows, fewer than any text here has."""
_SIZES = {**LLAMA, "max_position_embeddings": 128}
_SLIDING = {**_SIZES, "sliding_window": WINDOW}
_HYBRID = {name: value for name, value in _SIZES.items() if name != "head_dim"}
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8
}  # fmt: skip

ATTENTION = {
    "llama": ("LlamaConfig", _SIZES),
    "mistral": ("MistralConfig", _SLIDING),
    "gemma2": ("Gemma2Config", _SLIDING),
    "gemma3": ("Gemma3TextConfig", _SLIDING),
    "cohere2": ("Cohere2Config", _SLIDING),
    "qwen2": ("Qwen2Config", {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}),
    "phi3": ("Phi3Config", _SLIDING),
    "lfm2": ("Lfm2Config", {**_SIZES, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
}
"""Models whose cache can take tokens back."""
RECURRENT = {
    "mamba": ("MambaConfig", {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "falcon_mamba": (
        "FalconMambaConfig",
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    ),
    "rwkv": (
        "RwkvConfig",
        {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32,
         "context_length": 128},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**_HYBRID, "intermediate_size": 96, "num_hidden_layers": 3, "num_key_value_heads": 1,
         "lru_width": 32, "attention_window_size": WINDOW},
    ),
    "bamba": ("BambaConfig", {**_HYBRID, **_MAMBA, "attn_layer_indices": [1], "mamba_expand": 2}),
    "falcon_h1": ("FalconH1Config", {**_SIZES, **_MAMBA, "mamba_d_ssm": 64}),
    "zamba2": (
        "Zamba2Config",
        {**_HYBRID, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "chunk_size": 8,
         "num_mem_blocks": 1, "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"],
         "use_mamba_kernels": False},
    ),
}  # fmt: skip
"""Models with a recurrent state, which cannot."""


def make_kind(name: str) -> PreTrainedModel:
    """Build a model; the same weights each time, large enough that predictions depend on the context."""
    config, sizes = {**ATTENTION, **RECURRENT}[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in path and "A_log" not in path:
                parameter.normal_(std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


def phrases(count: int, seed: int) -> list[int]:
    """Return some of ten phrases of six tokens one after another: what is stored comes again."""
    every = np.random.default_rng(3).integers(4, 101, (10, 6))
    return every[np.random.default_rng(seed).integers(0, 10, count)].flatten().tolist()


def words(tokens: list[int]) -> str:
    """Return the text that the tests' tokenizer reads as these tokens."""
    return " ".join(f"w{token}" for token in tokens)
