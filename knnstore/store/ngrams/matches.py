"""Look-up of the n-grams of texts in the stored documents.

`Matches` computes probabilities of next tokens, and finds the places in the store where the last symbols of a
text occur. A symbol is a token id plus 1, or the start of a document.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from knnstore.store.ngrams.ngram_counts import NGramCounts
from knnstore.store.ngrams.ranked_bits import Places
from knnstore.store.ngrams.suffix_array import DEPTH, END, Symbols, lay_out_texts

_PLACES_AT_ONCE = 1 << 13
"""Number of symbols of the texts that are looked up in one step, so that the data fit into a CPU's cache."""
_LISTED_AT_ONCE = 1 << 18
"""Number of next tokens, of all contexts together, that are listed in one step."""
_KEPT_ENDS = 256
"""Number of ends of texts whose ranges are cached, so that the next step of generation only extends them."""

Range = tuple[int, int]
"""Start and stop of a range of the suffix array."""


class Suffixes(NamedTuple):
    """For each of q contexts: the longest suffix that the store has with a token after it.

    A suffix is a series of the context's last symbols. A symbol is a token, or the start of a document.
    """

    lengths: NDArray[np.int64]
    """Number of symbols of the suffix, the start symbol included, shape (q,); 0 if no suffix was found."""
    counts: Places
    """Number of times that the suffix occurs in the store with a next token, shape (q,)."""
    successors: Places
    """Number of different tokens that follow the suffix in the store, shape (q,)."""


