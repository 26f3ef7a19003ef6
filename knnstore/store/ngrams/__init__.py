"""Counts of the n-grams of stored text: which words follow exactly these words.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7). Of a context h, its end
h' without the first symbol, and a token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

The longest n-grams count as often as they occur. A shorter one counts once for each different symbol before
it; the beginning of a document has nothing before it, so there each occurrence counts. c(h) is the sum of
what comes after h, n(h) how many different tokens do, D of each length is n1 / (n1 + 2 n2) of the n-grams
that count once and twice. Single tokens, the unigrams, have the share of their counts.

What is kept. Documents are laid out one after another, and their places sorted by the `DEPTH` symbols that
follow (`sorting`). So an n-gram is a range of this order, found by bisection, and what comes after it are
the ranges in it. For each length one bit a place says that an n-gram comes first here, and one that it
comes first with the symbol before it (`counts`); bits before a place are counted at once (`ranks`). All of
the formula are such counts in a range: n(h) is of the first kind, c of the second, or the length of the
range. So a context that occurs a million times costs what another costs, and nothing is listed but what a
distribution consists of (`matches`).

Exact for every selection. Documents that are not selected, or not live, are taken out of the order, what is
left is in order, and the bits are made of that: counts and discounts are those of a store that never held
anything else.

All of it is derived from the tokens in the catalog, in memory, and nothing in a file: 8 bytes a token, 10
where the vocabulary has more than 65,532, and 12 for each token of the vocabulary. Sorting and counting take
less than a second for a million tokens, a tenth of what loading a model does. So there is nothing to verify,
to move and to erase, and a reader needs no writer.
"""

from knnstore.store.ngrams.counts import NGramCounts
from knnstore.store.ngrams.drafts import Draft, draft_from
from knnstore.store.ngrams.letters import Letters
from knnstore.store.ngrams.matches import Distribution, Matches, Occurrence, Suffixes
from knnstore.store.ngrams.runs import KNOWN, RUN, RUN_LETTERS, Overlap, Runs
from knnstore.store.ngrams.sorting import DEPTH, MOST, SortedText

__all__ = [
    "DEPTH", "KNOWN", "MOST", "RUN", "RUN_LETTERS", "Distribution", "Draft", "Letters", "Matches",
    "NGramCounts", "Occurrence", "Overlap", "Runs", "SortedText", "Suffixes", "draft_from",
]  # fmt: skip
