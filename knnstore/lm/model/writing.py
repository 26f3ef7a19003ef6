"""Writing text with a model and its store."""

from collections.abc import Sequence
from copy import copy
from typing import Any, overload

import torch
from transformers import GenerationConfig, set_seed

from knnstore.errors import InputError
from knnstore.lm.settings import KNNSettings, WritingModel


@overload
def generate_text(
    lm: WritingModel, prompt: str, max_new_tokens: int = ..., *, knn: KNNSettings | None = ..., **options: Any
) -> str: ...


@overload
def generate_text(
    lm: WritingModel,
    prompt: Sequence[str],
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    **options: Any,
) -> list[str]: ...


def generate_text(
    lm: WritingModel,
    prompt: str | Sequence[str],
    max_new_tokens: int = 64,
    *,
    knn: KNNSettings | None = None,
    seed: int | None = None,
    **options: Any,
) -> str | list[str]:
    """Continue a text, or several, one after another.

    Args:
        lm: the model.
        prompt: the text, or a list of texts.
        max_new_tokens: at most so many tokens.
        knn: settings of this call, but for what counts in scoring only; default ``lm.knn``.
        seed: makes sampling repeatable.
        **options: passed on to `generate` (do_sample, temperature, top_p, num_beams, streamer, ...).

    Returns:
        The continuation alone; of a list of texts a list.

    Raises:
        InputError: prompt and continuation exceed the model's window.
    """
    if seed is not None:
        set_seed(seed)
    if isinstance(prompt, str):
        return _continued(lm, prompt, max_new_tokens, knn, options)
    return [_continued(lm, one, max_new_tokens, knn, dict(options)) for one in prompt]


def _continued(
    lm: WritingModel, prompt: str, max_new_tokens: int, knn: KNNSettings | None, options: dict[str, Any]
) -> str:
    if not isinstance(prompt, str):
        raise InputError(f"a prompt is a string, not {type(prompt).__name__}")
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
    inputs = torch.tensor([ids], device=reader.encoder.model.device)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options.setdefault("pad_token_id", tokenizer.eos_token_id)
    written = lm.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, knn=knn, **options
    )
    return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))


def with_cache(config: GenerationConfig) -> GenerationConfig:
    """The same with a cache of attention, which training often switches off in a model's files.

    Without it a text is read anew for every token, and nothing is drafted.
    """
    if config.use_cache is not False:  # None is what transformers takes for True
        return config
    config = copy(config)
    config.use_cache = True
    return config
