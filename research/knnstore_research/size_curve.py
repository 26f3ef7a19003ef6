"""Perplexity against the size of the store (Khandelwal et al. 2020, figure 2): what more text would bring."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from knnstore.documents import OnBad
from knnstore.lm import Interval
from knnstore.lm.reading import usable_documents
from knnstore.lm.scoring import HeldOut, evaluate
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
    """Their records; in a store without keys, their tokens."""
    perplexity: Interval
    """With its interval of 95 %: of the mixture, or of the model alone where there is no record."""


def measure_size_curve(
    lm: KNNModel,
    documents: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> list[SizePoint]:
    """Evaluate with ever smaller parts of the store, each half of the one before.

    A part holds whole documents, in a random order that stays the same. The settings are the same for all
    parts, without components that were trained on the whole. The model reads the documents once for each
    part.

    Args:
        lm: the model.
        documents: held-out text, as in `add`.
        knn: settings of this call; default ``lm.knn``.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; it is then left out. None raises at the first.
        progress: is told of each batch.

    Returns:
        The model alone, then a 64th of what is selected and so on to all of it; fewer points where half of a
        part holds as many documents.

    Raises:
        InputError: a document is in the store, or there is no token to predict.
    """
    store = lm.store
    settings = resolve(store, knn or lm.knn)
    settings = settings.without(*settings.trained_components)
    listed = list(usable_documents(lm.reader, documents, on_bad))
    HeldOut.compare_with_store(store, lm.reader, listed, settings.selection).refuse_stored()
    alone = evaluate(lm, listed, KNNSettings(lam=0.0, selection=settings.selection), progress=progress)
    points = [SizePoint(0, 0, alone.intervals.base)]
    for part, count in _divide(store, settings.selection):
        found = evaluate(lm, listed, replace(settings, selection=part), progress=progress)
        records = sum(store.lengths(part).values()) if store.is_keyless else store.record_count(part)
        points.append(SizePoint(count, records, found.intervals.knn))
    return points


def _divide(store: KNNStore, selection: Selection) -> Sequence[tuple[Selection, int]]:
    """Return parts of what is selected with the number of their documents, from the smallest to all of it."""
    order = sorted(store.select(selection), key=lambda one: one.content_hash)
    if not order:
        return []
    tokens = np.cumsum([one.tokens for one in order])
    wanted = tokens[-1] / 2.0 ** np.arange(_HALVINGS + 1)
    counts = sorted(set((1 + np.searchsorted(tokens, wanted)).tolist()))
    parts = [replace(selection, documents=tuple({one.id for one in order[:count]})) for count in counts[:-1]]
    return list(zip([*parts, selection], counts, strict=True))
