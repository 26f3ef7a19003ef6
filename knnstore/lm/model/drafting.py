"""Generation with drafts: tokens that followed the same words elsewhere are checked several in one pass.

At each drafted position the next token is chosen from the mixture as without drafts, greedily or by a draw.
While it equals the drafted token, the next position is known too. So greedy text is the same, and sampled
text has the same distribution; even the same random numbers make it.

Drafted tokens that were not chosen are taken back from the model's cache, as transformers' assisted decoding
does it. A cache that cannot take tokens back (static, quantized, or the state of a recurrent model) is not
drafted for.
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

_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_return_sequences": (None, 1), "use_cache": (None, True),
    "return_dict_in_generate": (None, False), "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,), "dola_layers": (None,), "use_mtp": (None, False),
    "token_healing": (None, False), "penalty_alpha": (None,), "guidance_scale": (None, 1, 1.0),
}  # fmt: skip
"""Options of `generate` with the values that they have where one text is generated token by token."""
_OTHERWISE = ("assistant_model", "custom_generate", "inputs_embeds", *CACHE_NAMES)
_CANNOT_TAKE_BACK = "the model's cache cannot take tokens back"


def why_no_drafts(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> str | None:
    """Say why `generate_with_drafts` cannot do what these arguments of `generate` ask for.

    Returns:
        The reason, or None where it can. Whether the cache can take tokens back is only known later.
    """
    config = options.get("generation_config") or model.generation_config
    prompt = next(
        (one for one in (*args[:1], options.get("inputs"), options.get("input_ids")) if one is not None), None
    )
    mask = options.get("attention_mask")
    if not isinstance(prompt, Tensor):
        return "the prompt is not given as token ids"
    if len(prompt) != 1:
        return f"{len(prompt)} texts are generated at once"
    if mask is not None and not bool(mask.all()):
        return "the prompt is padded"
    for name, plain in _PLAIN.items():
        value = options.get(name, getattr(config, name, None))
        if value not in plain:
            return f"{name} is {value}"
    for name in _OTHERWISE:
        if options.get(name) is not None:
            return f"{name} is given"
    if model.base._is_stateful:  # the flag by which transformers refuses assisted decoding
        return "the model has a recurrent state, which cannot take tokens back"
    return None


def warn_undrafted(reason: str) -> None:
    """Log why a text is generated without the drafts that were asked for."""
    _logger.warning("generating without drafts: %s", reason)


def with_drafts(
    store: KNNStore, settings: KNNSettings, tokenizer: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options of `generate` with which it generates with drafts."""
    given = dict(options)
    config = given.get("generation_config")
    streamer, tokenizer = given.get("streamer"), given.pop("tokenizer", tokenizer)
    # What transformers does not hand on to a function of ours.
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
    """Continue one text, for ``generate(custom_generate=...)``.

    Logs one line, and generates without drafts, where the cache cannot take tokens back.

    Args:
        model: the model with a store.
        input_ids: the prompt, int64, shape (1, t).
        drafts: proposes tokens.
        streamer: receives each token.
        logits_processor: as in `generate`.
        stopping_criteria: as in `generate`.
        generation_config: says whether to sample, and how long the text may be.
        **model_kwargs: what `generate` prepared for the model, among it the empty cache.

    Returns:
        The text, shape (1, t + new).
    """
    if not _may_take_back(find_cache(model_kwargs)):
        warn_undrafted(_CANNOT_TAKE_BACK)
        text: Tensor = model._sample(
            input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, streamer=streamer, **model_kwargs,
        )  # fmt: skip
        return text
    # 1) Read the prompt. Only then a cache knows its layers, and the window of a sliding layer is full.
    output = model._prefill(input_ids, generation_config, model_kwargs)
    model_kwargs = model._update_model_kwargs_for_generation(output, model_kwargs)
    cache = find_cache(output)
    cache.activate_past_recording()
    is_drafting = bool(cache.is_croppable)
    if not is_drafting:
        warn_undrafted(_CANNOT_TAKE_BACK)
    draft: list[int] = []
    is_finished = False
    while True:
        # 2) Choose tokens while they are the drafted ones, and one more.
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
        # 3) Take back the drafted tokens that were not chosen.
        if is_drafting:
            drafts.learn(len(draft), accepted)
            cache.crop(accepted - len(draft))
        model_kwargs = _extend(model, model_kwargs, accepted)
        # 4) Read the last chosen token, and a new draft.
        most = (generation_config.max_length or input_ids.shape[1] + 1) - input_ids.shape[1] - 1
        draft = drafts.propose(input_ids[0].cpu().numpy(), most).tolist() if is_drafting else []
        candidate = torch.cat([input_ids, input_ids.new_tensor([draft])], 1)
        given = _extend(model, model_kwargs, len(draft))
        if "logits_to_keep" in given:
            given["logits_to_keep"] = len(draft) + 1
        inputs = model.prepare_inputs_for_generation(
            candidate, next_sequence_length=len(draft) + 1, is_first_iteration=False, **given
        )
        output = model(**inputs, return_dict=True)
        model_kwargs = _extend(model, model_kwargs, 1)
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return input_ids


def _extend(model: Any, model_kwargs: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return the model's arguments with mask and positions for `count` >= 0 tokens more."""
    given = dict(model_kwargs)
    if count:
        given = model._update_model_kwargs_for_generation({}, given, num_new_tokens=count)
    return given


def _may_take_back(cache: Any) -> bool:
    """Check whether tokens can be taken back from a cache, as far as its layers tell before they are filled.

    A class of layers that changes how states are stored (static, quantized) must bring its own `crop`.
    """
    if not isinstance(cache, Cache) or not hasattr(cache, "activate_past_recording"):
        return False
    for layer in cache.layers:
        if isinstance(layer, StaticLayer):
            return False
        owners = [
            next((at for at, of in enumerate(type(layer).__mro__) if name in vars(of)), None)
            for name in ("crop", "update")
        ]
        if owners[0] is None or (owners[1] is not None and owners[1] < owners[0]):
            return False
    return True
