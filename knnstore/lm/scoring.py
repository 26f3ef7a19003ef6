"""Running the model and one search over every token of held-out documents."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from knnstore.datastore import Ids
from knnstore.documents import TextDocument
from knnstore.lm.encoder import Encoder
from knnstore.lm.mixing import Retrieved
from knnstore.lm.text import in_chunks, tokenized
from knnstore.lm.windows import Batch, pack, prefix_of
from knnstore.progress import Progress
from knnstore.store import KNNStore, Selection, tokens_of

BATCH_TOKENS = 4_096
"""Tokens in one forward pass, padding included."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What is known of n tokens before temperature and λ are chosen."""

    lm_log_probs: Tensor
    """log p_LM of each token, float32, shape (n,)."""
    ids: Ids
    """The neighbours' records, shape (n, k), -1 where one is missing."""
    distances: Tensor
    """To the neighbours, float32, shape (n, k), +inf where one is missing."""
    tokens: Tensor
    """Of the neighbours, int64, shape (n, k)."""
    gold: Tensor
    """The tokens themselves, int64, shape (n,)."""
    keys: Tensor
    """What was searched for, float32, shape (n, d)."""

    def retrieved(self) -> Retrieved:
        """What a mixer chooses λ from."""
        return Retrieved(self.distances, self.tokens, keys=self.keys)


def score_batch(store: KNNStore, encoder: Encoder, batch: Batch, k: int, selection: Selection) -> TokenScores:
    """Score the tokens that one batch of windows predicts; see `score`."""
    encoded = encoder.encode(batch.input_ids, batch.at)
    keys = encoded.keys.cpu()
    found = store.search(keys.numpy(), k, selection)
    return TokenScores(
        lm_log_probs=encoder.gold_log_probs(encoded.states, batch.gold).cpu(),
        ids=found.ids,
        distances=torch.from_numpy(found.distances),
        tokens=torch.from_numpy(tokens_of(found.ids)),
        gold=torch.from_numpy(batch.gold),
        keys=keys,
    )


def score(
    store: KNNStore,
    encoder: Encoder,
    tokenizer: PreTrainedTokenizerBase,
    documents: Iterable[TextDocument],
    *,
    k: int,
    selection: Selection,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
) -> Iterator[TokenScores]:
    """Run the model and one search over every token of some documents.

    Args:
        store: where to search.
        encoder: the store's model.
        tokenizer: the model's tokenizer.
        documents: read once, a few at a time.
        k: neighbours of each token.
        selection: among which documents to search.
        batch_tokens: tokens in one forward pass, padding included.
        progress: hears of each batch.

    Yields:
        The scores of a batch of windows; together every token once.
    """
    shown = progress or Progress()
    for ahead in in_chunks(documents):
        for batch in pack(
            tokenized(ahead, tokenizer),
            prefix=prefix_of(tokenizer),
            max_length=store.identity.max_length,
            stride=store.identity.stride,
            batch_tokens=batch_tokens,
        ):
            yield score_batch(store, encoder, batch, k, selection)
            shown.advance(len(batch.at))
