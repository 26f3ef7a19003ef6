"""Generation with drafts (speculative decoding): one forward pass checks several drafted tokens of each text.

A draft is a sequence of tokens that followed the last tokens of the text at an earlier place: in a stored
document or in the text itself. At each drafted position the next token is chosen from the mixture as without
drafts, greedily or by sampling. As long as the chosen token equals the drafted token, the logits of the next
position are valid. So greedy text is the same as without drafts, and sampled text has the same distribution.
The sampled text of a single prompt also uses the same random numbers.

In a batch, more draft tokens of one text may be accepted than of another. The columns that a text does not
use are gaps in the model's cache, which the attention mask hides, until there are many and they are closed.
A text that has ended leaves the cache.

Rejected tokens are removed from the model's cache, as in assisted decoding of transformers. If a cache does
not support this (static, quantized, or the state of a recurrent model), text is generated without drafts.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation.streamers import BaseStreamer

from knnstore.lm.drafts import Drafts, estimate_pass_costs, limit_drafts, propose_together
from knnstore.lm.model.text_layer import get_cached_texts
from knnstore.lm.reading import CACHE_NAMES, allows_gaps, copy_without_gaps, find_cache
from knnstore.lm.settings import KNNSettings
from knnstore.store import KNNStore

_logger = logging.getLogger(__name__)

_SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "return_dict_in_generate": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "dola_layers": (None,),
    "use_mtp": (None, False),
    "token_healing": (None, False),
    "penalty_alpha": (None,),
    "guidance_scale": (None, 1, 1.0),
}
"""Options of `generate`, each with the values that drafts support: one token at a time, no beams."""
_UNSUPPORTED_OPTIONS = ("assistant_model", "custom_generate", "inputs_embeds", *CACHE_NAMES)
"""Options of `generate` that drafts support only if they are None."""
_UNSUPPORTED_IN_BATCHES = (
    "streamer", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "watermarking_config"
)  # fmt: skip
"""Options of `generate` that drafts of several texts support only if they are None, because they see all
texts after each token. In a batch, some texts are longer than others."""
_SUPPORTED_VALUES_IN_BATCHES: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1, 1.0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
}
"""Options of `generate` whose logits processors hold a tensor with a row for each text, so that they cannot
process one text of a batch; each with the values that switch the processor off."""
_MAX_FREE_COLUMNS = 64
"""The cache of a batch has fewer columns (token positions) in excess of the longest text; with as many, all
gaps are closed."""
_NOT_CROPPABLE = "the model's cache cannot remove tokens"


def find_reason_against_drafts(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """Return the reason why drafts cannot be used with these arguments of `generate`; None if they can.

    A draft is a guess of several next tokens, which the model checks in one forward pass. The reason is a few
    words for a warning. The KV cache is not checked here, because it does not exist yet;
    `generate_with_drafts` checks it.

    Args:
        model: the model with a store.
        args: positional arguments of `generate`.
        options: keyword arguments of `generate`.
    """
    if model.key_encoder.reads_source:
        return "the model is an encoder-decoder model"
    config = options.get("generation_config") or model.generation_config
    prompt = next(
        (
            value
            for value in (*args[:1], options.get("inputs"), options.get("input_ids"))
            if value is not None
        ),
        None,
    )
    mask = options.get("attention_mask")
    if not isinstance(prompt, Tensor):
        return "the prompt is not given as token ids"
    is_padded = mask is not None and not bool(mask.all())
    if (len(prompt) != 1 or is_padded) and not allows_gaps(model.base):
        return "the model's attention counts the columns of its cache, which padding and several texts change"
    if mask is not None and not bool(mask[:, -1].all()):
        return "the prompt is padded on the right"
    in_batches = _SUPPORTED_VALUES_IN_BATCHES if len(prompt) > 1 else {}
    for name, supported in {**_SUPPORTED_VALUES, **in_batches}.items():
        value = options.get(name, getattr(config, name, None))
        if value not in supported:
            return f"{name} is {value}"
    for name in (*_UNSUPPORTED_OPTIONS, *(_UNSUPPORTED_IN_BATCHES if len(prompt) > 1 else ())):
        if options.get(name, getattr(config, name, None)) is not None:
            return f"{name} is given"
    if model.base._is_stateful:  # transformers refuses assisted decoding by this flag
        return "the model has a recurrent state, from which tokens cannot be removed"
    return None


def warn_no_drafts(reason: str) -> None:
    """Log a warning that a text is generated without drafts, with the reason."""
    _logger.warning("generating without drafts: %s", reason)


def enable_drafts(
    store: KNNStore, settings: KNNSettings, tokenizer: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a copy of the options of `generate` that makes `generate` use drafts.

    With the returned options, `generate` calls `generate_with_drafts`. Stop strings in the options or in the
    generation configuration become a stopping criterion. `options` and its generation configuration are not
    changed.

    Args:
        store: the store; drafts are copied from its texts.
        settings: the retrieval settings of the call.
        tokenizer: tokenizer for stop strings, used if the options have no tokenizer.
        options: keyword arguments of `generate`.
    """
    given = dict(options)
    config = given.get("generation_config")
    streamer, tokenizer = given.get("streamer"), given.pop("tokenizer", tokenizer)
    # transformers does not pass stop strings to a custom function, so they become a stopping criterion.
    stop = given.pop("stop_strings", None) or getattr(config, "stop_strings", None)
    if stop is not None:
        criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
        given["stopping_criteria"] = [*criteria, StopStringCriteria(tokenizer, stop)]
    if getattr(config, "stop_strings", None) is not None:
        given["generation_config"] = copy(config)
        given["generation_config"].stop_strings = None
    make_drafts = partial(Drafts, store, settings)
    given["custom_generate"] = partial(generate_with_drafts, make_drafts=make_drafts, streamer=streamer)
    return given


