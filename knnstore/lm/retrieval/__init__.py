"""What a prediction is mixed with: neighbors from the store, the text's own past, pointers."""

from knnstore.lm.retrieval.cache import Reading, ReadText
from knnstore.lm.retrieval.components import (
    experts_of,
    factors_in_use,
    mixture_of,
    ngram_lambdas,
    recent_temperatures,
)
from knnstore.lm.retrieval.drafts import Drafts
from knnstore.lm.retrieval.ngrams import ReadNGrams, WrittenNGrams
from knnstore.lm.retrieval.own_ngrams import ReadOwnNGrams, WrittenOwnNGrams
from knnstore.lm.retrieval.pointers import retrieve_in_step
from knnstore.lm.retrieval.prefix_states import (
    WrittenTexts,
    check_sequence_ids,
    past_length,
    sequence_ids_of,
    whole_texts,
)
from knnstore.lm.retrieval.search import columns_of, reachable, retrieve, visit, visits_cells
from knnstore.lm.retrieval.text_keys import TextKeys
from knnstore.lm.retrieval.text_pointers import STATES_KEPT, PointerStates, TextPass, retrieve_for_pass
from knnstore.lm.retrieval.text_states import TextStates

__all__ = [
    "STATES_KEPT",
    "Drafts",
    "PointerStates",
    "ReadNGrams",
    "ReadOwnNGrams",
    "ReadText",
    "Reading",
    "TextKeys",
    "TextPass",
    "TextStates",
    "WrittenNGrams",
    "WrittenOwnNGrams",
    "WrittenTexts",
    "check_sequence_ids",
    "columns_of",
    "experts_of",
    "factors_in_use",
    "mixture_of",
    "ngram_lambdas",
    "past_length",
    "reachable",
    "recent_temperatures",
    "retrieve",
    "retrieve_for_pass",
    "retrieve_in_step",
    "sequence_ids_of",
    "visit",
    "visits_cells",
    "whole_texts",
]  # fmt: skip
