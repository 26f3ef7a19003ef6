"""What is mixed with the model: a module each, and a line in `mixture`."""

from knnstore.lm.retrieval.components.mixture import experts_of, factors_in_use, mixture_of
from knnstore.lm.retrieval.components.ngrams import ngram_lambdas
from knnstore.lm.retrieval.components.recent import recent_temperatures

__all__ = ["experts_of", "factors_in_use", "mixture_of", "ngram_lambdas", "recent_temperatures"]
