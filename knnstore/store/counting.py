"""Counting the n-grams (series of tokens) of the documents in a selection, with a cache of the counts."""

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

_MIN_CACHED = 4
"""Number of selections whose counts are always cached, and of sets of domains whose sorted documents are.

Counts, and sorted documents, take at most 10 bytes for each token.
"""
_MAX_CACHED_BYTES = 256 << 20
"""Counts of more selections are cached as long as all counts together take at most this many bytes."""

Domains = tuple[str, ...] | None
Rows = NDArray[np.int64]


class _SortedDocuments(NamedTuple):
    """The tokens of some documents with their suffix array, by which n-grams are found."""

    rows: Rows
    """Primary keys of the documents, in the order of the documents' positions in the store."""
    text: SortedText
    """The tokens of the documents and their suffix array."""

    def keep_rows(self, rows: Rows) -> "_SortedDocuments":
        """Return an object with only some of the documents. Nothing is sorted again.

        Args:
            rows: primary keys of the documents to keep; other keys are ignored.
        """
        is_kept = np.isin(self.rows, rows)
        return _SortedDocuments(self.rows[is_kept], self.text.keep_documents(is_kept))


class _CachedCounts(NamedTuple):
    """Cached n-gram counts of the documents in a selection, with the documents that were counted."""

    revision: int
    """Revision (state of the store) for which the counts were made or last checked. At this revision, the
    selection contained all counted documents."""
    is_whole: bool
    """True if the selection contained no other documents at this revision; False if some are not counted."""
    rows: Rows
    """Primary keys of the counted documents, in the order of the documents' positions in the store."""
    counts: NGramCounts
    """The counts of these documents."""


