"""Perplexity of the base model and of the mixture, touching only the gold token.

exp(total negative log-likelihood / tokens predicted), over the same windows as storing, so every
token counts once, whatever document it is in; and the same total over words and over bytes.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.documents import TextDocument
from knnstore.errors import ConfigError, InputError
from knnstore.lm.mixing import FixedLambda
from knnstore.lm.reading import BATCH_TOKENS, Encoder, count_predicted
from knnstore.lm.scoring.held_out import score_held_out
from knnstore.lm.scoring.slices import Slice, TokenLosses, perplexity
from knnstore.lm.scoring.token_table import TokenTable
from knnstore.lm.settings import KNNSettings, Substitute
from knnstore.lm.substitute import Heads
from knnstore.progress import Progress
from knnstore.store import KNNStore


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
    store_ppl: float | None
    """Of the mixture without its continuous cache; None where the settings have none."""
    cache_ppl: float | None
    """Of the model with the continuous cache alone; None where the settings have none."""
    words: int
    """Of the texts, as white space divides them."""
    base_word_ppl: float
    """For each word, which compares models with different tokenizers; ``bytes`` likewise."""
    knn_word_ppl: float
    bytes: int
    """Of the texts in UTF-8."""
    base_byte_ppl: float
    knn_byte_ppl: float
    helped: float
    """Share of tokens to which p_kNN gives more probability than p_LM."""
    k: int
    temperature: float
    """Mean T over the tokens."""
    lam: float
    """Mean λ over the tokens."""
    mixer: str
    searched: float
    """Share of tokens for which a search was made; the others were skipped."""
    tokens_per_s: float
    stored: tuple[str, ...]
    """Ids of evaluated documents that retrieval can reach with the same text; left out of it when
    `evaluate` was told so."""
    by_frequency: tuple[Slice, ...]
    """Tokens divided by how often the selection holds them."""
    by_distance: tuple[Slice, ...]
    """Tokens divided by the distance to the nearest neighbour, into tenths."""
    substitute_ppl: float | None
    """Of the model with a substitute and without any retrieval; None when none was given."""
    substitute_share: float | None
    """What part the substitute has of the gain of the store, without cache and substitute: of the difference
    of the logarithms."""


def evaluate(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[TextDocument],
    settings: KNNSettings,
    *,
    substitute: Substitute | None = None,
    leave_out: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    table: TokenTable | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure perplexity with and without the store.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        documents: held-out documents.
        settings: k, temperature, mixer and the selection to retrieve from.
        substitute: measured apart, for comparison; that of the settings is part of the mixture.
        leave_out: a document that is itself in the store does not retrieve from itself; else it
            does, and `Evaluation.stored` names it.
        batch_tokens: tokens in one forward pass.
        table: takes in a row for each token.
        progress: hears of each batch.

    Raises:
        InputError: there is not one token to predict.
        ConfigError: a substitute was trained on a document that is to be left out.
    """
    listed = list(documents)
    twins = store.stored_content((document.content_hash for document in listed), settings.selection)
    if leave_out and twins and (substitute or settings.substitute):
        raise ConfigError(
            f"{len(twins):,} of the documents are in the store, and the substitute was trained on them: they "
            "can be left out of retrieval, not of it; give other documents"
        )
    heads, substitute_total, store_total = Heads(store, encoder.model.device), 0.0, 0.0
    if progress is not None:  # tokenised twice, for the time left: little against the forward pass
        progress.start("evaluating", total=count_predicted(listed, tokenizer))
    started = time.perf_counter()
    tokens, helped, searched, losses = 0, 0, 0, TokenLosses()
    # The mixture's parts, each without the other, with the log-likelihood that it reaches.
    parts = []
    if settings.cache is not None:
        parts = [replace(settings, cache=None), replace(settings, mixer=FixedLambda(0.0))]
    part_totals = [0.0] * len(parts)
    lm_total, mixed_total, lam_total, temperature_total = 0.0, 0.0, 0.0, 0.0
    for scores in score_held_out(
        store, encoder, tokenizer, listed, settings,
        left_out=twins if leave_out else (), batch_tokens=batch_tokens, progress=progress,
    ):  # fmt: skip
        weighed = settings.weigh(scores.retrieved())
        lam, temperature = weighed.lam.where(weighed.weights.sum(1) > 0, 0.0), weighed.temperature
        knn = weighed.knn_probs(scores.gold)
        model = heads.mix_gold(settings.substitute, scores.lm_log_probs, scores.keys, scores.gold)
        mixed = weighed.mixed_gold(model, knn)
        for at, part in enumerate(parts):
            alone = part.weigh(scores.retrieved())
            part_totals[at] += float(alone.mixed_gold(model, alone.knn_probs(scores.gold)).double().sum())
        if substitute is not None:
            apart = heads.mix_gold(substitute, scores.lm_log_probs, scores.keys, scores.gold)
            substitute_total += float(apart.double().sum())
            alone = replace(settings, cache=None).weigh(scores.retrieved())
            gold = alone.mixed_gold(scores.lm_log_probs, alone.knn_probs(scores.gold))
            store_total += float(gold.double().sum())
        count = len(scores.gold)
        tokens += count
        searched += int(scores.searched.sum())
        better = knn > scores.lm_log_probs.exp()
        helped += int(better.sum())
        losses.add(scores.gold, scores.lm_log_probs, mixed, better, scores.distances.amin(1))
        lm_total += float(scores.lm_log_probs.double().sum())
        mixed_total += float(mixed.double().sum())
        lam_total += float(lam.double().sum())
        temperature_total += (
            float(temperature.double().sum()) if isinstance(temperature, Tensor) else temperature * count
        )
        if table is not None:
            table.add(scores, knn, lam, mixed)
    seconds = time.perf_counter() - started
    if progress is not None:
        progress.finish()
    if not tokens:
        raise InputError("nothing to evaluate: the documents hold no token to predict")
    counts = store.token_counts(settings.selection)
    if table is not None:
        table.name(listed, counts)
    words = sum(len(document.text.split()) for document in listed)
    in_bytes = sum(len(document.text.encode()) for document in listed)
    return Evaluation(
        documents=len(listed),
        tokens=tokens,
        base_ppl=perplexity(lm_total, tokens),
        knn_ppl=perplexity(mixed_total, tokens),
        store_ppl=perplexity(part_totals[0], tokens) if parts else None,
        cache_ppl=perplexity(part_totals[1], tokens) if parts else None,
        words=words,
        base_word_ppl=perplexity(lm_total, words),
        knn_word_ppl=perplexity(mixed_total, words),
        bytes=in_bytes,
        base_byte_ppl=perplexity(lm_total, in_bytes),
        knn_byte_ppl=perplexity(mixed_total, in_bytes),
        helped=helped / tokens,
        k=settings.k,
        temperature=temperature_total / tokens,
        lam=lam_total / tokens,
        mixer=settings.mixer.name,
        searched=searched / tokens,
        tokens_per_s=tokens / seconds,
        stored=tuple(document.id for document in listed if document.content_hash in twins),
        by_frequency=losses.by_frequency(counts),
        by_distance=losses.by_distance(),
        substitute_ppl=None if substitute is None else perplexity(substitute_total, tokens),
        substitute_share=(
            None
            if substitute is None or store_total <= lm_total
            else (substitute_total - lm_total) / (store_total - lm_total)
        ),
    )
