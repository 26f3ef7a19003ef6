"""Turning places that components name into sources: their documents and the text around them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from knnstore.lm.components import Place
from knnstore.lm.explanation.explained import THIS_TEXT, Source
from knnstore.lm.reading import TextReader
from knnstore.store import Provenance, Reader

_BEFORE, _AFTER = 16, 8  # tokens of context, as the store gives


class Sources:
    """Turns places into sources; the text around a record is put together once.

    Args:
        store: where records were found.
        reader: has the tokenizer.
        tokens: tokens of the explained text, shape (n,).
    """

    def __init__(self, store: Reader, reader: TextReader, tokens: NDArray[np.uint32]) -> None:
        self._store = store
        self._reader = reader
        self._tokens = tokens
        self._texts: dict[int, tuple[str, str, str]] = {}

    def describe_places(
        self, found: Sequence[Sequence[Place]], positions: Sequence[int]
    ) -> list[tuple[Source, ...]]:
        """Return the sources of several tokens, without those whose document is gone.

        Args:
            found: the places of each token.
            positions: positions of the tokens in the text.
        """
        ids = np.unique(np.array([one.id for of_token in found for one in of_token], np.int64))
        known = dict(zip(ids.tolist(), self._store.provenance(ids), strict=True))
        return [
            tuple(
                self._source(place, one)
                for one in of_token
                if (place := self._earlier(one.position, at) if one.position >= 0 else known[one.id])
                is not None
            )
            for of_token, at in zip(found, positions, strict=True)
        ]

    def _earlier(self, at: int, before: int) -> Provenance:
        """Return the token at position `at` of the text itself as a place, with the tokens around it.

        The tokens after it end before the position `before`.
        """
        behind = self._tokens[at + 1 : min(at + 1 + _AFTER, before)]
        context = self._tokens[max(0, at - _BEFORE) : at]
        return Provenance(THIS_TEXT, "", at, int(self._tokens[at]), context, behind)

    def _source(self, place: Provenance, found: Place) -> Source:
        texts = self._texts.get(found.id)
        if texts is None:
            texts = self._around(place)
            if found.id >= 0:
                self._texts[found.id] = texts
        context, text, continuation = texts
        return Source(
            place.token,
            text,
            found.share,
            found.distance,
            place.document,
            place.domain,
            place.position,
            context,
            continuation,
            found.matched,
            found.component,
        )

    def _around(self, place: Provenance) -> tuple[str, str, str]:
        """Return the text before a token, the token itself, and the text after it."""
        before, behind = place.context.tolist(), place.continuation.tolist()
        # As far as its characters are whole; whether a token has a space before it depends on what is there.
        context, known = (
            self._reader.text(part).rstrip("\ufffd") for part in (before, [*before, place.token])
        )
        whole = self._reader.text([*before, place.token, *behind])
        return context, known[len(context) :], whole[len(known) :]