def generate_with_drafts(
    model: Any,
    input_ids: Tensor,
    *,
    make_drafts: Callable[[], Drafts],
    streamer: BaseStreamer | None,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Tensor:
    """Generate texts: each forward pass checks a draft of each text, a guess of several next tokens.

    Used as ``generate(custom_generate=...)``.

    If the cache cannot remove tokens, logs one warning and generates without drafts.

    Args:
        model: the model with a store.
        input_ids: the prompts, padded on the left, int64, shape (b, t).
        make_drafts: function that returns a new object for each text. It proposes tokens, and it learns from
            the number of accepted tokens how many to propose.
        streamer: the object that receives each generated token on the CPU, and the end of the text; None for
            no streaming.
        logits_processor: the logits processors that `generate` of transformers has prepared.
        stopping_criteria: the stopping criteria that `generate` of transformers has prepared.
        generation_config: the options of `generate`, with the sampling mode (`do_sample`) and the largest
            length of the text.
        **model_kwargs: arguments for the model that `generate` prepared, with the empty cache.

    Returns:
        Prompts and continuations, padded on the right, int64, shape (b, t + new).
    """
    if not _may_remove_tokens(find_cache(model_kwargs)):
        warn_no_drafts(_NOT_CROPPABLE)
        text: Tensor = model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            **model_kwargs,
        )
        return text
    if len(input_ids) > 1:  # the texts will have gaps, which mask and positions must tell
        mask = model_kwargs.get("attention_mask")
        model_kwargs["attention_mask"] = mask = torch.ones_like(input_ids) if mask is None else mask
        if model_kwargs.get("position_ids") is None:
            model_kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    # 1) Prefill. Only then does the cache have layers, and is the window of a sliding layer full.
    output = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(output, model_kwargs)
    model_kwargs.pop("ends", None)  # texts that have ended leave the batch
    cache = find_cache(output)
    cache.activate_past_recording()
    is_drafting = bool(cache.is_croppable)
    if not is_drafting:
        warn_no_drafts(_NOT_CROPPABLE)
    texts, each = list(input_ids), [make_drafts() for _ in input_ids]
    running, drafts = list(range(len(texts))), [list[int]() for _ in texts]
    while True:
        # 2) Choose tokens of each text as long as they equal its draft, and one token more.
        longest = max(map(len, drafts))
        logits = output.logits[:, -1 - longest :].float()
        accepted, ended = [], []
        for row, index in enumerate(running):
            is_ended = False
            for count, drafted in enumerate([*drafts[row], None]):
                scores = logits_processor(texts[index][None], logits[row : row + 1, count])
                if generation_config.do_sample:
                    token = torch.multinomial(scores.softmax(-1), num_samples=1)[0]
                else:
                    token = scores.argmax(-1)
                texts[index] = torch.cat([texts[index], token.to(input_ids.device)])
                if streamer is not None:
                    streamer.put(token.cpu())  # type: ignore[no-untyped-call]
                is_ended = bool(stopping_criteria(texts[index][None], scores).all())
                if is_ended or int(token) != drafted:
                    break
            accepted.append(count)
            ended.append(is_ended)
        if all(ended):
            break
        # 3) Remove the rejected tokens from the cache, and the texts that have ended.
        if is_drafting:
            cost = estimate_pass_costs(len(running))[longest]
            for index, draft, count in zip(running, drafts, accepted, strict=True):
                each[index].learn(len(draft), count, cost)
            cache.crop(max(accepted) - longest)
            if len(running) > 1:
                states = get_cached_texts(model_kwargs) or []  # none if the settings need no text
                for state, count in zip(states, accepted, strict=False):
                    state.truncate(state.length - (max(accepted) - count))
        model_kwargs = _extend_inputs(model, model_kwargs, accepted)
        if any(ended):
            left = [row for row, is_ended in enumerate(ended) if not is_ended]
            running = [running[row] for row in left]
            model_kwargs = _select_rows(model_kwargs, cache, left, len(ended))
        if len(texts) > 1:
            model_kwargs = _close_gaps(model_kwargs, cache)
        # 4) Run the model on the last chosen token and a new draft of each text.
        drafts = [[] for _ in running]
        if is_drafting:
            known = [texts[index].cpu().numpy() for index in running]
            most = [(generation_config.max_length or len(text) + 1) - len(text) - 1 for text in known]
            if len(running) > 1:
                lengths = model_kwargs["position_ids"][:, -1].tolist()
                most = limit_drafts(model.config, lengths, most)
            proposed = propose_together([each[index] for index in running], known, most)
            drafts = [draft.tolist() for draft in proposed]
        count = 1 + max(map(len, drafts))
        # A text with a shorter draft repeats its last token: these positions are never used.
        read = [
            ([int(texts[index][-1]), *draft] + [int(texts[index][-1])] * count)[:count]
            for index, draft in zip(running, drafts, strict=True)
        ]
        given = _extend_inputs(model, model_kwargs, [count - 1] * len(running))
        if "logits_to_keep" in given:
            given["logits_to_keep"] = count
        inputs = model.prepare_inputs_for_generation(
            input_ids.new_tensor(read), next_sequence_length=count, is_first_iteration=False, **given
        )
        output = model(**inputs, return_dict=True)
        model_kwargs = _extend_inputs(model, model_kwargs, [1] * len(running))
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    padding = generation_config._pad_token_tensor
    return pad_sequence(texts, batch_first=True, padding_value=0 if padding is None else int(padding))


