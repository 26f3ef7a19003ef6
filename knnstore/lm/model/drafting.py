"""Generation with drafts (speculative decoding): one forward pass checks several drafted tokens.

A draft is a sequence of tokens that followed the last tokens of the text at an earlier place: in a stored
document or in the text itself. At each drafted position the next token is chosen from the mixture as without
drafts, greedily or by sampling. As long as the chosen token equals the drafted token, the logits of the next
position are valid. So greedy text is the same as without drafts, and sampled text has the same distribution
and uses the same random numbers.

Rejected tokens are removed from the model's cache, as in assisted decoding of transformers. If a cache does
not support this (static, quantized, or the state of a recurrent model), text is generated without drafts.
"""

import logging
from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation.streamers import BaseStreamer

from knnstore.lm.drafts import Drafts
from knnstore.lm.reading import CACHE_NAMES, find_cache
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
"""Options of `generate`, each with the values that drafts support: one text, one token at a time."""
_UNSUPPORTED_OPTIONS = ("assistant_model", "custom_generate", "inputs_embeds", *CACHE_NAMES)
"""Options of `generate` that drafts support only if they are None."""
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
    if len(prompt) != 1:
        return f"{len(prompt)} texts are generated at once"
    if mask is not None and not bool(mask.all()):
        return "the prompt is padded"
    for name, supported in _SUPPORTED_VALUES.items():
        value = options.get(name, getattr(config, name, None))
        if value not in supported:
            return f"{name} is {value}"
    for name in _UNSUPPORTED_OPTIONS:
        if options.get(name) is not None:
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
    drafts = Drafts(store, settings)
    given["custom_generate"] = partial(generate_with_drafts, drafts=drafts, streamer=streamer)
    return given


def generate_with_drafts(
    model: Any,
    input_ids: Tensor,
    *,
    drafts: Drafts,
    streamer: BaseStreamer | None,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Tensor:
    """Generate one text: each forward pass checks a draft, a guess of several next tokens.

    Used as ``generate(custom_generate=...)``.

    If the cache cannot remove tokens, logs one warning and generates without drafts.

    Args:
        model: the model with a store.
        input_ids: the prompt, int64, shape (1, t).
        drafts: the object that proposes tokens, and that learns from the number of accepted tokens how many
            to propose.
        streamer: the object that receives each generated token on the CPU, and the end of the text; None for
            no streaming.
        logits_processor: the logits processors that `generate` of transformers has prepared.
        stopping_criteria: the stopping criteria that `generate` of transformers has prepared.
        generation_config: the options of `generate`, with the sampling mode (`do_sample`) and the largest
            length of the text.
        **model_kwargs: arguments for the model that `generate` prepared, with the empty cache.

    Returns:
        Prompt and continuation, int64, shape (1, t + new).
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
    # 1) Prefill. Only then does the cache have layers, and is the window of a sliding layer full.
    output = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(output, model_kwargs)
    cache = find_cache(output)
    cache.activate_past_recording()
    is_drafting = bool(cache.is_croppable)
    if not is_drafting:
        warn_no_drafts(_NOT_CROPPABLE)
    draft: list[int] = []
    is_finished = False
    while True:
        # 2) Choose tokens as long as they equal the draft, and one token more.
        accepted = 0
        logits = output.logits[:, -1 - len(draft) :].float()
        for drafted, predicted in zip([*draft, None], logits.unbind(1), strict=True):
            scores = logits_processor(input_ids, predicted)  # type: ignore[arg-type]
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token.to(input_ids.device)], 1)
            if streamer is not None:
                streamer.put(token[0].cpu())  # type: ignore[no-untyped-call]
            is_finished = bool(stopping_criteria(input_ids, scores).all())
            if is_finished or int(token) != drafted:
                break
            accepted += 1
        if is_finished:
            break
        # 3) Remove the rejected tokens from the cache.
        if is_drafting:
            drafts.learn(len(draft), accepted)
            cache.crop(accepted - len(draft))
        model_kwargs = _extend_inputs(model, model_kwargs, accepted)
        # 4) Run the model on the last chosen token and a new draft.
        most = (generation_config.max_length or input_ids.shape[1] + 1) - input_ids.shape[1] - 1
        draft = drafts.propose(input_ids[0].cpu().numpy(), most).tolist() if is_drafting else []
        candidate = torch.cat([input_ids, input_ids.new_tensor([draft])], 1)
        given = _extend_inputs(model, model_kwargs, len(draft))
        if "logits_to_keep" in given:
            given["logits_to_keep"] = len(draft) + 1
        inputs = model.prepare_inputs_for_generation(
            candidate, next_sequence_length=len(draft) + 1, is_first_iteration=False, **given
        )
        output = model(**inputs, return_dict=True)
        model_kwargs = _extend_inputs(model, model_kwargs, 1)
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return input_ids


def _extend_inputs(model: Any, model_kwargs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a copy of the model's arguments, with mask and positions extended by `count` tokens.

    Args:
        model: the model with a store.
        model_kwargs: the arguments.
        count: number of tokens; 0 returns an unchanged copy.
    """
    given = dict(model_kwargs)
    if count:
        given = model._update_model_kwargs_for_generation({}, given, num_new_tokens=count)
    return given


def _may_remove_tokens(cache: Any) -> bool:
    """Guess from the classes of an empty cache's layers whether the KV cache can remove tokens.

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
