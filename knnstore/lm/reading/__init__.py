"""Tokens, windows, keys and log-probabilities of documents; adding documents to a store; loading models."""

from knnstore.lm.reading.adding import Added, Synced, add, sync
from knnstore.lm.reading.checkpoints import check_checkpoint
from knnstore.lm.reading.encoder import (
    Encoded,
    Encoder,
    LogProbs,
    check_logits,
    create_not_finite_error,
    vocabulary_size,
)
from knnstore.lm.reading.model_cache import (
    CACHE_NAMES,
    DummyLayer,
    as_cache_argument,
    find_cache,
    get_cache_argument_name,
)
from knnstore.lm.reading.models import (
    check_matches,
    check_runs,
    check_tokenizer,
    choose_window,
    get_model_name,
    identify,
    identify_text,
    is_causal,
    load_model,
    load_text_parts,
    loaded,
    warn_of_unknown_tokens,
)
from knnstore.lm.reading.new_documents import NewDocuments
from knnstore.lm.reading.reader import TextReader, check_tokens, in_chunks, tokenized, usable_documents
from knnstore.lm.reading.sample import sample_keys, sample_tokens
from knnstore.lm.reading.token_text import (
    Detokenizer,
    TokenPiece,
    TokenTexts,
    decode_tokens,
    get_token_letters,
    named_panics,
    split_text,
)
from knnstore.lm.reading.windows import BATCH_TOKENS, Tokens, WindowBatch, pack, prefix_of

__all__ = [
    "BATCH_TOKENS",
    "CACHE_NAMES",
    "Added",
    "Detokenizer",
    "DummyLayer",
    "Encoded",
    "Encoder",
    "LogProbs",
    "NewDocuments",
    "Synced",
    "TextReader",
    "TokenPiece",
    "TokenTexts",
    "Tokens",
    "WindowBatch",
    "add",
    "as_cache_argument",
    "check_checkpoint",
    "check_logits",
    "check_matches",
    "check_runs",
    "check_tokenizer",
    "check_tokens",
    "choose_window",
    "create_not_finite_error",
    "decode_tokens",
    "find_cache",
    "get_cache_argument_name",
    "get_model_name",
    "get_token_letters",
    "identify",
    "identify_text",
    "in_chunks",
    "is_causal",
    "load_model",
    "load_text_parts",
    "loaded",
    "named_panics",
    "pack",
    "prefix_of",
    "sample_keys",
    "sample_tokens",
    "split_text",
    "sync",
    "tokenized",
    "usable_documents",
    "vocabulary_size",
    "warn_of_unknown_tokens",
]
