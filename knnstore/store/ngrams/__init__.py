"""Counts of the n-grams of stored text, from which the probability of the next token is computed.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7). For a context h, the
context h' without the first symbol of h, and a token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

c(h w) is the count of the n-gram h w. c(h) is the sum of these counts over all tokens after h, and n(h) is
the number of different tokens after h. D is a discount. The longest n-grams count as often as they occur. A
shorter n-gram counts once for each different symbol before it (continuation count). An n-gram at the
beginning of a document has no symbol before it, so each of these occurrences counts. The discount D of each
length is n1 / (n1 + 2 n2), where n1 and n2 are the numbers of n-grams with count 1 and with count 2. The
probability of a unigram is its share of all counts.

Data structure. The documents are joined to one array of symbols. Its indices, called places, are sorted by
the `DEPTH` symbols that begin there (`suffix_array`). All occurrences of an n-gram are therefore a range of
the suffix array, found by bisection, and its continuations are ranges inside that range. For each n-gram
length there are two series of bits (`ngram_counts`). The first marks the first occurrence of each different
n-gram. The second marks the first occurrence of each n-gram with each preceding symbol. The number of bits
that are set before a place is looked up in constant time (`ranked_bits`). Every count in the formula is a
number of bits in a range: n(h) counts bits of the first series, c counts bits of the second series, or is the
length of the range. So a context that occurs a million times costs as much as a rare context. Only a whole
distribution lists its tokens one by one (`matches`).

Exact for every selection. Documents that are not selected, or not live, are removed from the suffix array.
The rest of the array is still sorted, and the bits are computed from it. So counts and discounts equal those
of a store that never had the other documents.

All of this is computed in memory from the tokens in the catalog, and saved in no file. It takes 8 bytes a
stored token (10 if the vocabulary has more than 65,532 tokens), and 12 bytes for each token of the
vocabulary. Sorting and counting take less than a second for a million tokens, a tenth of the time to load a
model. So nothing must be verified, moved or erased, and a reader needs no writer.
"""

from knnstore.store.ngrams.matches import Distribution, Matches, Occurrence, Suffixes
from knnstore.store.ngrams.ngram_counts import KeptStep, NGramCounts
from knnstore.store.ngrams.ngram_drafts import Draft, draft_continuation
from knnstore.store.ngrams.suffix_array import DEPTH, MOST, SortedText
from knnstore.store.ngrams.text_overlap import KNOWN, RUN, RUN_LETTERS, Letters, Overlap, Runs

__all__ = [
    "DEPTH",
    "KNOWN",
    "MOST",
    "RUN",
    "RUN_LETTERS",
    "Distribution",
    "Draft",
    "KeptStep",
    "Letters",
    "Matches",
    "NGramCounts",
    "Occurrence",
    "Overlap",
    "Runs",
    "SortedText",
    "Suffixes",
    "draft_continuation",
]
