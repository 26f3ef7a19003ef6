"""Prefilling and scoring of existing texts, in chunks (`read_part`, `predict_next`, `score_targets`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knnstore.lm.keys import KeyCapture
from knnstore.lm.mixing import Likelihoods
from knnstore.lm.model.modeling import KNNLM
from knnstore.lm.model.passes import ForwardPass
from knnstore.lm.reading import as_cache_argument, check_logits
from knnstore.lm.settings import KNNSettings
from knnstore.lm.text_state import TextState


def read_part(
    lm: KNNLM,
    tokens: Tensor,
    past: Any,
    text: TextState,
    knn: KNNSettings,
    *,
    logits_to_keep: int = 0,
) -> ForwardPass:
    """Run the base model on the next chunk of a text (prefill). The store is not searched.

    Args:
        lm: the model with a store.
        tokens: the text up to the end of the chunk, int64, shape (1, n).
        past: the KV cache of the earlier tokens; the call appends the chunk.
        text: the tokens in `past` with their keys; the call appends the chunk.
        knn: settings for scoring or continuing the text.
        logits_to_keep: number of last positions whose logits are computed; 0 means all positions.

    Returns:
        Logits and keys of the chunk, with the text.

    Raises:
        ModelOutputError: at some position the largest logit is NaN or infinite.
    """
    read, knn = int(past.get_seq_length()), lm.resolve_settings(knn)
    with torch.inference_mode():
        with KeyCapture(lm.base, lm.key_encoder.location) as capture:
            output = lm.base(
                input_ids=tokens[:, read:],
                attention_mask=torch.ones_like(tokens),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                **as_cache_argument(lm.base, past),
            )
        check_logits(lm.base, output.logits)
        states = capture.take_keys(1, tokens.shape[1] - read)
        keys, batch = lm.extend_texts([text], tokens[:, read:], states, None)
        return ForwardPass(output.logits, keys, None, batch, logits_to_keep, lm.prefix_for([knn]))


def predict_next(lm: KNNLM, part: ForwardPass, knn: KNNSettings) -> Tensor:
    """Predict the token after a chunk of a text, with retrieval from the store.

    Args:
        lm: the model with a store.
        part: the chunk from `read_part`; the logits of its last position are used.
        knn: settings for the prediction.

    Returns:
        Log-probability of every token of the vocabulary in the mixture, float32, shape (v,).
    """
    last = replace(part, logits=part.logits[:, -1:], logits_to_keep=1)
    with torch.inference_mode():
        mixed: Tensor = lm._mixer.mix(last, [lm.resolve_settings(knn)])
    return mixed[0, -1].float().log_softmax(-1)


def score_targets(
    lm: KNNLM, parts: Sequence[ForwardPass], gold: Sequence[Tensor], knn: KNNSettings, count: int
) -> list[Likelihoods]:
    """Compute log-probabilities of the target tokens and of the most probable tokens, for several chunks.

    One search of the store serves all chunks.

    Args:
        lm: the model with a store.
        parts: at least one chunk from `read_part`, each with the logits of all positions.
        gold: target tokens of each chunk, int64, shapes (t_i,).
        knn: settings for all chunks.
        count: number of most probable tokens; at most the size of the vocabulary is returned.

    Returns:
        The likelihoods of each chunk, in the order of `parts`, on the CPU.
    """
    with torch.inference_mode():
        joined = lm._mixer.score_targets(parts, torch.cat([*gold]), lm.resolve_settings(knn), count)
    lengths = [len(tokens) for tokens in gold]
    columns = (torch.split(column.cpu(), lengths) for column in joined)
    return [Likelihoods(*columns_of_chunk) for columns_of_chunk in zip(*columns, strict=True)]
