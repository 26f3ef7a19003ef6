"""Following pointers, and drafts."""

from knnstore.lm.retrieval.drafts import Drafts
from knnstore.lm.retrieval.pointers import Retrieval, retrieve_in_step
from knnstore.lm.retrieval.text_pointers import TextPass, retrieve_for_pass

__all__ = ["Drafts", "Retrieval", "TextPass", "retrieve_for_pass", "retrieve_in_step"]
