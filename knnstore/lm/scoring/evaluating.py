"""Perplexity of the base model and of the mixture, touching only the gold token.

exp(total negative log-likelihood / tokens predicted), over the same windows as storing, so every
token counts once, whatever document it is in; and the same total over words and over bytes.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from knnstore.documents import OnBad
from knnstore.errors import ConfigError, InputError
from knnstore.lm.components import probes_cells
from knnstore.lm.mixing import FixedLambda
from knnstore.lm.mixture import mixture_of
from knnstore.lm.reading import usable_documents
from knnstore.lm.scoring.by_document import DocumentLosses, DocumentScore, GroupScore, Intervals, grouped
from knnstore.lm.scoring.held_out import HeldOut, score_held_out
from knnstore.lm.scoring.slices import Slice, TokenLosses, perplexity
from knnstore.lm.scoring.token_table import TokenTable, table_of
from knnstore.lm.settings import KNNSettings, ReadingModel, find_saved_settings, resolve
from knnstore.progress import Progress


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
    """Of the mixture without continuous cache and n-grams; None where the settings have neither."""
    cache_ppl: float | None
    """Of the model with the continuous cache alone, and own n-grams; None where the settings have none."""
    ngram_ppl: float | None
    """Of the model with n-grams alone; None where the settings have none."""
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
    probes: int | None
    """Cells visited, whose records all count in place of the k nearest; None where none were."""
    temperature: float
    """Mean T over the tokens."""
    lam: float
    """Mean λ over the tokens."""
    mixer: str
    tokens_per_s: float
    stored: tuple[str, ...]
    """Ids of evaluated documents of whose text retrieval can reach half or more; left out of it when
    `evaluate` was told so."""
    fitted: tuple[str, ...]
    """Ids of documents that the settings saved for the selection were fitted to: these flatter them."""
    by_frequency: tuple[Slice, ...]
    """Tokens divided by how often the selection holds them."""
    by_distance: tuple[Slice, ...]
    """Tokens divided by the distance to the nearest neighbor, into tenths."""
    intervals: Intervals
    """Of `base_ppl`, of `knn_ppl` and of the second divided by the first, 95 % over documents."""
    by_document: tuple[DocumentScore, ...] = field(repr=False)
    """In the order given."""

    def by(self, field: str) -> dict[Any, GroupScore]:
        """Divide the documents by a field of their metadata, e.g. ``domain``; None is those without it."""
        return grouped(self.by_document, field)

    def to_pandas(self) -> Any:
        """The documents as a DataFrame of pandas: id, metadata, tokens, base_ppl and knn_ppl."""
        return table_of([{**one.metadata, **_numbers(one)} for one in self.by_document])


def _numbers(score: DocumentScore) -> dict[str, Any]:
    return {one.name: getattr(score, one.name) for one in fields(score) if one.name != "metadata"}


def evaluate(
    lm: ReadingModel,
    documents: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    leave_out: bool = False,
    table: TokenTable | None = None,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Measure perplexity on held-out documents with and without the store.

    Args:
        lm: the model.
        documents: as in `add`.
        knn: settings of this call; default ``lm.knn``.
        leave_out: a document that is itself in the store does not retrieve from itself; else it
            does, and `Evaluation.stored` names it.
        table: takes in a row for each token.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; it is then left out. None raises at the first. `Evaluation.documents` counts the others.
        progress: is told of each batch.

    Raises:
        InputError: there is not one token to predict, or a document cannot be used and `on_bad` is None.
        ConfigError: a component in use was trained on a document that is to be left out.
    """
    settings, store, reader = resolve(lm.store, knn or lm.knn), lm.store, lm.reader
    listed, stored = HeldOut.of(
        store, reader, usable_documents(reader, documents, on_bad), settings.selection
    )
    if leave_out and stored and settings.trained_components:
        raise ConfigError(
            f"{len(stored):,} of the documents are in the store, and the component "
            f"{settings.trained_components[0]!r} was trained on stored documents: it cannot leave them "
            "out, as retrieval can; give other documents, or leave the component out of the settings"
        )
    if progress is not None:  # tokenized twice, for the time left: little against the forward pass
        progress.start("evaluating", total=reader.count_predicted(listed))
    started = time.perf_counter()
    # The mixture, its parts, each without the other, and the store alone, with what each is mixed into.
    store_alone = replace(settings, cache=None, ngrams=None, others={})
    variants = {"knn": settings}
    if settings.needs_text:
        variants["store"] = store_alone
    if settings.cache is not None:
        variants["cache"] = replace(settings, mixer=FixedLambda(0.0), ngrams=None, others={})
    if settings.ngrams is not None:
        variants["ngrams"] = replace(settings, mixer=FixedLambda(0.0), cache=None, others={})
    totals, losses, of_documents = defaultdict[str, float](float), TokenLosses(), DocumentLosses()
    left_out = stored if leave_out else {}
    for scores in score_held_out(store, reader, listed, settings, left_out=left_out, progress=progress):
        evidence, gold, lm_log_probs = scores.evidence, scores.targets, scores.lm_log_probs
        mixtures = {name: mixture_of(variant, evidence) for name, variant in variants.items()}
        log_probs = {name: mixture.gold(lm_log_probs, gold) for name, mixture in mixtures.items()}
        log_probs["base"] = lm_log_probs
        mixture = mixtures["knn"]
        knn_probs = mixture.knn_probs(gold)
        better = knn_probs > lm_log_probs.exp()
        columns = {
            **log_probs,
            "tokens": torch.ones(len(gold)),
            "helped": better,
            "lam": mixture.lam,
            "temperature": torch.as_tensor(mixture.temperature, dtype=torch.float64).expand(len(gold)),
        }
        for name, column in columns.items():
            totals[name] += float(column.double().sum())
        losses.add(gold, lm_log_probs, log_probs["knn"], better, evidence.distances.amin(1))
        of_documents.add(scores, log_probs["knn"])
        if table is not None:
            table.add(scores, knn_probs, mixture.lam, log_probs["knn"])
    seconds = time.perf_counter() - started
    if progress is not None:
        progress.finish()
    tokens = int(totals["tokens"])
    if not tokens:
        raise InputError("nothing to evaluate: the documents hold no token to predict")
    counts = store.token_counts(settings.selection)
    if table is not None:
        table.name(listed, counts)
    words = sum(len(document.text.split()) for document in listed)
    saved = find_saved_settings(store, settings.selection)
    fitted_on = frozenset[str]() if saved is None else saved.fitted_on
    in_bytes = sum(len(document.text.encode()) for document in listed)
    base, mixed = totals["base"], totals["knn"]
    return Evaluation(
        documents=len(listed),
        tokens=tokens,
        base_ppl=perplexity(base, tokens),
        knn_ppl=perplexity(mixed, tokens),
        store_ppl=perplexity(totals["store"], tokens) if settings.needs_text else None,
        cache_ppl=perplexity(totals["cache"], tokens) if settings.cache else None,
        ngram_ppl=perplexity(totals["ngrams"], tokens) if settings.ngrams else None,
        words=words,
        base_word_ppl=perplexity(base, words),
        knn_word_ppl=perplexity(mixed, words),
        bytes=in_bytes,
        base_byte_ppl=perplexity(base, in_bytes),
        knn_byte_ppl=perplexity(mixed, in_bytes),
        helped=totals["helped"] / tokens,
        k=settings.k,
        probes=settings.probes if probes_cells(store, settings) else None,
        temperature=totals["temperature"] / tokens,
        lam=totals["lam"] / tokens,
        mixer=settings.mixer.name if settings.gate is None else settings.gate.name,
        tokens_per_s=tokens / seconds,
        stored=tuple(document.id for document in listed if document.content_hash in stored),
        fitted=tuple(document.id for document in listed if document.content_hash in fitted_on),
        by_frequency=losses.by_frequency(counts),
        by_distance=losses.by_distance(),
        intervals=of_documents.intervals(),
        by_document=of_documents.scores(listed),
    )
