"""Perplexity by the size of the store (Khandelwal et al. 2020, figure 2): what more text would gain."""

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
    """Number of stored documents that are searched."""
    records: int
    """Number of records of these documents. In a store without keys: number of their tokens."""
    perplexity: Interval
    """Perplexity of the mixture with its 95 % interval; of the model alone if `records` is 0."""


def measure_size_curve(
    lm: KNNModel,
    documents: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> list[SizePoint]:
    """Measure perplexity with growing parts of the store: a 64th, a 32nd and so on, up to the whole store.

    A part has whole documents, chosen by a fixed random order. The settings are the same for all parts,
    without components that were trained on the whole store. The held-out documents are scored once for each
    part.

    Args:
        lm: the model.
        documents: held-out text, in any form that `add` takes.
        knn: settings of this call; default ``lm.knn``.
        on_bad: called for each document that cannot be used, or that has a token which the model does not
            have; the document is then left out. With None the first bad document raises an error.
        progress: receives the number of scored tokens.

    Returns:
        The perplexity of the model alone, then with a 64th of the selected documents, and so on to all
        selected documents. Parts with the same number of documents are evaluated once.

    Raises:
        InputError: a document is in the store, or there is no token to predict.
    """
    store = lm.store
    settings = resolve(store, knn or lm.knn)
    settings = settings.without_components(*settings.trained_components)
    listed = list(usable_documents(lm.reader, documents, on_bad))
    HeldOut.compare_with_store(store, lm.reader, listed, settings.selection).refuse_stored()
    alone = evaluate(lm, listed, KNNSettings(lam=0.0, selection=settings.selection), progress=progress)
    points = [SizePoint(0, 0, alone.intervals.base)]
    for part, count in _choose_parts(store, settings.selection):
        evaluation = evaluate(lm, listed, replace(settings, selection=part), progress=progress)
        records = sum(store.lengths(part).values()) if store.is_keyless else store.record_count(part)
        points.append(SizePoint(count, records, evaluation.intervals.knn))
    return points


def _choose_parts(store: KNNStore, selection: Selection) -> Sequence[tuple[Selection, int]]:
    """Choose growing parts of the selected documents; each part contains the part before.

    Each part has about twice as many tokens as the part before.

    Returns:
        The selection and the number of documents of each part, from a 64th of the tokens to all; empty if no
        document is selected.
    """
    order = sorted(store.select(selection), key=lambda document: document.content_hash)
    if not order:
        return []
    tokens = np.cumsum([document.tokens for document in order])
    wanted = tokens[-1] / 2.0 ** np.arange(_HALVINGS + 1)
    counts = sorted(set((1 + np.searchsorted(tokens, wanted)).tolist()))
    parts = [
        replace(selection, documents=tuple({document.id for document in order[:count]}))
        for count in counts[:-1]
    ]
    return list(zip([*parts, selection], counts, strict=True))