def _extend_inputs(model: Any, model_kwargs: Mapping[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    """Return a copy of the model's arguments, with mask and positions extended by new tokens of each text.

    All texts get as many columns as the text with most new tokens. The mask hides the columns that a text
    does not use. Its last column stays that of the next token.

    Args:
        model: the model with a store.
        model_kwargs: the arguments. Their mask ends with the column of the next token, which is not read yet.
        counts: number of new tokens of each text; if all are 0, an unchanged copy is returned.
    """
    given, most = dict(model_kwargs), max(counts)
    if most:
        given = model._update_model_kwargs_for_generation({}, given, num_new_tokens=most)
    if len(set(counts)) > 1:
        limits = torch.tensor(counts, device=given["attention_mask"].device)
        is_used = torch.arange(most, device=limits.device) < limits[:, None]
        given["attention_mask"][:, -1 - most : -1] = is_used.to(given["attention_mask"].dtype)
        given["position_ids"][:, -1] -= most - limits
    return given


def _select_rows(
    model_kwargs: Mapping[str, Any], cache: Any, rows: Sequence[int], count: int
) -> dict[str, Any]:
    """Keep only some texts of a batch: change the cache, and return a copy of the model's arguments.

    Args:
        model_kwargs: the arguments of the model.
        cache: their cache.
        rows: indices of the texts to keep.
        count: number of texts before.
    """
    cache.batch_select_indices(torch.tensor(rows))
    return {
        name: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == count else value
        for name, value in model_kwargs.items()
    }


def _close_gaps(model_kwargs: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Remove columns from a cache if it has at least `_MAX_FREE_COLUMNS` more than the longest text needs.

    Changes the cache, and returns a copy of the model's arguments.

    Args:
        model_kwargs: the arguments of the model. Their mask ends with the column of the next token, which is
            not read yet.
        cache: their cache; its layers of attention are all of the class `DynamicLayer`, see `allows_gaps`.
    """
    mask = model_kwargs["attention_mask"]
    is_token = mask[:, :-1].cpu().numpy() != 0
    lengths = is_token.sum(1)
    (rows, columns), end = is_token.shape, int(lengths.max())
    if columns - end < _MAX_FREE_COLUMNS:
        return dict(model_kwargs)
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None:
            layer.keys = copy_without_gaps(layer.keys, is_token, (rows, end), end)
            layer.values = copy_without_gaps(layer.values, is_token, (rows, end), end)
    given = {
        name: value[:, columns - end :] if isinstance(value, Tensor) and value.shape == mask.shape else value
        for name, value in model_kwargs.items()
    }
    is_kept = torch.arange(end + 1) >= end - torch.from_numpy(lengths)[:, None]
    given["attention_mask"] = is_kept.to(mask)
    return given


def _may_remove_tokens(cache: Any) -> bool:
    """Check whether an empty KV cache can probably remove tokens, by the classes of its layers.

    Returns False if a layer is static, or if a layer's class overrides `update` but not `crop` (for example a
    quantized layer). Returns False for None and for a cache of another kind, and True for a cache without
    layers.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "activate_past_recording"):
        return False
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            return False
        owners = [
            next((depth for depth, owner in enumerate(type(layer).__mro__) if name in vars(owner)), None)
            for name in ("crop", "update")
        ]
        if owners[0] is None or (owners[1] is not None and owners[1] < owners[0]):
            return False
    return True
