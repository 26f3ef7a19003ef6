"""Generating text with a model and its store."""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, overload

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, set_seed

from knnstore.errors import InputError
from knnstore.lm.reading import Detokenizer, TokenTexts
from knnstore.lm.settings import KNNSettings, WritingModel


@overload
def generate_text(
    lm: WritingModel,
    prompt: str,
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: None = ...,
    **options: Any,
) -> str: ...


@overload
def generate_text(
    lm: WritingModel,
    prompt: Sequence[str],
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: None = ...,
    **options: Any,
) -> list[str]: ...


@overload
def generate_text(
    lm: WritingModel,
    prompt: str | Sequence[str],
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: int,
    **options: Any,
) -> Any: ...


def generate_text(
    lm: WritingModel,
    prompt: str | Sequence[str],
    max_new_tokens: int = 64,
    *,
    knn: KNNSettings | None = None,
    seed: int | None = None,
    num_return_sequences: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Continue a text, or several, one after another.

    Args:
        lm: the model.
        prompt: the text, or a list of texts.
        max_new_tokens: at most so many tokens.
        knn: settings of this call, but for what counts in scoring only; default ``lm.knn``.
        seed: makes sampling repeatable.
        num_return_sequences: how many continuations of each prompt to return; more than one need
            ``do_sample=True`` or as many beams.
        stop_strings: end a continuation after the token that completes one of these strings, wherever
            tokens begin and end. The string, and whatever else that token adds, are part of the continuation,
            as with `generate` of transformers.
        **options: passed on to `generate` (do_sample, temperature, top_p, num_beams, streamer, ...).

    Returns:
        The continuation: exactly what decoding all tokens adds to decoding the prompt's, special tokens left
        out and spaces not cleaned up. A list of continuations if more than one is asked for. For a list of
        prompts a list with this for each prompt.

    Raises:
        InputError: prompt and continuation exceed the model's window, or a stop string is empty.
    """
    if seed is not None:
        set_seed(seed)
    if num_return_sequences is not None:
        options["num_return_sequences"] = num_return_sequences
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError("stop_strings are strings that are not empty")
    if isinstance(prompt, str):
        return _continue_text(lm, prompt, max_new_tokens, knn, stops, options)
    return [_continue_text(lm, one, max_new_tokens, knn, stops, dict(options)) for one in prompt]


def _continue_text(
    lm: WritingModel,
    prompt: str,
    max_new_tokens: int,
    knn: KNNSettings | None,
    stops: list[str],
    options: dict[str, Any],
) -> str | list[str]:
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
    config = options.get("generation_config") or lm.generation_config
    if getattr(config, "stop_strings", None):
        options.setdefault("tokenizer", tokenizer)
    texts = TokenTexts(tokenizer)
    if stops:
        criteria = options.get("stopping_criteria") or []
        options["stopping_criteria"] = [*criteria, _StopStrings(texts, ids, stops)]
    output = lm.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, knn=knn, **options
    )
    rows = output if isinstance(output, Tensor) else output.sequences
    named = options.get("eos_token_id", config.eos_token_id)
    ends = {named} if isinstance(named, int) else set(named or ())
    pad = options.get("pad_token_id", tokenizer.pad_token_id)
    written = rows[:, len(ids) :].tolist()
    if len(written) == 1:
        return "".join(_pieces(texts, ids, written[0]))
    return ["".join(_pieces(texts, ids, _without_padding(row, ends, pad))) for row in written]


def _pieces(texts: TokenTexts, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[str]:
    """Yield the text of a continuation in the pieces in which a stream gives it."""
    detokenizer = Detokenizer(texts, prompt)
    for token in tokens:
        yield from (piece.text for piece in detokenizer.take(token))
    yield from (piece.text for piece in detokenizer.end())


def _without_padding(tokens: list[int], ends: set[int], pad: int | None) -> list[int]:
    """Cut off what follows the token that ends a row, or the padding where a stop string ended it."""
    for at, token in enumerate(tokens):
        if token in ends:
            return tokens[: at + 1]
    length = len(tokens)
    while length and tokens[length - 1] == pad:
        length -= 1
    return tokens[:length]


class _StopStrings(StoppingCriteria):
    """Ends a row when its continuation contains one of some strings.

    transformers' own criterion compares tokens one by one, and never sees a character of several tokens.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(texts, prompt)
        self._length = len(prompt)
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        """Return whether each row has ended, shape (b,)."""
        written = (self._detokenizer.peek(row) for row in input_ids[:, self._length :].tolist())
        ended = [any(stop in text for stop in self._stops) for text in written]
        return torch.tensor(ended, device=input_ids.device)


def with_cache(config: GenerationConfig) -> GenerationConfig:
    """The same with a cache of attention, which training often switches off in a model's files.

    Without it a text is read anew for every token, and nothing is drafted.
    """
    if config.use_cache is not False:  # None is what transformers takes for True
        return config
    config = copy(config)
    config.use_cache = True
    return config
