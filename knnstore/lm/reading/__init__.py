"""Reading text with a model: documents become tokens, windows, keys and log-probabilities."""

from knnstore.lm.reading.adding import COMMIT_TOKENS, Added, add_documents
from knnstore.lm.reading.encoder import Encoder
from knnstore.lm.reading.models import check_matches, identify, load_model, window_of
from knnstore.lm.reading.sample import sample_keys, sample_tokens
from knnstore.lm.reading.tokens import count_predicted, in_chunks, tokenized
from knnstore.lm.reading.windows import BATCH_TOKENS, Batch, Tokens, pack, prefix_of

__all__ = [
    "BATCH_TOKENS",
    "COMMIT_TOKENS",
    "Added",
    "Batch",
    "Encoder",
    "Tokens",
    "add_documents",
    "check_matches",
    "count_predicted",
    "identify",
    "in_chunks",
    "load_model",
    "pack",
    "prefix_of",
    "sample_keys",
    "sample_tokens",
    "tokenized",
    "window_of",
]
