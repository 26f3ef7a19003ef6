"""Changes of the store by requests: `StoreWriter` adds and removes documents in a thread of its own.

The engine's thread, which runs the model, only computes the keys of the documents. It does so in turns: short
pieces of work between two decoding steps.
"""

import asyncio
import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from knnstore.documents import OnBad
from knnstore.lm import KNNLM, Added, Encoder, SourceBatch, TextReader, add_documents
from knnstore.progress import Progress
from knnstore.server.engine import Engine, Turns
from knnstore.store import KNNStore

_TURN_TOKENS = 128
"""Number of tokens of a document that the model encodes between two decoding steps."""

Found = TypeVar("Found")


class StoreWriter:
    """Adds documents to the store and removes documents, one change at a time, in a thread of its own.

    This thread tokenizes, and writes to the database and the vector engine. The keys of documents are
    computed by the model in the engine's thread.

    Args:
        lm: the model, with the store that is changed.
        engine: the engine whose thread runs the model.
    """

    def __init__(self, lm: KNNLM, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "knnstore-writing")
        self._encoder = lm.key_encoder
        tokenizer = copy.deepcopy(lm.reader.tokenizer)
        reader = replace(lm.reader, tokenizer=tokenizer)
        self._model_parts = _ModelParts(lm.store, tokenizer, reader, lm.after_adding)

    async def add_document(
        self, document: object, domain: str, tags: list[str], count: Callable[[int], None], on_bad: OnBad
    ) -> Mapping[str, int]:
        """Add a document in the writer's thread, and wait until it is stored.

        Args:
            document: the document, in any form that `KNNLM.add` takes.
            domain: name of the domain that the document is added to.
            tags: tags (labels) of the document.
            count: function that is called in the writer's thread after the model has read a part of the
                document. Its argument is the number of tokens of this part. It is called again with the
                number of tokens of a source.
            on_bad: function that is called with the error if the document cannot be used. The document is
                then left out.

        Returns:
            The fields of `Added` by name: the numbers of documents that were added, replaced, described (only
            metadata or tags changed) and unchanged, and the number of stored tokens.
        """

        def add_to_store() -> Added:
            """Add the document in the writer's thread, and return the counts."""
            encoder = _TurnEncoder(self._encoder, self._engine, count)
            reader = replace(self._model_parts.reader, encoder=encoder)  # type: ignore[arg-type]
            return add_documents(
                replace(self._model_parts, reader=reader),
                [document],
                domain=domain,
                tags=tags,
                on_bad=on_bad,
                batch_tokens=_TURN_TOKENS,
                progress=_TokenCounter(count),
            )

        change = await self._run_in_thread(add_to_store)
        return {
            name: getattr(change, name) for name in ("added", "replaced", "described", "unchanged", "tokens")
        }

    async def remove_and_wait(self, remove_from: Callable[[KNNStore], Found]) -> Found:
        """Run a function that removes documents from the store, and return the function's result.

        When this method returns, the n-grams have been counted again, and no later token of any text is
        predicted with the removed documents.

        Args:
            remove_from: function that removes documents; its argument is the store. It is called in the
                writer's thread.
        """
        removed = await self._run_in_thread(lambda: remove_from(self._model_parts.store))
        await self.count_ngrams()
        # Wait for the current step of the engine: it may have begun before the removal.
        await asyncio.wrap_future(self._engine.call(lambda: None, is_part=True))
        return removed

    async def count_ngrams(self) -> None:
        """Count the n-grams again where documents have changed, and wait until they are counted.

        The writer's thread counts. Texts that are decoded meanwhile use the old counts.
        """
        await self._run_in_thread(self._model_parts.store.recount_changed_ngrams)

    def shut_down(self) -> None:
        """Wait for the current change, and cancel the waiting changes. Stop the engine before this call."""
        self._thread.shutdown(cancel_futures=True)

    async def _run_in_thread(self, work: Callable[[], Found]) -> Found:
        """Run a function without arguments in the writer's thread, and return its result.

        The function waits until all earlier functions have ended.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass
class _ModelParts:
    """The parts of a model that `add_documents` needs, with a tokenizer of their own."""

    store: KNNStore
    tokenizer: Any
    reader: TextReader
    after_adding: Callable[[], None]
    """Called without arguments after documents were added."""


class _TurnEncoder:
    """Wrapper of an encoder that computes the keys of texts in the engine's thread, in turns.

    A turn is a short piece of work; between two turns the engine can generate text. All attributes except
    `keys` are those of the wrapped encoder.

    Args:
        encoder: the encoder to wrap.
        engine: the engine whose thread runs the model.
        count_source: function that is called after each batch of pairs (encoder-decoder models only). Its
            argument is the number of tokens of the sources in the batch.
    """

    def __init__(self, encoder: Encoder, engine: Engine, count_source: Callable[[int], None]) -> None:
        self._encoder = encoder
        self._engine = engine
        self._count_source = count_source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def compute_keys(
        self, input_ids: NDArray[np.int64], at: NDArray[np.int64], source: SourceBatch | None = None
    ) -> Tensor:
        """Return the keys of some positions of texts, computed in the engine's thread.

        The result is that of `Encoder.keys`. The call waits for the engine's thread, so it must be made in
        another thread.

        Args:
            input_ids: token ids of the texts, shape (b, t).
            at: the positions whose keys are computed.
            source: the source of each text for an encoder-decoder model, else None.
        """

        def compute_in_turns() -> Turns[Tensor]:
            """Compute the keys in the engine's thread, and return them.

            A single text of more than `_TURN_TOKENS` tokens takes several turns (parts, between which the
            engine can generate text). Other texts take one turn.
            """
            if len(input_ids) > 1 or input_ids.shape[1] <= _TURN_TOKENS or source is not None:
                return self._encoder.compute_keys(input_ids, at, source)
            encoded = yield from self._encoder.encode_in_parts(input_ids, at, _TURN_TOKENS)
            return encoded.keys

        keys = self._engine.call_in_turns(compute_in_turns, is_part=True).result()
        if source is not None:
            self._count_source(int(source.attention_mask.sum()))
        return keys


class _TokenCounter(Progress):
    """Progress object that shows nothing, but calls a function whenever the model has read tokens.

    Args:
        count: the function; its argument is the number of tokens that were read since the last call.
    """

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def advance(self, amount: int) -> None:
        """Report that `amount` more tokens were read."""
        self._count(amount)
