"""Searching the store for a mixer, following pointers, and drafts."""

from knnstore.lm.retrieval.drafts import Drafts
from knnstore.lm.retrieval.pointers import retrieve_in_step
from knnstore.lm.retrieval.search import columns_of, reachable, retrieve, visit, visits_cells
from knnstore.lm.retrieval.text_pointers import TextPass, retrieve_for_pass

__all__ = [
    "Drafts",
    "TextPass",
    "columns_of",
    "reachable",
    "retrieve",
    "retrieve_for_pass",
    "retrieve_in_step",
    "visit",
    "visits_cells",
]
