"""Counting what is asked for: the n-grams of the documents of a selection, as they are live now."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from knnstore.errors import ConfigError
from knnstore.store.ngrams import MOST, NGramCounts, SortedText
from knnstore.store.selection import Selection
from knnstore.store.view import View

_KEPT = 4
"""Selections, and sets of domains, of which each takes 10 bytes a token at most."""

Domains = tuple[str, ...] | None

K = TypeVar("K")
V = TypeVar("V")


class _Documents(NamedTuple):
    """Some documents in order."""

    rows: NDArray[np.int64]
    """Primary keys, in the order of their positions."""
    text: SortedText

    def among(self, rows: NDArray[np.int64]) -> "_Documents":
        """Those that are among some others."""
        chosen = np.isin(self.rows, rows)
        return _Documents(self.rows[chosen], self.text.only(chosen))


class Counting:
    """Counts of n-grams by selection, remembering the latest.

    Args:
        vocabulary: how many tokens there are.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._revision = -1
        self._counts: OrderedDict[Selection, NGramCounts] = OrderedDict()
        self._sorted: OrderedDict[Domains, _Documents] = OrderedDict()
        self._making = threading.Lock()

    def of(self, view: View, selection: Selection) -> NGramCounts | None:
        """Count the n-grams of the selected documents; None where one of them was removed since.

        Raises:
            DomainNotFoundError, DocumentNotFoundError: as `View.scope`.
            ConfigError: there is too much text.
        """
        with self._making:
            if view.snapshot.revision != self._revision:
                self._counts.clear()
                for domains, documents in self._sorted.items():  # of what was removed nothing is kept
                    self._sorted[domains] = documents.among(view.snapshot.rows)
                self._revision = view.snapshot.revision
            counts = self._counts.get(selection)
            if counts is None:
                chosen = view.chosen(selection)
                every = self._in_order(view, selection.domains)
                if every is None:
                    return None
                counts = NGramCounts(every.among(view.snapshot.rows[chosen]).text, self._vocabulary)
            return _kept(self._counts, selection, counts)

    def latest(self, view: Callable[[], View], selection: Selection, attempts: int) -> NGramCounts | None:
        """Count as `of` does until nothing of it was removed meanwhile; None after so many attempts."""
        for _ in range(attempts):
            seen = view()
            counts = self.of(seen, selection)
            if counts is None:
                continue
            # Counting takes longer than most commits: what was added meanwhile can wait for the next call.
            now = view()
            if now is seen or np.isin(seen.snapshot.rows[seen.chosen(selection)], now.snapshot.rows).all():
                return counts
        return None

    def _in_order(self, view: View, domains: Domains) -> _Documents | None:
        """All documents of some domains."""
        chosen = view.chosen(Selection(domains=domains))
        rows = view.snapshot.rows[chosen]
        documents = self._sorted.get(domains)
        if documents is None or not np.array_equal(documents.rows, rows):
            self._sorted.pop(domains, None)
            texts = view.texts(chosen)
            if texts is None:
                return None
            if sum(map(len, texts)) + 2 * len(texts) >= MOST:
                raise ConfigError(f"n-grams are counted of {MOST:,} tokens at most: select fewer domains")
            starts = view.snapshot.starts[chosen]
            documents = _Documents(rows, SortedText.of(texts, starts, self._vocabulary + 1))
        return _kept(self._sorted, domains, documents)


def _kept(latest: OrderedDict[K, V], key: K, value: V) -> V:
    latest[key] = value
    latest.move_to_end(key)
    if len(latest) > _KEPT:
        latest.popitem(last=False)
    return value
