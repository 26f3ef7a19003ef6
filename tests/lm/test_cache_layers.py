"""transformers carries a layer of ours through `generate`: in every kind of cache that it has.

What a text's past is needed for (joined keys, the recent-text cache, n-grams) can therefore ride in
the cache as one more layer, behind the model's own. Here the layer holds the tokens alone, so that
after each pass it can be compared with the tokens that `generate` has.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import Cache, DummyLayer

from knnstore.lm.reading import find_cache

SPECIAL: dict[str, Any] = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2}
SHAPE = {
    **SPECIAL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "attention": lambda: LlamaConfig(**SHAPE),
    "sliding window": lambda: MistralConfig(**SHAPE, sliding_window=8),
    "mixed windows": lambda: Gemma3TextConfig(
        **SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "hybrid": lambda: FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "state space": lambda: MambaConfig(**SPECIAL, hidden_size=32, num_hidden_layers=2, state_size=4),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "static": {"cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 3},
}
REFUSED = {("hybrid", "drafts"), ("state space", "drafts"), ("state space", "chunks")}
"""Where transformers itself refuses the call."""
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])


class TokensLayer(DummyLayer):
    """The tokens that each row of a batch has read."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.rows = torch.empty((batch, 0), dtype=torch.long)

    def append(self, tokens: torch.Tensor) -> None:
        self.rows = torch.cat([self.rows, tokens], 1)

    def reset(self) -> None:
        self.rows = self.rows[:, :0]

    def crop(self, tokens_to_remove: int) -> None:
        self.rows = self.rows[:, : self.rows.shape[1] - abs(tokens_to_remove)]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rows = self.rows[beam_idx]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = self.rows.repeat_interleave(repeats, 0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.rows = self.rows[indices]


def cache_in(values: Any) -> Cache | None:
    """The cache among a pass's arguments or results, under whichever name."""
    found = find_cache(values)
    return found if isinstance(found, Cache) else None


def tokens_layer(cache: Cache, batch: int) -> TokensLayer:
    """Return the layer that rides in a cache; append it after the model's own layers when it is new."""
    if not isinstance(cache.layers[-1], TokensLayer):
        cache.layers.append(TokensLayer(batch))
    return cache.layers[-1]


class Follower:
    """Lets each pass of a model append its tokens to the layer, and compares them with those generated."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes = 0
        self._forward, self._prepare = model.forward, model.prepare_inputs_for_generation
        self._generated = torch.empty(0)
        for name, method in (("forward", self.forward), ("prepare_inputs_for_generation", self.prepare)):
            method.__func__.__signature__ = inspect.signature(getattr(model, name))
            setattr(model, name, method)

    def prepare(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._generated = input_ids
        return self._prepare(input_ids, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        cache, tokens = cache_in(output), kwargs["input_ids"]
        assert cache is not None
        layer = tokens_layer(cache, len(tokens))
        layer.append(tokens)
        self.passes += 1
        length = self._generated.shape[1]  # of a prompt in chunks only the chunk
        assert torch.equal(layer.rows[:, -length:], self._generated)
        return output


def make_model(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize(
    "way", [one if one == "drafts" else pytest.param(one, marks=pytest.mark.slow) for one in WAYS]
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_layer_of_ours_follows_the_text(kind: str, way: str) -> None:
    model = make_model(kind)
    options = {"do_sample": False, "max_new_tokens": 12, **WAYS[way]}
    if (kind, way) in REFUSED:
        with pytest.raises(
            ValueError, match=r"not supported|without a cache|only be called on Attention layers"
        ):
            model.generate(PROMPT, **options)
        return
    expected = model.generate(PROMPT, **options) if not options["do_sample"] else None
    follower = Follower(model)
    found = model.generate(PROMPT, return_dict_in_generate=True, **options)
    assert follower.passes >= 3
    assert expected is None or torch.equal(found.sequences, expected)


def test_every_operation_of_a_cache_reaches_the_layer() -> None:
    model = make_model("attention")
    with torch.inference_mode():
        cache = cache_in(model(PROMPT, use_cache=True))
    tokens_layer(cache, 1).append(PROMPT)
    cache.batch_repeat_interleave(3)
    assert torch.equal(cache.layers[-1].rows, PROMPT.expand(3, -1))
    cache.layers[-1].rows = cache.layers[-1].rows + torch.tensor([[0], [10], [20]])
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.batch_select_indices(torch.tensor([1, 2]))
    cache.crop(-4)
    assert torch.equal(cache.layers[-1].rows, PROMPT[:, :-4] + torch.tensor([[20], [0]]))
    assert cache.get_seq_length() == PROMPT.shape[1] - 4
    cache.reset()
    assert cache.layers[-1].rows.shape[1] == 0
