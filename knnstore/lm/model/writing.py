"""Writing text with a model and its store."""

from typing import Any, Protocol

import torch
from transformers import set_seed

from knnstore.errors import InputError
from knnstore.lm.settings import KNNModel, KNNSettings


class Generates(KNNModel, Protocol):
    """A model that writes: `KNNLMForCausalLM`."""

    def generate(self, *args: Any, knn: KNNSettings | None = None, **kwargs: Any) -> Any:
        """Write tokens as `GenerationMixin.generate` does."""


def generate_text(
    lm: Generates,
    prompt: str,
    *,
    max_new_tokens: int = 64,
    knn: KNNSettings | None = None,
    seed: int | None = None,
    **options: Any,
) -> str:
    """Continue a text.

    Args:
        lm: the model.
        prompt: the text.
        max_new_tokens: at most so many tokens.
        knn: settings of this call; default ``lm.knn``.
        seed: makes sampling repeatable.
        **options: passed on to `generate` (do_sample, temperature, top_p, num_beams, streamer, ...).

    Returns:
        The continuation alone.

    Raises:
        InputError: prompt and continuation exceed the model's window.
    """
    reader = lm.reader
    tokenizer, window = reader.tokenizer, reader.max_length
    ids = [*([] if reader.prefix is None else [reader.prefix]), *reader.tokens(prompt).tolist()]
    if len(ids) + max_new_tokens > window:
        raise InputError(
            f"the prompt has {len(ids)} tokens and {max_new_tokens} are to follow, but the window is "
            f"{window}: shorten the prompt or ask for fewer"
        )
    if not ids:
        raise InputError("the prompt is empty, and the tokenizer has no token to begin with")
    if seed is not None:
        set_seed(seed)
    inputs = torch.tensor([ids], device=reader.encoder.model.device)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options.setdefault("pad_token_id", tokenizer.eos_token_id)
    written = lm.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, knn=knn, **options
    )
    return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))
