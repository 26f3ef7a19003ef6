"""Evaluation: perplexity of the base model and of the mixture on held-out documents.

Perplexity is exp(total negative log-likelihood / number of predicted tokens). Only the probability of each
gold token is computed. The windows are the same as when documents are added, so every token counts exactly
once. The same total is also divided by the number of words and by the number of bytes.
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
from knnstore.lm.mixture import build_mixture
from knnstore.lm.reading import usable_documents
from knnstore.lm.scoring.loss_breakdown import (
    DocumentLosses,
    DocumentScore,
    GroupScore,
    Intervals,
    Slice,
    TokenLosses,
    compute_perplexity,
    score_groups,
)
from knnstore.lm.scoring.token_scores import HeldOut, score_held_out
from knnstore.lm.scoring.token_table import TokenTable, build_data_frame
from knnstore.lm.settings import KNNSettings, ReadingModel, find_saved_settings, resolve
from knnstore.progress import Progress


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `evaluate`: perplexities on held-out documents, and the settings that gave them."""

    documents: int
    """Number of evaluated documents."""
    tokens: int
    """Number of predicted tokens."""
    base_ppl: float
    """Perplexity of the model alone."""
    knn_ppl: float
    """Perplexity of the mixture."""
    store_ppl: float | None
    """Perplexity of the mixture without continuous cache and n-grams; None if the settings have neither."""
    cache_ppl: float | None
    """Perplexity of the model with only the continuous cache and its n-grams; None without a cache."""
    ngram_ppl: float | None
    """Perplexity of the model with only the n-grams of the store; None if the settings have no n-grams."""
    words: int
    """Number of words of the texts, separated by white space."""
    base_word_ppl: float
    """Perplexity per word of the model alone. Perplexities per word and per byte can be compared between
    models with different tokenizers."""
    knn_word_ppl: float
    """Perplexity per word of the mixture."""
    bytes: int
    """Number of bytes of the texts in UTF-8."""
    base_byte_ppl: float
    """Perplexity per byte of the model alone."""
    knn_byte_ppl: float
    """Perplexity per byte of the mixture."""
    helped: float
    """Fraction of the tokens that are more probable by all components together (p_kNN) than by the model
    alone (p_LM)."""
    k: int
    """Number of neighbors in the settings."""
    probes: int | None
    """Number of cells (groups of records with near keys) that are searched for each query; all records of
    these cells count. None if the k nearest records are searched."""
    temperature: float
    """Mean T over the tokens."""
    lam: float
    """Mean λ over the tokens."""
    mixer: str
    """Name of the mixer, or of the gate, that chose the weights."""
    tokens_per_s: float
    """Number of evaluated tokens per second."""
    stored: tuple[str, ...]
    """Ids of the evaluated documents of which half or more is in the selected stored text. With `leave_out`,
    the searches for these documents left their own text out."""
    fitted: tuple[str, ...]
    """Ids of the evaluated documents that the saved settings were fitted to; their perplexity is too low."""
    by_frequency: tuple[Slice, ...]
    """Perplexities of groups of tokens, grouped by the number of records in the selection that have the
    token."""
    by_distance: tuple[Slice, ...]
    """Perplexities of ten groups of tokens, from the nearest to the farthest nearest neighbor."""
    intervals: Intervals
    """95 % confidence intervals over documents of `base_ppl`, `knn_ppl` and `knn_ppl` / `base_ppl`."""
    by_document: tuple[DocumentScore, ...] = field(repr=False)
    """The perplexities of each document, in the order of the documents."""

    def group_by(self, field: str) -> dict[Any, GroupScore]:
        """Group the documents by a metadata field, and return the perplexities of each group.

        Args:
            field: the metadata field whose values define the groups, e.g. ``domain``. Documents without the
                field are in the group None. Lists and objects are grouped by their string.
        """
        return score_groups(self.by_document, field)

    by = group_by  # the former name, kept for one release

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each document: id, metadata, tokens, base_ppl and knn_ppl.

        Raises:
            ConfigError: pandas is not installed.
        """
        columns = [column.name for column in fields(DocumentScore) if column.name != "metadata"]
        return build_data_frame(
            [
                {**score.metadata, **{name: getattr(score, name) for name in columns}}
                for score in self.by_document
            ]
        )


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
        documents: the held-out documents, in any form that `add` takes.
        knn: settings of this call; default ``lm.knn``.
        leave_out: True to leave a document that is in the store out of its own search. `Evaluation.stored`
            names these documents in both cases.
        table: a table to which a row for each token is added; None for no table.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; the document is then left out of the evaluation. With None the first bad document raises an
            error.
        progress: progress display, which receives the number of scored tokens; None for no display.

    Raises:
        InputError: the documents have no token to predict, or a document cannot be used and `on_bad` is None.
        ConfigError: a component in use was trained on a document that is to be left out.
    """
    # 1) Read the documents, and find the ones that are in the store.
    settings, store, reader = resolve(lm.store, knn or lm.knn), lm.store, lm.reader
    listed, stored = HeldOut.compare_with_store(
        store, reader, usable_documents(reader, documents, on_bad), settings.selection
    )
    if leave_out and stored and settings.trained_components:
        raise ConfigError(
            f"{len(stored):,} of the documents are in the store, and the component "
            f"{settings.trained_components[0]!r} was trained on stored documents: it cannot leave them "
            "out, as retrieval can; give other documents, or leave the component out of the settings"
        )
    if progress is not None:  # to show the time left, texts are tokenized twice, which is cheap
        progress.start("evaluating", total=reader.count_predicted(listed))
    started = time.perf_counter()
    # 2) List the settings to compare: the whole mixture, and components alone.
    store_alone = replace(settings, cache=None, ngrams=None, others={})
    variants = {"knn": settings}
    if settings.needs_text:
        variants["store"] = store_alone
    if settings.cache is not None:
        variants["cache"] = replace(settings, mixer=FixedLambda(0.0), ngrams=None, others={})
    if settings.ngrams is not None:
        variants["ngrams"] = replace(settings, mixer=FixedLambda(0.0), cache=None, others={})
    # 3) Score every token once, and sum its log-probabilities under all settings.
    totals, token_losses, document_losses = defaultdict[str, float](float), TokenLosses(), DocumentLosses()
    left_out = stored if leave_out else {}
    for scores in score_held_out(store, reader, listed, settings, left_out=left_out, progress=progress):
        evidence, gold, lm_log_probs = scores.evidence, scores.targets, scores.lm_log_probs
        mixtures = {name: build_mixture(variant, evidence) for name, variant in variants.items()}
        log_probs = {name: mixture.target_log_probs(lm_log_probs, gold) for name, mixture in mixtures.items()}
        log_probs["base"] = lm_log_probs
        mixture = mixtures["knn"]
        knn_probs = mixture.knn_probs(gold)
        helped = knn_probs > lm_log_probs.exp()
        columns = {
            **log_probs,
            "tokens": torch.ones(len(gold)),
            "helped": helped,
            "lam": mixture.lam,
            "temperature": torch.as_tensor(mixture.temperature, dtype=torch.float64).expand(len(gold)),
        }
        for name, column in columns.items():
            totals[name] += float(column.double().sum())
        token_losses.add_batch(gold, lm_log_probs, log_probs["knn"], helped, evidence.distances.amin(1))
        document_losses.add_scores(scores, log_probs["knn"])
        if table is not None:
            table.add_scores(scores, knn_probs, mixture.lam, log_probs["knn"])
    seconds = time.perf_counter() - started
    if progress is not None:
        progress.finish()
    # 4) Turn the sums into perplexities.
    tokens = int(totals["tokens"])
    if not tokens:
        raise InputError("nothing to evaluate: the documents have no token to predict")
    counts = store.token_counts(settings.selection)
    if table is not None:
        table.set_documents(listed, counts)
    words = sum(len(document.text.split()) for document in listed)
    saved = find_saved_settings(store, settings.selection)
    fitted_on = frozenset[str]() if saved is None else saved.fitted_on
    in_bytes = sum(len(document.text.encode()) for document in listed)
    base, mixed = totals["base"], totals["knn"]
    return Evaluation(
        documents=len(listed),
        tokens=tokens,
        base_ppl=compute_perplexity(base, tokens),
        knn_ppl=compute_perplexity(mixed, tokens),
        store_ppl=compute_perplexity(totals["store"], tokens) if settings.needs_text else None,
        cache_ppl=compute_perplexity(totals["cache"], tokens) if settings.cache else None,
        ngram_ppl=compute_perplexity(totals["ngrams"], tokens) if settings.ngrams else None,
        words=words,
        base_word_ppl=compute_perplexity(base, words),
        knn_word_ppl=compute_perplexity(mixed, words),
        bytes=in_bytes,
        base_byte_ppl=compute_perplexity(base, in_bytes),
        knn_byte_ppl=compute_perplexity(mixed, in_bytes),
        helped=totals["helped"] / tokens,
        k=settings.k,
        probes=settings.probes if probes_cells(store, settings) else None,
        temperature=totals["temperature"] / tokens,
        lam=totals["lam"] / tokens,
        mixer=settings.mixer.name if settings.gate is None else settings.gate.name,
        tokens_per_s=tokens / seconds,
        stored=tuple(document.id for document in listed if document.content_hash in stored),
        fitted=tuple(document.id for document in listed if document.content_hash in fitted_on),
        by_frequency=token_losses.slice_by_frequency(counts),
        by_distance=token_losses.slice_by_distance(),
        intervals=document_losses.compute_intervals(),
        by_document=document_losses.document_scores(listed),
    )