class Counting:
    """Counts the n-grams (series of tokens) of the documents in a selection, and caches the latest counts.

    A selection names the domains, tags or documents that are used. Threads may share the object. A look-up in
    the cache never waits for a thread that counts.

    Args:
        vocabulary: number of tokens of the vocabulary.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._revision = -1
        self._cache: OrderedDict[Selection, _CachedCounts] = OrderedDict()
        self._sorted: OrderedDict[Domains, _SortedDocuments] = OrderedDict()
        self._cache_lock = threading.Lock()
        """Lock of the two dictionaries; held for a moment only."""
        self._count_lock = threading.Lock()
        """Lock that is held while documents are sorted or counted."""
        self._background: ThreadPoolExecutor | None = None
        self._queued: set[Selection] = set()

    def get_exact(self, view: View, selection: Selection) -> NGramCounts | None:
        """Return the n-gram counts of exactly the documents that a selection contains in a view.

        The counts are cached as long as the selection contains the same documents.

        Args:
            view: the documents of the store at one revision.
            selection: documents to count.

        Returns:
            The counts; None if a document of the selection's domains was removed after the view's revision,
            so that its text can no longer be read.

        Raises:
            DomainNotFoundError: if the selection names an unknown domain.
            DocumentNotFoundError: if the selection names an unknown document.
            ConfigError: if the domains have more text than can be sorted together.
        """
        cached = self._get_cached(view, selection)
        if cached is not None and cached.is_whole and cached.revision == view.snapshot.revision:
            return cached.counts
        rows = _select_rows(view, selection)
        with self._count_lock:
            cached = self._get_cached(view, selection)  # which another thread may have made meanwhile
            if cached is None or not np.array_equal(cached.rows, rows):
                return self._count_and_cache(view, selection, rows)
            self._cache_counts(selection, cached._replace(revision=view.snapshot.revision, is_whole=True))
            return cached.counts

    def count_in_background(self) -> None:
        """Start a background thread in which added documents are counted.

        From now on, `get_latest_counts` may return counts that lack added documents, while the thread counts
        again.
        """
        self._background = ThreadPoolExecutor(1, "knnstore-counting")

    def stop_background(self) -> None:
        """End the background thread if it runs. A count that the thread is making is finished first."""
        background, self._background = self._background, None
        if background is not None:
            background.shutdown(cancel_futures=True)

    def recount_changed(self, view: Callable[[], View]) -> None:
        """Count again, in this thread, each cached selection whose documents have changed.

        Errors are logged, not raised.

        Args:
            view: function that returns the documents of the store at the latest revision.
        """
        with self._cache_lock:
            selections = list(self._cache)
        for selection in selections:
            try:
                self.get_exact(view(), selection)
            except KnnstoreError:  # a query that needs these counts raises the same error
                _logger.debug("n-grams could not be counted again", exc_info=True)

    def get_latest_counts(
        self, view: Callable[[], View], selection: Selection, attempts: int
    ) -> NGramCounts | None:
        """Return the n-gram counts of a selection; they may lack documents that were added a short time ago.

        The counts never include removed documents. If a document is removed during counting, the method
        counts again. After a call of `count_in_background`, cached counts are returned at once, even if they
        lack documents that were added since. Then the background thread counts again.

        Args:
            view: function that returns the documents of the store at the latest revision.
            selection: documents to count.
            attempts: largest number of times that the method counts.

        Returns:
            The counts; None if documents were removed during all attempts.
        """
        for _ in range(attempts):
            first_view = view()
            cached = self._get_cached(first_view, selection)
            if cached is not None and cached.is_whole and cached.revision == first_view.snapshot.revision:
                return cached.counts
            counts = self._get_stale_counts(first_view, view, selection) if self._background else None
            if counts is not None:
                return counts
            counts = self.get_exact(first_view, selection)
            if counts is None:
                continue
            # Counting takes longer than most commits: what was added meanwhile can wait for the next call.
            current_view = view()
            if (
                current_view is first_view
                or np.isin(_select_rows(first_view, selection), current_view.snapshot.rows).all()
            ):
                return counts
        return None

    def _get_stale_counts(
        self, current_view: View, view: Callable[[], View], selection: Selection
    ) -> NGramCounts | None:
        """Return the cached counts of a selection at once, without counting new documents.

        Documents that the selection no longer contains are taken out of the counts. If documents of the
        selection are missing in the counts, the background thread is asked to count again.

        Args:
            current_view: documents of the store at the latest known revision.
            view: function that returns the documents at the latest revision, for the background thread.
            selection: documents to count.

        Returns:
            The counts; None if no counts of the selection are cached.
        """
        cached, revision = self._get_cached(current_view, selection), current_view.snapshot.revision
        if cached is None or cached.revision == revision:
            return None if cached is None else cached.counts
        rows = _select_rows(current_view, selection)
        counted_rows, counts = cached.rows, cached.counts
        if not np.isin(counted_rows, rows).all():  # what is left of the order is in order: nothing is sorted
            remaining = _SortedDocuments(counted_rows, counts.text).keep_rows(rows)
            counted_rows, counts = remaining.rows, NGramCounts(remaining.text, self._vocabulary)
        is_whole = np.array_equal(counted_rows, rows)
        self._cache_counts(selection, _CachedCounts(revision, is_whole, counted_rows, counts))
        if not is_whole:
            self._queue_ngram_count(view, selection)
        return counts

    def _queue_ngram_count(self, view: Callable[[], View], selection: Selection) -> None:
        """Ask the background thread to count a selection, unless the selection is queued already.

        Without a background thread, the method does nothing. Errors of the thread are logged.

        Args:
            view: function that returns the documents of the store at the latest revision.
            selection: documents to count.
        """

        def count() -> None:
            """Count the n-grams of the selection and cache the counts. Runs in the background thread.

            First removes the selection from the queue, so that it can be queued again. An error is logged and
            not raised.
            """
            self._queued.discard(selection)
            try:
                self.get_exact(view(), selection)
            except Exception:
                _logger.warning("n-grams could not be counted again", exc_info=True)

        background = self._background
        if background is not None and selection not in self._queued:
            self._queued.add(selection)
            background.submit(count)

    def _get_cached(self, view: View, selection: Selection) -> _CachedCounts | None:
        """Return the cached counts of a selection, which may be outdated; None if no counts are cached.

        If the view is newer than all earlier views, documents that the view does not contain are first
        removed from the cached sorted documents.

        Args:
            view: documents of the store at one revision.
            selection: documents whose counts are looked up.
        """
        with self._cache_lock:
            if view.snapshot.revision > self._revision:
                for domains, documents in self._sorted.items():  # of what was removed nothing is kept
                    self._sorted[domains] = documents.keep_rows(view.snapshot.rows)
                self._revision = view.snapshot.revision
            return self._cache.get(selection)

    def _count_and_cache(self, view: View, selection: Selection, rows: Rows) -> NGramCounts | None:
        """Count the n-grams of the selected documents, cache the counts, and return them.

        Args:
            view: documents of the store at one revision.
            selection: documents to count.
            rows: primary keys of the documents that the selection contains in the view.

        Returns:
            The counts; None if a document of the selection's domains was removed after the view's revision.
        """
        domain_documents = self._get_sorted_documents(view, selection.domains)
        if domain_documents is None:
            return None
        counts = NGramCounts(domain_documents.keep_rows(rows).text, self._vocabulary)
        self._cache_counts(selection, _CachedCounts(view.snapshot.revision, True, rows, counts))
        return counts

    def _cache_counts(self, selection: Selection, counts_entry: _CachedCounts) -> None:
        """Put counts into the cache as the newest entry, and drop the oldest entries beyond the limits.

        Args:
            selection: documents that were counted; the key of the cache.
            counts_entry: the counts, which replace cached counts of the same selection.
        """
        with self._cache_lock:
            self._cache[selection] = counts_entry
            self._cache.move_to_end(selection)
            size = sum(one.counts.nbytes for one in self._cache.values())
            while len(self._cache) > _MIN_CACHED and size > _MAX_CACHED_BYTES:
                size -= self._cache.popitem(last=False)[1].counts.nbytes

    def _get_sorted_documents(self, view: View, domains: Domains) -> _SortedDocuments | None:
        """Sort the tokens of all documents of some domains, cache the result, and return it.

        If the same documents are cached already, nothing is sorted.

        Args:
            view: documents of the store at one revision.
            domains: names of the domains; None means all domains.

        Returns:
            The sorted documents; None if a document was removed after the view's revision.

        Raises:
            ConfigError: the documents have too much text to be sorted together.
        """
        is_selected = view.mask_documents(Selection(domains=domains))
        rows = view.snapshot.rows[is_selected]
        with self._cache_lock:
            documents = self._sorted.get(domains)
        if documents is None or not np.array_equal(documents.rows, rows):
            texts = view.read_tokens(is_selected)
            if texts is None:
                return None
            if sum(map(len, texts)) + 2 * len(texts) >= MOST:
                raise ConfigError(
                    f"n-grams can be counted over at most {MOST:,} tokens: select fewer domains"
                )
            starts = view.snapshot.starts[is_selected]
            documents = _SortedDocuments(rows, SortedText.from_texts(texts, starts, self._vocabulary + 1))
        with self._cache_lock:
            self._sorted[domains] = documents
            self._sorted.move_to_end(domains)
            if len(self._sorted) > _MIN_CACHED:
                self._sorted.popitem(last=False)
        return documents


def _select_rows(view: View, selection: Selection) -> Rows:
    """Return the primary keys of the documents that a selection contains in a view.

    The keys are in the order of the documents' positions in the store.
    """
    rows: Rows = view.snapshot.rows[view.mask_documents(selection)]
    return rows
