"""Counts of the n-grams of stored text, for the probability of a token after exactly these tokens.

Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7). Of a context h, its end
h' without the first symbol, and a token w:

    p(w | h) = max(c(h w) - D, 0) / c(h) + D n(h) / c(h) p(w | h')

The longest n-grams count as often as they occur. A shorter n-gram counts once for each different symbol
before it (continuation count). At the beginning of a document no symbol comes before, so each occurrence
counts. c(h) is the sum of the counts of all tokens after h, n(h) is the number of different tokens after h.
The discount D of each length is n1 / (n1 + 2 n2), where n1 and n2 are the numbers of n-grams with count 1 and
2. The probability of a unigram is its share of all counts.

Data structure. Documents are laid out one after another, and their places are sorted by the next `DEPTH`
symbols (`suffix_array`). An n-gram is therefore a range of the suffix array, found by bisection, and its
continuations are ranges inside that range. For each n-gram length, one bit for each place marks the first
occurrence of an n-gram, and another bit marks its first occurrence with the preceding symbol
(`ngram_counts`). The number of bits that are set before a place is looked up in constant time
(`ranked_bits`). Every count of the formula is a count of bits in a range: n(h) counts bits of the first kind,
c counts bits of the second kind or is the length of the range. A context that occurs a million times
therefore costs as much as a rare one, and only the tokens of a distribution are listed (`matches`).

Exact for every selection. Documents that are not selected, or not live, are removed from the suffix array.
The rest of the array is still sorted, and the bits are computed from it. So counts and discounts equal those
of a store that never had the other documents.

All of this is computed in memory from the tokens in the catalog, and saved in no file. It takes 8 bytes a
stored token (10 if the vocabulary has more than 65,532 tokens), and 12 bytes for each token of the
vocabulary. Sorting and counting take less than a second for a million tokens, a tenth of the time to load a
model. So nothing must be verified, moved or erased, and a reader needs no writer.
"""

from knnstore.store.ngrams.matches import Distribution, Matches, Occurrence, Suffixes, compute_last_probs
from knnstore.store.ngrams.ngram_counts import NGramCounts
from knnstore.store.ngrams.ngram_drafts import Draft, draft_from
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
    "Letters",
    "Matches",
    "NGramCounts",
    "Occurrence",
    "Overlap",
    "Runs",
    "SortedText",
    "Suffixes",
    "compute_last_probs",
    "draft_from",
]