class Distribution(NamedTuple):
    """Kneser-Ney distributions of the next token after q contexts, as one sparse list of e entries.

    The probability of a token after a context is the sum of the token's entries for this context, plus `rest`
    times the token's unigram probability.
    """

    rows: Places
    """Index of the context of each entry, ascending, shape (e,)."""
    tokens: Places
    """Token id of each entry, shape (e,). A token may have several entries for one context, one for each
    suffix length."""
    probs: NDArray[np.float64]
    """Probability of each entry, shape (e,)."""
    occurrences: Places
    """Number of times that the entry's token follows its suffix in the store, shape (e,)."""
    rest: NDArray[np.float64]
    """Weight of the unigram distribution (`NGramCounts.unigrams`) for each context, shape (q,)."""
    suffixes: Suffixes
    """The longest suffix of each context that the store has with a token after it."""

    def find_bounds(self) -> list[int]:
        """Return the index of each context's first entry, and the number of all entries, q + 1 numbers."""
        bounds: list[int] = np.searchsorted(self.rows, np.arange(len(self.rest) + 1)).tolist()
        return bounds

    def find_top_tokens(self) -> Places:
        """Find the token that most often follows the longest suffix of each context.

        Returns:
            Token ids, int64, shape (q,), the same as `Matches.find_top_tokens` returns.
        """
        tops = np.full(len(self.rest), -1)
        bounds, successors = self.find_bounds(), self.suffixes.successors.tolist()
        for row, (first, count) in enumerate(zip(bounds, successors, strict=False)):
            if count:  # the tokens after the longest suffix are the first entries, by ascending id
                tops[row] = self.tokens[first + self.occurrences[first : first + count].argmax()]
        return tops

    def token_probs(self, tokens: Places, unigrams: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the probability of one token after each context.

        Args:
            tokens: the tokens, int64, shape (q,); -1 for no token.
            unigrams: unigram probability of each token of the vocabulary (`NGramCounts.unigrams`).

        Returns:
            Probabilities, float32, shape (q,); 0 for no token.
        """
        is_token = self.tokens == tokens[self.rows]
        listed = np.bincount(self.rows[is_token], self.probs[is_token], len(tokens))
        return np.where(tokens < 0, 0, listed + self.rest * unigrams[tokens]).astype(np.float32)


class Occurrence(NamedTuple):
    """A place in the stored text where the last symbols of a context are followed by a certain token.

    A context is a text up to some symbol. The token is the next token of the text after the context.
    """

    position: int
    """Position of the token in the store."""
    matched: int
    """Number of symbols before this position that equal the last symbols of the context."""
    share: float
    """The part of the token's probability after the context that comes from this place."""


class _ContextLevels(NamedTuple):
    """Counts and Kneser-Ney weights of the suffixes of q contexts, for l suffix lengths.

    A suffix is a series of a context's last symbols. Column j of the arrays belongs to the suffixes with
    lengths[j] symbols: the longest suffix comes first, the last symbol alone comes last. The Kneser-Ney
    probability mixes the levels: at each level, the distribution after the suffix is added to a factor times
    the distribution of the next shorter suffix.
    """

    lengths: Places
    """Number of symbols of the suffixes, descending, shape (l,)."""
    is_stored: NDArray[np.bool_]
    """True if the store has the suffix with a token after it, shape (q, l)."""
    ranges: Places
    """Start and stop of the suffix's range in the suffix array of the stored text, shape (2, q, l)."""
    successors: Places
    """Number of different tokens that follow the suffix in the store, shape (q, l)."""
    total: Places
    """Sum of the counts of all tokens that follow the suffix, shape (q, l); 1 where `is_stored` is False."""
    discounts: NDArray[np.float64]
    """Kneser-Ney discount for each length, shape (l,)."""
    shorter_weights: NDArray[np.float64]
    """Factor of the distribution of the next shorter suffix, shape (q, l); 1 where `is_stored` is False."""

    @property
    def total_weights(self) -> NDArray[np.float64]:
        """Weight of each level in the whole mixture, for q contexts and l suffix lengths, shape (q, l).

        The weight of the longest suffix is 1. The weight of each other suffix is the product of
        `shorter_weights` of all suffixes that are longer than it.
        """
        return np.concatenate(
            [np.ones_like(self.shorter_weights[:, :1]), self.shorter_weights[:, :-1]], 1
        ).cumprod(1)


class Matches:
    """Some texts, with the ranges of the suffix array where the stored text has their n-grams.

    `look_up_texts` looks up whole texts. `look_up_ends` looks up only the last symbols of texts, for the next
    step of generation. The symbols of all texts (token ids plus 1, and starts of documents) are joined to one
    array. A *context* is a text up to one of its symbols; the methods receive it as the index of this symbol
    in the joined array. Their argument `order` is the length of the longest n-grams that are used, 2 to
    `DEPTH`, the predicted token included.

    Args:
        counts: n-gram counts of the stored text.
        symbols: joined symbols of the texts, as `lay_out_texts` returns them.
        firsts: index of each text's first token in `symbols`.
    """

    def __init__(self, counts: NGramCounts, symbols: Symbols, firsts: Places) -> None:
        self._counts = counts
        self._symbols = symbols
        self.firsts = firsts
        """Index of each text's first token in the joined symbols, shape (texts,).

        In a result of `look_up_ends`, it is the index of each end's last symbol.
        """
        self._ranges = np.zeros((2, DEPTH, len(symbols)), np.int64)  # by length - 1 and first symbol

    @classmethod
    def look_up_texts(
        cls,
        counts: NGramCounts,
        texts: Sequence[NDArray[np.integer[Any]]],
        begins: Sequence[bool] | None = None,
    ) -> Self:
        """Look up all n-grams of some texts in the stored text, and return the result.

        Args:
            counts: n-gram counts of the stored text.
            texts: token ids of each text, shapes (n_i,).
            begins: for each text, True if it is the beginning of a document; None means that all texts are.
        """
        matches = cls(counts, *lay_out_texts(texts, counts.start, begins))
        symbols = len(matches._symbols)
        for start in range(0, symbols, _PLACES_AT_ONCE):
            matches._find_ranges(np.arange(start, min(start + _PLACES_AT_ONCE, symbols)))
        return matches

    @classmethod
    def look_up_ends(cls, counts: NGramCounts, ends: Sequence[Sequence[int]], begins: Sequence[bool]) -> Self:
        """Look up the n-grams that end with the last token of each text, and return the result.

        During generation, the previous step has looked up the same text without its last token. These n-grams
        are cached, and only extended by the last token.

        Args:
            counts: n-gram counts of the stored text.
            ends: the last token ids of each text, at most `DEPTH` - 1.
            begins: for each end, True if it is a whole text that begins a document.
        """
        symbols_of_ends = [
            [*([counts.start] if is_start else []), *(token + 1 for token in end)] or [END]
            for end, is_start in zip(ends, begins, strict=True)
        ]
        lasts = np.cumsum([len(symbols) for symbols in symbols_of_ends], dtype=np.int64) - 1
        joined = np.array([symbol for symbols in symbols_of_ends for symbol in symbols], np.uint32)
        matches = cls(counts, joined, lasts)
        for symbols, last in zip(symbols_of_ends, lasts.tolist(), strict=True):
            matches._look_up_end(tuple(symbols[1 - DEPTH :]), last)
        return matches

    def target_probs(self, indices: Places, order: int) -> NDArray[np.float32]:
        """Compute the Kneser-Ney probability of the token that follows each context in its text.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,); a token must follow
                it.
            order: length of the longest n-grams that are used, 2 to `DEPTH`.

        Returns:
            Probabilities, float32, shape (q,). For a token outside the vocabulary, the unigram probability in
            the mixture is 0.
        """
        levels = self._compute_levels(indices, order)
        symbols = self._symbols[indices + 1].astype(np.int64)
        return self._compute_probs(levels, symbols, self._extend_ranges(indices, levels), order)

    def find_top_tokens(self, indices: Places, suffixes: Suffixes) -> Places:
        """Find the token that most often follows the longest suffix of each context in the stored text.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            suffixes: the longest suffix of each context that the store has with a token after it.

        Returns:
            Token ids, int64, shape (q,). If several tokens have the largest count, the smallest id. -1 for a
            context without a suffix.
        """
        text, tokens = self._counts.text, np.full(len(indices), -1)
        found = np.flatnonzero(suffixes.lengths)
        # A suffix lists its next tokens, and scans one bit for each occurrence.
        sizes = suffixes.successors[found] + suffixes.counts[found] // 64
        for rows in np.split(found, np.flatnonzero(np.diff(sizes.cumsum() // _LISTED_AT_ONCE)) + 1):
            if not len(rows):
                continue
            lengths = suffixes.lengths[rows]
            ranges = self._ranges[:, lengths - 1, indices[rows] - lengths + 1]
            owners, starts, stops = self._list_continuations(lengths, ranges)
            seen, firsts = stops - starts, np.searchsorted(owners, np.arange(len(rows)))
            most_seen = np.maximum.reduceat(seen, firsts)
            tops = np.flatnonzero(seen == most_seen[owners])
            tops = tops[np.searchsorted(tops, firsts)]
            tokens[rows] = text.symbols[text.order[starts[tops]] + lengths].astype(np.int64) - 1
        return tokens

    def token_probs(self, indices: Places, tokens: Places, order: int) -> NDArray[np.float32]:
        """Compute the Kneser-Ney probability of one token after each context, whatever follows in the text.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            tokens: the tokens, int64, shape (q,); -1 for no token.
            order: length of the longest n-grams that are used, 2 to `DEPTH`.

        Returns:
            Probabilities, float32, shape (q,); 0 for no token.
        """
        levels, symbols = self._compute_levels(indices, order), tokens + 1
        ranges = np.zeros_like(levels.ranges)
        for level, length in enumerate(levels.lengths.tolist()):
            rows = np.flatnonzero(levels.is_stored[:, level] & (symbols != END))
            if len(rows):
                low, high = levels.ranges[:, rows, level]
                wanted = symbols[rows].astype(self._symbols.dtype)
                ranges[:, rows, level] = self._narrow_ranges(length, low, high, wanted)
        return self._compute_probs(levels, symbols, ranges, order)

    def next_token_distribution(self, indices: Places, order: int) -> Distribution:
        """Compute the Kneser-Ney distribution of the next token after each context.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            order: length of the longest n-grams that are used, 2 to `DEPTH`.

        Returns:
            The distributions of all contexts as one sparse list of entries.
        """
        text, levels = self._counts.text, self._compute_levels(indices, order)
        starts, stops = levels.ranges.reshape(2, -1)
        stops = np.where(levels.is_stored.ravel(), stops, starts)
        lengths = np.tile(levels.lengths, len(indices))
        owners, places, ends = self._list_continuations(lengths, np.stack([starts, stops]))
        lengths, (rows, level) = lengths[owners], np.divmod(owners, order - 1)
        seen = self._count_ngrams(np.stack([places, ends]), lengths + 1, order)
        probs = np.maximum(seen - levels.discounts[level], 0) / levels.total[rows, level]
        probs *= levels.total_weights[rows, level]
        tokens = text.symbols[text.order[places] + lengths].astype(np.int64) - 1
        rest, longest = levels.shorter_weights.prod(1), self._select_longest(levels)
        return Distribution(rows, tokens, probs, ends - places, rest, longest)

    def find_longest_suffixes(self, indices: Places, order: int) -> Suffixes:
        """Find for each context its longest suffix (last symbols) that the store has with a token after it.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            order: length of the longest n-grams that are used, 2 to `DEPTH`; a suffix has at most order - 1
                symbols.
        """
        return self._select_longest(self._compute_levels(indices, order))

    def find_occurrences(self, indices: Places, order: int, most: int) -> list[list[Occurrence]]:
        """Find places in the store where the last symbols of a context and its next token occur together.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,); a token must follow
                it.
            order: length of the longest n-grams that are used, 2 to `DEPTH`.
            most: largest number of places to add for each number of matching symbols.

        Returns:
            For each context a list of places, longest matches first; empty if no place was found. If no place
            is left out because of `most`, the shares add up to the Kneser-Ney probability of the next token
            without its unigram part.
        """
        text = self._counts.text
        places_by_context: list[dict[int, tuple[int, float]]] = [{} for _ in indices]
        levels = self._compute_levels(indices, order)
        ranges = self._extend_ranges(indices, levels)
        every_seen = self._count_ngrams(ranges, levels.lengths + 1, order)
        for number, length in enumerate(levels.lengths.tolist()):
            starts, stops = ranges[..., number]
            rows = np.flatnonzero(levels.is_stored[:, number] & (stops > starts))
            counts, seen = (stops - starts)[rows], every_seen[rows, number]
            shares = np.maximum(seen - levels.discounts[number], 0.0) / levels.total[rows, number] / counts
            shares *= levels.total_weights[rows, number]
            columns = (array.tolist() for array in (rows, starts[rows], counts, shares))
            for row, start, count, each in zip(*columns, strict=True):
                places = places_by_context[row]
                for place, (matched, share) in places.items():  # longer matches also match this length
                    places[place] = matched, share + each
                listed = text.order[start : start + min(count, most + len(places))] + length
                for place in [place for place in listed.tolist() if place not in places][:most]:
                    places[place] = length, each
        return [self._make_occurrences(places) for places in places_by_context]

    def _make_occurrences(self, found: Mapping[int, tuple[int, float]]) -> list[Occurrence]:
        """Convert the places of one context to a list of `Occurrence` objects, in the same order.

        Args:
            found: pair (number of matching symbols, share of the probability) of each place, by the place's
                index in the stored symbols.
        """
        positions = self._counts.text.store_positions(np.array(list(found), np.int64)).tolist()
        return [
            Occurrence(position, *match) for position, match in zip(positions, found.values(), strict=True)
        ]

    def _compute_levels(self, indices: Places, order: int) -> _ContextLevels:
        """Compute counts and Kneser-Ney weights of all suffixes of the contexts with 1 to order - 1 symbols.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            order: length of the longest n-grams that are used.
        """
        counts, lengths = self._counts, np.arange(order - 1, 0, -1)
        begins = indices[:, None] - lengths + 1
        ranges = self._ranges[:, lengths - 1, np.maximum(begins, 0)]
        successors = counts.count_different(lengths + 1, ranges)
        total = np.empty_like(successors)
        total[:, 0] = counts.count_followed(order - 1, ranges[..., 0])
        total[:, 1:] = counts.continuation_counts(lengths[1:] + 1, ranges[..., 1:])
        is_found = (begins >= 0) & (total > 0)
        total = np.where(is_found, total, 1)
        discounts = np.array([counts.discounts[length + 1].continued for length in lengths.tolist()])
        discounts[0] = counts.discounts[order].raw
        shorter_weights = np.where(is_found, discounts * successors / total, 1.0)
        return _ContextLevels(lengths, is_found, ranges, successors, total, discounts, shorter_weights)

    def _select_longest(self, levels: _ContextLevels) -> Suffixes:
        """Return for each context the longest suffix that the store has with a token after it.

        Args:
            levels: suffixes of the contexts, a result of `_compute_levels`.
        """
        rows, longest = np.arange(len(levels.is_stored)), levels.is_stored.argmax(1)
        is_found = levels.is_stored[rows, longest]
        lengths = levels.lengths[longest]
        counts = self._counts.count_followed(lengths, levels.ranges[:, rows, longest])
        successors = levels.successors[rows, longest]
        return Suffixes(*(np.where(is_found, values, 0) for values in (lengths, counts, successors)))

    def _extend_ranges(self, indices: Places, levels: _ContextLevels) -> Places:
        """Return the suffix-array range of each suffix together with the symbol that follows it in its text.

        Args:
            indices: index of each context's last symbol in the joined texts, shape (q,).
            levels: suffixes of the contexts, a result of `_compute_levels`.

        Returns:
            Start and stop of each range, shape (2, q, l), for l suffix lengths.
        """
        begins = np.maximum(indices[:, None] - levels.lengths + 1, 0)
        return self._ranges[:, levels.lengths, begins]

    def _list_continuations(self, lengths: Places, ranges: Places) -> tuple[Places, Places, Places]:
        """Find the different next symbols of suffixes: the part of a suffix's range that each of them has.

        Args:
            lengths: number of symbols of each suffix, shape (r,).
            ranges: start and stop of each suffix in the suffix array, shape (2, r).

        Returns:
            For each next symbol: the index of its suffix, then start and stop of its part. Suffixes and parts
            are ascending.
        """
        owners, starts = self._counts.list_first_places(lengths + 1, ranges)
        is_last = np.append(owners, -1)[1:] != owners
        return owners, starts, np.where(is_last, ranges[1][owners], np.append(starts, 0)[1:])

    def _compute_probs(
        self, levels: _ContextLevels, symbols: Places, ranges: Places, order: int
    ) -> NDArray[np.float32]:
        """Compute the Kneser-Ney probability of one symbol after each context.

        Args:
            levels: suffixes of the contexts, a result of `_compute_levels`.
            symbols: the symbols: token ids plus 1, or `END` with the probability 0; shape (q,).
            ranges: start and stop, in the suffix array, of each suffix together with the symbol after it,
                shape (2, q, l).
            order: length of the longest n-grams that are used.

        Returns:
            Probabilities, float32, shape (q,).
        """
        unigrams, tokens = self._counts.unigrams, symbols - 1
        is_known = (tokens >= 0) & (tokens < len(unigrams))
        probs = np.where(is_known, unigrams[np.where(is_known, tokens, 0)], 0).astype(np.float64)
        seen = self._count_ngrams(ranges, levels.lengths + 1, order)
        for level in reversed(range(order - 1)):
            own_share = np.maximum(seen[:, level] - levels.discounts[level], 0) / levels.total[:, level]
            probs = np.where(
                levels.is_stored[:, level], own_share + levels.shorter_weights[:, level] * probs, probs
            )
        return probs.astype(np.float32)

    def _count_ngrams(self, ranges: Places, lengths: Places, order: int) -> Places:
        """Return the Kneser-Ney counts of n-grams.

        An n-gram of length `order` counts as often as it occurs. A shorter n-gram counts once for each
        different preceding symbol.

        Args:
            ranges: start and stop of each n-gram in the suffix array, shape (2, ...).
            lengths: number of symbols of each n-gram.
            order: length of the longest n-grams that are used.
        """
        starts, stops = ranges
        continued = self._counts.continuation_counts(np.minimum(lengths, DEPTH - 1), ranges)
        return np.where(lengths == order, stops - starts, continued)

    def _find_ranges(self, indices: Places) -> None:
        """Find the suffix-array ranges of all n-grams that begin at given symbols; store them in `_ranges`.

        Each n-gram is extended by one symbol at a time, until the stored text does not contain it.

        Args:
            indices: indices in the joined texts of the symbols where n-grams begin, shape (n,).
        """
        low, high = self._counts.find_symbol_ranges(self._symbols[indices])
        self._ranges[:, 0, indices] = low, high
        for length in range(1, DEPTH):
            wanted = self._symbols.take(indices + length, mode="clip")
            going = (low < high) & (wanted != END)
            indices, low, high, wanted = indices[going], low[going], high[going], wanted[going]
            if not len(indices):
                return
            low, high = self._narrow_ranges(length, low, high, wanted)
            self._ranges[:, length, indices] = low, high

    def _narrow_ranges(
        self, length: int, low: Places, high: Places, wanted: Symbols
    ) -> tuple[Places, Places]:
        """Extend n-grams by one symbol: find in each n-gram's range the part with a certain next symbol.

        All ranges are bisected at the same time.

        Args:
            length: number of symbols of the n-grams so far.
            low: start of each n-gram's range in the suffix array, shape (n,).
            high: stop of each range, shape (n,), larger than the start.
            wanted: next symbol of each n-gram, shape (n,).

        Returns:
            Start and stop of each extended n-gram's range, shapes (n,); equal if the stored text does not
            contain it.
        """
        symbols, order = self._counts.text.symbols, self._counts.text.order
        smallest = np.concatenate(
            [wanted, wanted + 1]
        )  # the first that is as large begins the part, or ends it
        low, high = np.concatenate([low, low]), np.concatenate([high, high])
        bounds, open_rows = high, np.arange(len(low))
        while True:
            middle = (low + high) >> 1
            less = symbols[order[middle] + length] < smallest
            low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
            is_open = low < high
            bounds[open_rows] = low
            if not is_open.all():
                if not is_open.any():
                    break
                open_rows, low, high, smallest = (
                    open_rows[is_open],
                    low[is_open],
                    high[is_open],
                    smallest[is_open],
                )
        return bounds[: len(wanted)], bounds[len(wanted) :]

    def _look_up_end(self, symbols: tuple[int, ...], last: int) -> None:
        """Find the suffix-array ranges of all n-grams that end with one symbol; store them in `_ranges`.

        Args:
            symbols: the symbol with the symbols before it, 1 to `DEPTH` symbols.
            last: index of the symbol in the joined texts.
        """
        ranges = self._find_ranges_of_end(symbols)
        if len(symbols) > 1:  # the next step of a long text begins with these
            self._counts.ranges_of_ends[symbols[1:]] = ranges[:-1]
        lengths = np.arange(len(ranges))
        self._ranges[:, lengths, last - lengths] = np.transpose(ranges)

    def _find_ranges_of_end(self, symbols: tuple[int, ...]) -> list[Range]:
        """Return the suffix-array range of the last symbol, of the last two symbols, and so on.

        The ranges are cached in `NGramCounts.ranges_of_ends`. For one text, plain Python is faster than
        numpy.

        Args:
            symbols: the last symbols of a text, 1 to `DEPTH`.
        """
        kept = self._counts.ranges_of_ends
        ranges = kept.get(symbols)
        if ranges is None:
            shorter = self._find_ranges_of_end(symbols[:-1]) if len(symbols) > 1 else []
            ((first,), (stop,)) = self._counts.find_symbol_ranges(np.array(symbols[-1:]))
            ranges = [(int(first), int(stop))]
            for length, (low, high) in enumerate(shorter, 1):
                ranges.append(self._narrow_range(length, low, high, symbols[-1]) if low < high else (0, 0))
            if len(kept) >= _KEPT_ENDS:
                kept.clear()
            kept[symbols] = ranges
        return ranges

    def _narrow_range(self, length: int, low: int, high: int, wanted: int) -> tuple[int, int]:
        """Extend one n-gram by a symbol: find in its range the part in which the symbol `wanted` follows.

        Args:
            length: number of symbols of the n-gram so far.
            low: start of the n-gram's range in the suffix array.
            high: stop of the range.
            wanted: next symbol.

        Returns:
            Start and stop of the extended n-gram's range; equal if the stored text does not contain it.
        """
        symbols, order = self._counts.text.symbols.data, self._counts.text.order.data

        def key(place: int) -> int:
            """Return the symbol that follows after `length` symbols from a place of the stored text."""
            return symbols[place + length]

        start = bisect_left(order, wanted, low, high, key=key)
        return start, bisect_right(order, wanted, start, high, key=key)
