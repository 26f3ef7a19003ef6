"""Texts that are given: read part by part, and scored without a distribution for each position."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knnstore.lm.keys import KeyCapture
from knnstore.lm.mixing import Likelihoods
from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.reading import as_cache_argument, check_logits
from knnstore.lm.settings import KNNSettings
from knnstore.lm.text_state import TextState


def read_part(
    lm: KNNLMForCausalLM,
    tokens: Tensor,
    past: Any,
    text: TextState,
    knn: KNNSettings,
    *,
    logits_to_keep: int = 0,
) -> ForwardPass:
    """Let the model read on in a text, retrieving nothing.

    Args:
        lm: the model.
        tokens: all tokens up to the last that is to be read, int64, shape (1, n).
        past: the cache of attention, which is lengthened.
        text: the state of the text that belongs to the cache; it is lengthened as well.
        knn: with which the text is scored or continued.
        logits_to_keep: of how many of the last positions; 0 is all.
    """
    read, knn = int(past.get_seq_length()), lm.resolve_settings(knn)
    with torch.inference_mode():
        with KeyCapture(lm.base, lm.encoder.location) as capture:
            output = lm.base(
                input_ids=tokens[:, read:], attention_mask=torch.ones_like(tokens), use_cache=True,
                logits_to_keep=logits_to_keep, **as_cache_argument(lm.base, past),
            )  # fmt: skip
        check_logits(lm.base, output.logits)
        states = capture.keys(1, tokens.shape[1] - read)
        keys, batch = lm.extend_texts([text], tokens[:, read:], states, None)
        return ForwardPass(output.logits, keys, None, batch, logits_to_keep, lm.prefix_for([knn]))


def following(lm: KNNLMForCausalLM, part: ForwardPass, knn: KNNSettings) -> Tensor:
    """Say what comes after a part of a text: log p of the mixture, float32, shape (v,)."""
    last = replace(part, logits=part.logits[:, -1:], logits_to_keep=1)
    with torch.inference_mode():
        mixed: Tensor = lm._mixer.mix(last, [lm.resolve_settings(knn)])
    return mixed[0, -1].float().log_softmax(-1)


def likelihoods(
    lm: KNNLMForCausalLM, parts: Sequence[ForwardPass], gold: Sequence[Tensor], knn: KNNSettings, count: int
) -> list[Likelihoods]:
    """Say what the mixture gives to the tokens that came, and to the likeliest; one search is for all parts.

    Args:
        lm: the model.
        parts: of texts, from `read_part`, each with its logits at all positions.
        gold: what came after each position of each, int64, shapes (t_i,).
        knn: for all of them.
        count: of the likeliest tokens, at most the whole vocabulary.

    Returns:
        Of each part, on the processor.
    """
    with torch.inference_mode():
        found = lm._mixer.likelihoods(parts, torch.cat([*gold]), lm.resolve_settings(knn), count)
    lengths = [len(one) for one in gold]
    columns = (torch.split(column.cpu(), lengths) for column in found)
    return [Likelihoods(*one) for one in zip(*columns, strict=True)]
