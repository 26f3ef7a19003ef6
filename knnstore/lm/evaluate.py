"""Perplexity of the base model and of the mixture, touching only the gold token.

exp(total negative log-likelihood / tokens predicted), over the same windows as storing, so every
token counts once, whatever document it is in.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from knnstore.documents import TextDocument
from knnstore.errors import InputError
from knnstore.lm.encoder import Encoder
from knnstore.lm.interpolation import gold_knn_probs, mix_gold, neighbor_weights
from knnstore.lm.mixing import KNNSettings
from knnstore.lm.scoring import BATCH_TOKENS, score
from knnstore.lm.text import in_chunks, tokenized
from knnstore.progress import Progress
from knnstore.store import KNNStore, Selection


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Perplexities over held-out documents."""

    documents: int
    tokens: int
    """Tokens predicted."""
    base_ppl: float
    """Of the model alone."""
    knn_ppl: float
    """Of the mixture."""
    helped: float
    """Share of tokens to which p_kNN gives more probability than p_LM."""
    k: int
    temperature: float
    lam: float
    """Mean λ over the tokens."""
    mixer: str
    tokens_per_s: float
    stored: tuple[str, ...]
    """Ids of evaluated documents that retrieval can reach with the same text; left out of it when
    `evaluate` was told so."""


def evaluate(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[TextDocument],
    settings: KNNSettings,
    *,
    leave_out: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure perplexity with and without the store.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        documents: held-out documents.
        settings: k, temperature, mixer and the selection to retrieve from.
        leave_out: a document that is itself in the store does not retrieve from itself; else it
            does, and `Evaluation.stored` names it.
        batch_tokens: tokens in one forward pass.
        progress: hears of each batch.

    Raises:
        InputError: there is not one token to predict.
    """
    listed = list(documents)
    twins = store.stored_content((document.content_hash for document in listed), settings.selection)
    groups: list[tuple[Sequence[TextDocument], Selection]] = [(listed, settings.selection)]
    if leave_out and twins:
        groups = [([d for d in listed if d.content_hash not in twins], settings.selection)]
        groups += [
            ([d], settings.selection.without(d.content_hash)) for d in listed if d.content_hash in twins
        ]

    if progress is not None:  # tokenised twice, for the time left: little against the forward pass
        lengths = (len(ids) for ahead in in_chunks(listed) for ids in tokenized(ahead, tokenizer))
        progress.start("evaluating", total=sum(lengths))
    started = time.perf_counter()
    tokens, helped = 0, 0
    lm_total, mixed_total, lam_total = 0.0, 0.0, 0.0
    for members, selection in groups:
        for scores in score(
            store, encoder, tokenizer, members,
            k=settings.k, selection=selection, batch_tokens=batch_tokens, progress=progress,
        ):  # fmt: skip
            weights = neighbor_weights(scores.distances, settings.temperature)
            knn = gold_knn_probs(weights, scores.tokens, scores.gold)
            lam = settings.mixer(scores.retrieved())
            mixed = mix_gold(scores.lm_log_probs, knn, weights.sum(1) > 0, lam)
            tokens += len(scores.gold)
            helped += int((knn > scores.lm_log_probs.exp()).sum())
            lm_total += float(scores.lm_log_probs.double().sum())
            mixed_total += float(mixed.double().sum())
            lam_total += float(lam.double().sum())
    seconds = time.perf_counter() - started
    if progress is not None:
        progress.finish()
    if not tokens:
        raise InputError("nothing to evaluate: the documents hold no token to predict")
    return Evaluation(
        documents=len(listed),
        tokens=tokens,
        base_ppl=math.exp(-lm_total / tokens),
        knn_ppl=math.exp(-mixed_total / tokens),
        helped=helped / tokens,
        k=settings.k,
        temperature=settings.temperature,
        lam=lam_total / tokens,
        mixer=settings.mixer.name,
        tokens_per_s=tokens / seconds,
        stored=tuple(document.id for document in listed if document.content_hash in twins),
    )
