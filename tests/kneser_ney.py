"""Interpolated Kneser-Ney as it is defined, with dictionaries: what counts of n-grams are compared with."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


class KneserNey:
    """The model of some texts with n-grams of up to `order` tokens; -1 stands before each text."""

    def __init__(self, texts: Iterable[Sequence[int]], order: int) -> None:
        self.order = order
        seen = defaultdict(set)  # an n-gram, and what tells those of its occurrences apart that count
        for number, text in enumerate(texts):
            symbols = [-1, *map(int, text)]
            for at in range(len(symbols)):
                for length in range(1 + (at == 0), min(order, len(symbols) - at) + 1):
                    place = (number, at) if at == 0 or length == order else symbols[at - 1]
                    seen[tuple(symbols[at : at + length])].add(place)
        self.after = defaultdict(dict)
        for ngram, places in seen.items():
            self.after[ngram[:-1]][ngram[-1]] = len(places)
        numbers = Counter((len(ngram), len(places)) for ngram, places in seen.items())
        once, twice = ([numbers[length, count] for length in range(order + 1)] for count in (1, 2))
        self.discounts = [n1 / (n1 + 2 * n2) if n1 else 0 for n1, n2 in zip(once, twice, strict=True)]

    def longest(self, context: Sequence[int]) -> int:
        """How long the longest end of a context is after which anything comes."""
        ends = range(1, min(self.order - 1, len(context)) + 1)
        return max([0, *(n for n in ends if tuple(map(int, context[-n:])) in self.after)])

    def probs(self, context: Sequence[int], vocabulary: int) -> np.ndarray:
        """The distribution of what comes after a context, which -1 begins if it is a text's beginning."""
        found = np.zeros(vocabulary)
        for length in range(min(self.order - 1, len(context)) + 1):
            after = self.after.get(tuple(map(int, context[len(context) - length :])))
            if after is None:
                continue
            discount = self.discounts[length + 1] if length else 0
            found *= discount * len(after) / sum(after.values())
            for token, count in after.items():
                found[token] += max(count - discount, 0) / sum(after.values())
        return found
