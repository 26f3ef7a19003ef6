"""Writing with drafts: tokens that stood after the same words elsewhere are checked several in one pass.

At each drafted position the next token is chosen from the mixture as without drafts, greedily or by a draw;
while it is the drafted one, the next position is known too. So greedy text is the same, and sampled text has
the same distribution; even the same random numbers make it.
"""

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from knnstore.lm.retrieval import Drafts
from knnstore.lm.settings import KNNSettings
from knnstore.store import KNNStore

_PLAIN: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1), "num_return_sequences": (None, 1), "use_cache": (None, True),
    "return_dict_in_generate": (None, False), "prompt_lookup_num_tokens": (None,),
    "cache_implementation": (None,), "penalty_alpha": (None,), "guidance_scale": (None, 1, 1.0),
}  # fmt: skip
"""Options of `generate` as they are where one text is written token by token."""
_OTHERWISE = ("assistant_model", "custom_generate", "inputs_embeds", "past_key_values")


def can_draft(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Whether `write_with_drafts` can do what `generate` is asked for with these arguments."""
    config = options.get("generation_config") or model.generation_config
    prompt = next(
        (one for one in (*args[:1], options.get("inputs"), options.get("input_ids")) if one is not None), None
    )
    mask = options.get("attention_mask")
    asked = {name: options.get(name, getattr(config, name, None)) for name in _PLAIN}
    return (
        isinstance(prompt, Tensor)
        and len(prompt) == 1
        and (mask is None or bool(mask.all()))
        and all(value in plain for (_, plain), value in zip(_PLAIN.items(), asked.values(), strict=True))
        and not any(options.get(name) is not None for name in _OTHERWISE)
        and not getattr(model.base, "_is_stateful", False)
    )


def with_drafts(
    store: KNNStore, settings: KNNSettings, tokenizer: Any, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of `generate` with which it writes with drafts."""
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
    given["custom_generate"] = partial(write_with_drafts, drafts=drafts, streamer=streamer)
    return given


class Drafting(Protocol):
    """A model that writes with drafts."""

    def __call__(self, **inputs: Any) -> Any:
        """Run one pass; see `KNNLMForCausalLM.forward`."""


def write_with_drafts(
    model: Drafting,
    input_ids: Tensor,
    *,
    drafts: Drafts,
    streamer: BaseStreamer | None,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    past_key_values: Any,
    **inputs: Any,
) -> Tensor:
    """Continue one text, for ``generate(custom_generate=...)``.

    Args:
        model: that writes.
        input_ids: the prompt, int64, shape (1, t).
        drafts: proposes tokens.
        streamer: is told of each token.
        logits_processor: as in `generate`.
        stopping_criteria: likewise.
        generation_config: says whether to sample, and how long the text may be.
        past_key_values: the cache, empty, that can be cut.
        **inputs: of `forward`; of these `knn` and `pointer_states` are passed on.

    Returns:
        The text, shape (1, t + new).
    """
    passed_on = {name: inputs.get(name) for name in ("knn", "pointer_states")}
    read, is_written = 0, False
    while not is_written:
        length = input_ids.shape[1]
        most = (generation_config.max_length or length + 1) - length - 1
        draft = torch.from_numpy(drafts.propose(input_ids[0].cpu().numpy(), most))
        candidate = torch.cat([input_ids, draft.to(input_ids.device)[None]], 1)
        output = model(
            input_ids=candidate[:, read:], attention_mask=torch.ones_like(candidate), sequence_ids=candidate,
            past_key_values=past_key_values, use_cache=True, logits_to_keep=len(draft) + 1, **passed_on,
        )  # fmt: skip
        accepted = 0
        for drafted, logits in zip([*draft.tolist(), None], output.logits.float().unbind(1), strict=True):
            scores = logits_processor(input_ids, logits)  # type: ignore[arg-type]
            if generation_config.do_sample:
                token = torch.multinomial(scores.softmax(-1), num_samples=1)
            else:
                token = scores.argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token.to(input_ids.device)], 1)
            if streamer is not None:
                streamer.put(token[0].cpu())  # type: ignore[no-untyped-call]
            is_written = bool(stopping_criteria(input_ids, scores).all())
            if is_written or int(token) != drafted:
                break
            accepted += 1
        drafts.learn(len(draft), accepted)
        read = input_ids.shape[1] - 1
        past_key_values = output.past_key_values
        if candidate.shape[1] > read:
            past_key_values.crop(read - candidate.shape[1])
    if streamer is not None:
        streamer.end()  # type: ignore[no-untyped-call]
    return input_ids
