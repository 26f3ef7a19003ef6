"""Places in the lines of documents, and their greedy completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chunks import ChunkIndex
from numpy.typing import NDArray
from selecting import FROM, find_offsets

from knnstore.documents import TextDocument
from knnstore.lm import KNNLMForCausalLM, KNNSettings
from knnstore.lm.reading import TextReader

NO_LINE = -1
"""Line number of a token that has a line break in it."""
_LEAST_SIGNS = 4
"""Letters and digits that the rest of a line has at least."""
_MOST_TOKENS = 48
"""Largest number of tokens that are generated for a line."""
_CONTEXT = 512
"""Tokens of the document that precede the place in a prompt."""
_QUERY = 200
"""Tokens before the place with which chunks are retrieved."""


@dataclass(frozen=True)
class Place:
    """A place in a line of a document."""

    document: int
    """Number of the document."""
    before: NDArray[np.int64]
    """The document's tokens before the place, shape (n,)."""
    rest: str
    """The rest of the line, without spaces around it."""


def draw_places(documents: Sequence[TextDocument], reader: TextReader, rounds: int) -> list[list[Place]]:
    """Draw places at random, in each round one from each document that has a place left.

    A place is before a token without a line break, from token `FROM` on, if the rest of the line has at least
    four letters or digits.

    Args:
        documents: the documents.
        reader: the object with the tokenizer.
        rounds: number of rounds.
    """
    random = np.random.default_rng(0)
    drawn: list[list[Place]] = [[] for _ in range(rounds)]
    for number, document in enumerate(documents):
        tokens, text = reader.tokenize(document.text).astype(np.int64), f"{document.text}\n"
        rests = {
            position: text[start : text.index("\n", start)].strip()
            for position, (start, stop) in enumerate(find_offsets(document.text, reader))
            if position >= FROM and "\n" not in text[start:stop]
        }
        possible = [position for position, rest in rests.items() if _count_signs(rest) >= _LEAST_SIGNS]
        chosen = random.permutation(possible)[:rounds].tolist()
        for places, position in zip(drawn, chosen, strict=False):
            places.append(Place(number, tokens[:position], rests[position]))
    return drawn


def number_lines(document: TextDocument, reader: TextReader) -> NDArray[np.int64]:
    """Return the line number of each token, shape (n,); `NO_LINE` for tokens that have a line break."""
    text = document.text
    breaks = [place for place, letter in enumerate(text) if letter == "\n"]
    offsets = find_offsets(text, reader)
    numbers = np.searchsorted(breaks, [start for start, _ in offsets])
    return np.where(["\n" in text[start:stop] for start, stop in offsets], NO_LINE, numbers)


class LineWriter:
    """Completes lines greedily with several settings, without and with retrieved chunks in the prompt.

    The model reads each of the two prompts once, with the first settings. These must need the earlier text if
    any others do, because the KV cache keeps it only then.

    Args:
        lm: the model with its store.
        index: the chunks.
        plain: settings by the name of the side, without chunks.
        prompted: settings by the name of the side, with chunks.
    """

    def __init__(
        self,
        lm: KNNLMForCausalLM,
        index: ChunkIndex,
        plain: Mapping[str, KNNSettings],
        prompted: Mapping[str, KNNSettings],
    ) -> None:
        self._lm, self._index, self._plain, self._prompted = lm, index, plain, prompted

    def write(self, before: NDArray[np.int64]) -> dict[str, str]:
        """Return the rest of a line, without spaces around it, by the name of the side.

        Args:
            before: the document's tokens before the place, shape (n,).
        """
        reader = self._lm.reader
        prefix, context = np.array(reader.prefix, np.int64), before[-_CONTEXT:]
        chunks = self._index.retrieve(reader.decode(before[-_QUERY:].tolist()))
        written = self._complete(np.concatenate([prefix, context]), self._plain)
        return written | self._complete(np.concatenate([prefix, *chunks, context]), self._prompted)

    def _complete(self, prompt: NDArray[np.int64], sides: Mapping[str, KNNSettings]) -> dict[str, str]:
        """Continue a prompt, shape (n,), to the end of the line with each of some settings.

        The beginning of a prompt that is too long for the model's window is left out.
        """
        lm = self._lm
        ids = torch.from_numpy(prompt[-(lm.reader.max_length - _MOST_TOKENS) :])[None]
        written, cache = {}, None
        for name, settings in sides.items():
            found = lm.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                knn=settings,
                past_key_values=cache,
                max_new_tokens=_MOST_TOKENS,
                do_sample=False,
                stop_strings="\n",
                tokenizer=lm.tokenizer,
                pad_token_id=lm.tokenizer.eos_token_id,
                return_dict_in_generate=True,
            )
            text = lm.reader.decode(found.sequences[0, ids.shape[1] :].tolist())
            written[name] = text.partition("\n")[0].strip()
            cache = found.past_key_values
            cache.crop(ids.shape[1] - 1 - cache.get_seq_length())  # `generate` reads the prompt's last token
        return written


def _count_signs(text: str) -> int:
    """Count letters and digits."""
    return sum(sign.isalnum() for sign in text)
