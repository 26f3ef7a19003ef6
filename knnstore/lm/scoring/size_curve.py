"""Perplexity against the size of the store, from one pass of the model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from knnstore.documents import OnBad
from knnstore.errors import InputError
from knnstore.lm.components import Form, reachable
from knnstore.lm.mixture import mixture_of
from knnstore.lm.reading import in_chunks, usable_documents
from knnstore.lm.scoring.held_out import (
    HeldOut,
    LookUpInParts,
    follow_documents,
    read_on,
    read_windows,
)
from knnstore.lm.scoring.slices import perplexity
from knnstore.lm.settings import KNNModel, KNNSettings, resolve
from knnstore.progress import Progress
from knnstore.store import KNNStore, Selection

_HALVINGS = 6


@dataclass(frozen=True, slots=True)
class SizePoint:
    """Perplexity with a part of the store."""

    documents: int
    """Stored documents that are retrieved from."""
    records: int
    """Of those."""
    ppl: float
    """Of the mixture; where there is no record, of the model alone."""


def measure_size_curve(
    lm: KNNModel,
    documents: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> list[SizePoint]:
    """Measure perplexity with ever smaller parts of the store, each the half of the one before.

    A part holds whole documents, in an order that is chance and stays the same. The settings are the same
    for all, without a substitute, which was trained on the whole.

    Args:
        lm: the model.
        documents: held-out text, as in `add`.
        knn: settings of this call; default ``lm.knn``.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; it is then left out. None raises at the first.
        progress: is told of each batch.

    Returns:
        The model alone, then a 64th of what is selected and so on to all of it; fewer points where a half
        is no fewer documents.

    Raises:
        InputError: a document is in the store, or there is not one token to predict.
    """
    store, reader = lm.store, lm.reader
    settings = replace(resolve(lm.store, knn or lm.knn), substitute=None)
    held_out = HeldOut.of(store, reader, usable_documents(reader, documents, on_bad), settings.selection)
    held_out.refuse_stored()
    parts = _parts(store, settings.selection)
    if progress is not None:
        progress.start("evaluating", total=reader.count_predicted(held_out.documents))
    tokens, totals = 0, [0.0] * (1 + len(parts))
    for ahead in in_chunks(held_out.documents):
        texts = reader.tokenized(ahead)
        texts_read = follow_documents(reader, texts, settings)
        selected = [replace(settings, selection=part) for part, _ in parts]
        reached = [replace(one, k=reachable(store, one)) for one in selected]
        smaller = [(one, LookUpInParts(store, one, Form.TARGET)) for one in reached]
        for batch in reader.batches(texts):
            read = read_windows(reader, batch)
            contexts = read_on(texts_read, read, settings)
            tokens += len(read)
            totals[0] += float(read.lm_log_probs.double().sum())
            for number, (one, looking_up) in enumerate(smaller, 1):
                for scores in looking_up(read, contexts):
                    mixture = mixture_of(one, scores.evidence)
                    totals[number] += float(mixture.gold(scores.lm_log_probs, scores.targets).double().sum())
            if progress is not None:
                progress.advance(len(read))
    if progress is not None:
        progress.finish()
    if not tokens:
        raise InputError("nothing to evaluate: the documents hold no token to predict")
    sizes = [(0, 0)]
    for part, count in parts:
        tokens_there = sum(store.lengths(part).values()) if store.is_keyless else store.record_count(part)
        sizes.append((count, tokens_there))
    return [SizePoint(*size, perplexity(total, tokens)) for size, total in zip(sizes, totals, strict=True)]


def _parts(store: KNNStore, selection: Selection) -> Sequence[tuple[Selection, int]]:
    """Parts of what is selected with the number of their documents, from the smallest to all of it."""
    order = sorted(store.select(selection), key=lambda one: one.content_hash)
    if not order:
        return []
    tokens = np.cumsum([one.tokens for one in order])
    wanted = tokens[-1] / 2.0 ** np.arange(_HALVINGS + 1)
    counts = sorted(set((1 + np.searchsorted(tokens, wanted)).tolist()))
    parts = [replace(selection, documents=tuple({one.id for one in order[:count]})) for count in counts[:-1]]
    return list(zip([*parts, selection], counts, strict=True))
