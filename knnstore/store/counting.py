"""Counts of n-grams of the live documents of a selection, cached by selection."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import ConfigError, KnnstoreError
from knnstore.store.ngrams import MOST, NGramCounts, SortedText
from knnstore.store.selection import Selection
from knnstore.store.view import View

_logger = logging.getLogger(__name__)

_KEPT = 4
"""Selections, and sets of domains, that are kept in any case; each takes 10 bytes a token at most."""
_KEPT_BYTES = 256 << 20
"""More selections are kept while the counts of all of them take no more memory than this."""

Domains = tuple[str, ...] | None
Rows = NDArray[np.int64]


class _Documents(NamedTuple):
    """Some documents in order."""

    rows: Rows
    """Primary keys, in the order of their positions."""
    text: SortedText

    def among(self, rows: Rows) -> "_Documents":
        """Return those that are among some others."""
        chosen = np.isin(self.rows, rows)
        return _Documents(self.rows[chosen], self.text.only(chosen))


class _Counted(NamedTuple):
    """The counts of a selection, with its documents."""

    revision: int
    """The latest revision at which all of the counted documents were found to be selected."""
    is_whole: bool
    """True if these were all of the selected documents at that revision."""
    rows: Rows
    """Primary keys of the counted documents, in the order of their positions."""
    counts: NGramCounts


class Counting:
    """Counts of n-grams by selection, remembering the latest.

    Several threads may ask. Looking counts up never waits for a thread that counts.

    Args:
        vocabulary: number of tokens of the vocabulary.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._revision = -1
        self._counted: OrderedDict[Selection, _Counted] = OrderedDict()
        self._sorted: OrderedDict[Domains, _Documents] = OrderedDict()
        self._remembering = threading.Lock()
        """Held for a moment, while the two dictionaries are used."""
        self._making = threading.Lock()
        """Held while documents are sorted or counted."""
        self._background: ThreadPoolExecutor | None = None
        self._queued: set[Selection] = set()

    def of(self, view: View, selection: Selection) -> NGramCounts | None:
        """Count the n-grams of the selected documents; None where one of them was removed since.

        Counts that were made are looked up as long as the selected documents are the same.

        Raises:
            DomainNotFoundError, DocumentNotFoundError: as `View.scope`.
            ConfigError: there is too much text.
        """
        found = self._look_up(view, selection)
        if found is not None and found.is_whole and found.revision == view.snapshot.revision:
            return found.counts
        rows = _rows_of(view, selection)
        with self._making:
            found = self._look_up(view, selection)  # which another thread may have made meanwhile
            if found is None or not np.array_equal(found.rows, rows):
                return self._count(view, selection, rows)
            self._remember(selection, found._replace(revision=view.snapshot.revision, is_whole=True))
            return found.counts

    def count_in_background(self) -> None:
        """From now on let `latest` leave the counting of added documents to a thread of its own."""
        self._background = ThreadPoolExecutor(1, "knnstore-counting")

    def stop_background(self) -> None:
        """End the thread of `count_in_background`; counts that are being made are finished first."""
        background, self._background = self._background, None
        if background is not None:
            background.shutdown(cancel_futures=True)

    def catch_up(self, view: Callable[[], View]) -> None:
        """Count anew, in the caller's thread, each remembered selection to which documents were added."""
        with self._remembering:
            selections = list(self._counted)
        for selection in selections:
            try:
                self.of(view(), selection)
            except KnnstoreError:  # whoever asks for it is told
                _logger.debug("n-grams could not be counted anew", exc_info=True)

    def latest(self, view: Callable[[], View], selection: Selection, attempts: int) -> NGramCounts | None:
        """Count as `of` does until nothing of it was removed meanwhile; None after so many attempts.

        After `count_in_background`, counts in which only added documents are missing are returned at once,
        while another thread counts anew. Removed documents are never counted.
        """
        for _ in range(attempts):
            seen = view()
            counts = self._without_added(seen, view, selection) if self._background else None
            if counts is not None:
                return counts
            counts = self.of(seen, selection)
            if counts is None:
                continue
            # Counting takes longer than most commits: what was added meanwhile can wait for the next call.
            now = view()
            if now is seen or np.isin(_rows_of(seen, selection), now.snapshot.rows).all():
                return counts
        return None

    def _without_added(
        self, seen: View, view: Callable[[], View], selection: Selection
    ) -> NGramCounts | None:
        """Return counts without some added documents, and have these counted; None where there are none."""
        found, revision = self._look_up(seen, selection), seen.snapshot.revision
        if found is None or found.revision == revision:
            return None if found is None else found.counts
        rows = _rows_of(seen, selection)
        counted, counts = found.rows, found.counts
        if not np.isin(counted, rows).all():  # what is left of the order is in order: nothing is sorted
            left = _Documents(counted, counts.text).among(rows)
            counted, counts = left.rows, NGramCounts(left.text, self._vocabulary)
        is_whole = np.array_equal(counted, rows)
        self._remember(selection, _Counted(revision, is_whole, counted, counts))
        if not is_whole:
            self._count_later(view, selection)
        return counts

    def _count_later(self, view: Callable[[], View], selection: Selection) -> None:
        """Count a selection in the background, unless that is already queued.

        Without a background thread nothing happens. Errors are logged.
        """

        def count() -> None:
            self._queued.discard(selection)
            try:
                self.of(view(), selection)
            except Exception:
                _logger.warning("n-grams could not be counted anew", exc_info=True)

        background = self._background
        if background is not None and selection not in self._queued:
            self._queued.add(selection)
            background.submit(count)

    def _look_up(self, view: View, selection: Selection) -> _Counted | None:
        """Return what is remembered of a selection, after forgetting what was removed up to this view."""
        with self._remembering:
            if view.snapshot.revision > self._revision:
                for domains, documents in self._sorted.items():  # of what was removed nothing is kept
                    self._sorted[domains] = documents.among(view.snapshot.rows)
                self._revision = view.snapshot.revision
            return self._counted.get(selection)

    def _count(self, view: View, selection: Selection, rows: Rows) -> NGramCounts | None:
        """Count what is selected, and remember it; None where a document was removed since."""
        every = self._in_order(view, selection.domains)
        if every is None:
            return None
        counts = NGramCounts(every.among(rows).text, self._vocabulary)
        self._remember(selection, _Counted(view.snapshot.revision, True, rows, counts))
        return counts

    def _remember(self, selection: Selection, found: _Counted) -> None:
        """Keep counts as the latest, and forget the oldest beyond the limits."""
        with self._remembering:
            self._counted[selection] = found
            self._counted.move_to_end(selection)
            size = sum(one.counts.nbytes for one in self._counted.values())
            while len(self._counted) > _KEPT and size > _KEPT_BYTES:
                size -= self._counted.popitem(last=False)[1].counts.nbytes

    def _in_order(self, view: View, domains: Domains) -> _Documents | None:
        """Return all documents of some domains, sorted; None where one was removed since."""
        chosen = view.chosen(Selection(domains=domains))
        rows = view.snapshot.rows[chosen]
        with self._remembering:
            documents = self._sorted.get(domains)
        if documents is None or not np.array_equal(documents.rows, rows):
            texts = view.texts(chosen)
            if texts is None:
                return None
            if sum(map(len, texts)) + 2 * len(texts) >= MOST:
                raise ConfigError(f"n-grams are counted of {MOST:,} tokens at most: select fewer domains")
            starts = view.snapshot.starts[chosen]
            documents = _Documents(rows, SortedText.of(texts, starts, self._vocabulary + 1))
        with self._remembering:
            self._sorted[domains] = documents
            self._sorted.move_to_end(domains)
            if len(self._sorted) > _KEPT:
                self._sorted.popitem(last=False)
        return documents


def _rows_of(view: View, selection: Selection) -> Rows:
    """Return the primary keys of the selected documents, in the order of their positions."""
    rows: Rows = view.snapshot.rows[view.chosen(selection)]
    return rows
