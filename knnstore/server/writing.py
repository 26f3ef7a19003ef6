"""Writing to the store in a thread of its own; the engine does only what needs the model, in turns."""

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
from knnstore.lm import Added, Encoder, KNNLMForCausalLM, TextReader, add_documents
from knnstore.progress import Progress
from knnstore.server.engine import Engine, Turns
from knnstore.store import KNNStore

_TURN_TOKENS = 128
"""Of a document, that the model reads in one turn."""

Found = TypeVar("Found")


class StoreWriter:
    """Adds and removes documents, one change after another.

    Tokenizing, the database and the vector engine are of this thread; the model reads in the engine's.

    Args:
        lm: the model.
        engine: its engine.
    """

    def __init__(self, lm: KNNLMForCausalLM, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "knnstore-writing")
        tokenizer = copy.deepcopy(lm.tokenizer)
        reader = replace(lm.reader, encoder=_TurnEncoder(lm.encoder, engine), tokenizer=tokenizer)  # type: ignore[arg-type]
        self._adding = _Adding(lm.store, tokenizer, reader, lm.after_adding)

    async def add(
        self, document: object, domain: str, tags: list[str], count: Callable[[int], None], on_bad: OnBad
    ) -> Mapping[str, int]:
        """Add a document.

        Args:
            document: as `KNNLMForCausalLM.add` takes it.
            domain: where to.
            tags: of the document.
            count: told of the tokens as they are read.
            on_bad: called where the document cannot be used; it is left out then.

        Returns:
            The fields of `Added`, but for the seconds.
        """

        def work() -> Added:
            return add_documents(
                self._adding, [document], domain=domain, tags=tags, on_bad=on_bad, batch_tokens=_TURN_TOKENS,
                progress=_Counting(count),
            )  # fmt: skip

        done = await self._do(work)
        return {
            name: getattr(done, name) for name in ("added", "replaced", "described", "unchanged", "tokens")
        }

    async def remove(self, work: Callable[[KNNStore], Found]) -> Found:
        """Remove something; when this returns, every later token is predicted without it."""
        gone = await self._do(lambda: work(self._adding.store))
        await self.count_ngrams()
        # A step that began before has ended then, and its tokens were told.
        await asyncio.wrap_future(self._engine.call(lambda: None, is_part=True))
        return gone

    async def count_ngrams(self) -> None:
        """Count the n-grams of what has changed, in the writing thread; texts go on with older counts."""
        await self._do(self._adding.store.catch_up_ngrams)

    def end(self) -> None:
        """Wait for what is being written; the engine has stopped."""
        self._thread.shutdown(cancel_futures=True)

    async def _do(self, work: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass
class _Adding:
    """A model as `add_documents` needs it."""

    store: KNNStore
    tokenizer: Any
    reader: TextReader
    after_adding: Callable[[], None]


class _TurnEncoder:
    """An encoder that makes keys in the engine's thread, in turns; everything else is that of the encoder."""

    def __init__(self, encoder: Encoder, engine: Engine) -> None:
        self._encoder = encoder
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def keys(self, input_ids: NDArray[np.int64], at: NDArray[np.int64]) -> Tensor:
        """Make keys as `Encoder.keys` does."""

        def turns() -> Turns[Tensor]:
            if len(input_ids) > 1 or input_ids.shape[1] <= _TURN_TOKENS:
                return self._encoder.keys(input_ids, at)
            encoded = yield from self._encoder.encode_in_parts(input_ids, at, _TURN_TOKENS)
            return encoded.keys

        return self._engine.call_in_turns(turns, is_part=True).result()


class _Counting(Progress):
    """Tells of the tokens that are read."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count

    def advance(self, amount: int) -> None:
        """So many more were read."""
        self._count(amount)
