"""Generating text with a model and its store (`generate_text`)."""

from collections.abc import Sequence
from copy import copy
from typing import Any, overload

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, set_seed

from knnstore.errors import InputError
from knnstore.lm.reading import Detokenizer, TokenTexts
from knnstore.lm.settings import GeneratingModel, KNNSettings


@overload
def generate_text(
    lm: GeneratingModel,
    prompt: str,
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: None = ...,
    **options: Any,
) -> str: ...


@overload
def generate_text(
    lm: GeneratingModel,
    prompt: Sequence[str],
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: None = ...,
    **options: Any,
) -> list[str]: ...


@overload
def generate_text(
    lm: GeneratingModel,
    prompt: str | Sequence[str],
    max_new_tokens: int = ...,
    *,
    knn: KNNSettings | None = ...,
    num_return_sequences: int,
    **options: Any,
) -> Any: ...


def generate_text(
    lm: GeneratingModel,
    prompt: str | Sequence[str],
    max_new_tokens: int = 64,
    *,
    knn: KNNSettings | None = None,
    seed: int | None = None,
    num_return_sequences: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Generate the continuation of a prompt, or of several prompts one after another.

    An encoder-decoder model reads the prompt as the source, and generates for example its translation.

    Args:
        lm: the model with a store.
        prompt: a text, or a list of texts.
        max_new_tokens: largest number of tokens in a continuation.
        knn: settings of this call; default ``lm.knn``. Unset fields get their values for generation.
        seed: random seed, set before sampling for repeatable results; None sets no seed.
        num_return_sequences: number of continuations of each prompt; None leaves the number to the
            generation configuration. More than one continuation needs ``do_sample=True`` or at least as many
            beams.
        stop_strings: strings that end a continuation. Generation stops after the token that completes one of
            them; the string may begin and end inside tokens. The continuation contains the string and the
            rest of this token, as with `generate` of transformers.
        **options: passed on to `generate` (do_sample, temperature, top_p, num_beams, streamer, ...).

    Returns:
        The continuation: the decoded text of all tokens without the decoded prompt. Special tokens are left
        out, and spaces are not cleaned up. If `num_return_sequences` is above 1, a list of continuations. If
        `prompt` is a list, a list with the result for each prompt.

    Raises:
        InputError: prompt and continuation exceed the model's window, a prompt is empty and the tokenizer has
            no prefix, a source is empty or too long, or a stop string is empty.
    """
    if seed is not None:
        set_seed(seed)
    if num_return_sequences is not None:
        options["num_return_sequences"] = num_return_sequences
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise InputError("stop_strings must be strings that are not empty")
    if isinstance(prompt, str):
        return _continue_text(lm, prompt, max_new_tokens, knn, stops, options)
    return [_continue_text(lm, text, max_new_tokens, knn, stops, dict(options)) for text in prompt]


def _continue_text(
    lm: GeneratingModel,
    prompt: str,
    max_new_tokens: int,
    knn: KNNSettings | None,
    stops: list[str],
    options: dict[str, Any],
) -> str | list[str]:
    """Generate one or several continuations of one prompt.

    Also changes `options`: adds the padding token, the tokenizer and a stopping criterion for `stops`.

    Args:
        lm: the model with a store.
        prompt: the text to continue.
        max_new_tokens: largest number of tokens in a continuation.
        knn: settings of this call; None uses ``lm.knn``.
        stops: strings after which a continuation ends; empty for none.
        options: arguments for `generate`, changed by this call.

    Returns:
        The continuation without the prompt; a list if there are several.
    """
    # 1) Tokenize the prompt, and check its length.
    if not isinstance(prompt, str):
        raise InputError(f"a prompt is a string, not {type(prompt).__name__}")
    reader = lm.reader
    tokenizer, window = reader.tokenizer, reader.max_length
    # `read` is what the model reads. Generated rows begin with `begun`, and their text continues `before`.
    before: Sequence[int]
    if reader.reads_pairs:
        if not prompt.strip():
            raise InputError("the source is empty")
        read = reader.document_tokenizer.tokenize_sources([prompt])[0].tolist()
        begun, before = reader.prefix[:1], ()
    else:
        read = [*reader.prefix, *reader.tokenize(prompt).tolist()]
        begun = before = tuple(read)
    if len(begun) + max_new_tokens > window:
        raise InputError(
            f"a text has at most {window - len(begun)} tokens, but {max_new_tokens} are requested: ask "
            "for fewer"
            if reader.reads_pairs
            else f"the prompt has {len(begun)} tokens and {max_new_tokens} are to be generated, but the "
            f"window has {window} tokens: shorten the prompt or generate fewer"
        )
    if not read:
        raise InputError("the prompt is empty, and the tokenizer has no token to begin with")
    # 2) Set the padding token, the tokenizer and the stop strings, and generate.
    inputs = torch.tensor([read], device=reader.encoder.model.device)
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        options.setdefault("pad_token_id", tokenizer.eos_token_id)
    config = options.get("generation_config") or lm.generation_config
    if getattr(config, "stop_strings", None):
        options.setdefault("tokenizer", tokenizer)
    texts = TokenTexts(tokenizer)
    if stops:
        criteria = options.get("stopping_criteria") or []
        options["stopping_criteria"] = [*criteria, _StopStrings(texts, before, len(begun), stops)]
    output = lm.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max_new_tokens, knn=knn, **options
    )
    # 3) Remove prompt and padding, and decode.
    rows = output if isinstance(output, Tensor) else output.sequences
    eos = options.get("eos_token_id", config.eos_token_id)
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    pad = options.get("pad_token_id", tokenizer.pad_token_id)
    continuations = rows[:, len(begun) :].tolist()
    if len(continuations) == 1:
        return decode_continuation(texts, before, continuations[0])
    return [decode_continuation(texts, before, _remove_padding(row, ends, pad)) for row in continuations]


def decode_continuation(texts: TokenTexts, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text of a continuation, without special tokens: the joined pieces that streaming returns.

    Args:
        texts: the texts of the tokens.
        prompt: tokens before the continuation. They decide whether the continuation begins with a space.
        tokens: tokens of the continuation.
    """
    detokenizer = Detokenizer(texts, prompt)
    pieces = [piece for token in tokens for piece in detokenizer.append_token(token)]
    return "".join(piece.text for piece in (*pieces, *detokenizer.end()))


def _remove_padding(tokens: list[int], ends: set[int], pad: int | None) -> list[int]:
    """Return the generated tokens of a row without the padding after them.

    The row is cut after its first EOS token. If it has no EOS token, padding tokens at the end are removed.

    Args:
        tokens: the generated tokens of a row.
        ends: ids of the EOS tokens.
        pad: id of the padding token; None for no padding token.
    """
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    length = len(tokens)
    while length and tokens[length - 1] == pad:
        length -= 1
    return tokens[:length]


class _StopStrings(StoppingCriteria):
    """Stopping criterion that ends a row when its continuation contains a stop string.

    The criterion of transformers compares single tokens, so it does not recognize a character that spans
    several tokens.
    """

    def __init__(self, texts: TokenTexts, before: Sequence[int], length: int, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(texts, before)
        self._length = length
        self._stops = stops

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        """Check for each row whether its continuation contains a stop string.

        Returns bool, shape (b,), on the device of `input_ids`.
        """
        continuations = (self._detokenizer.peek(row) for row in input_ids[:, self._length :].tolist())
        ended = [any(stop in text for stop in self._stops) for text in continuations]
        return torch.tensor(ended, device=input_ids.device)


def enable_cache(config: GenerationConfig) -> GenerationConfig:
    """Return the configuration itself if it enables the KV cache, else a copy with the cache enabled.

    The cache is also enabled if `use_cache` is None.

    Training often disables the cache in a model's files. Without the cache every decoding step processes the
    whole text again, and drafts are not possible.
    """
    if config.use_cache is not False:  # transformers treats None as True
        return config
    config = copy(config)
    config.use_cache = True
    return config
