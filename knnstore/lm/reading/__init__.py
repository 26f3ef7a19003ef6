"""Reading text with a model: documents become tokens, windows, keys and log-probabilities."""

from knnstore.lm.reading.adding import Added, add
from knnstore.lm.reading.encoder import Encoder
from knnstore.lm.reading.models import check_matches, identify, load_model, loaded, name_of, window_of
from knnstore.lm.reading.reader import TextReader, in_chunks
from knnstore.lm.reading.sample import sample_keys, sample_tokens
from knnstore.lm.reading.windows import BATCH_TOKENS, Batch, Tokens

__all__ = [
    "BATCH_TOKENS", "Added", "Batch", "Encoder", "TextReader", "Tokens", "add", "check_matches", "identify",
    "in_chunks", "load_model", "loaded", "name_of", "sample_keys", "sample_tokens", "window_of",
]  # fmt: skip
