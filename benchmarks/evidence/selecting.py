"""Choosing the documents of an experiment, and the rare terms of a domain."""

import re
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knnstore.documents import TextDocument, read_documents
from knnstore.lm.reading import TextReader

FROM = 200
"""Position from which tokens are judged apart: the beginning of a document holds headers and licences."""
_WORD = re.compile(r"[^\W\d_]\w{2,}")
_LEAST_COUNT = 20
_LEAST_RATIO = 20.0


@dataclass(frozen=True)
class Texts:
    """The documents of one domain."""

    store: list[TextDocument]
    """All documents to store, in an order drawn once; a smaller store has the first ones."""
    extra: TextDocument
    """One document more, to measure what adding and withdrawing a document takes."""
    dev: list[TextDocument]
    """Text to choose and to fit on."""
    test: list[TextDocument]
    """Text to judge on."""
    whole: list[TextDocument]
    """All documents for `test` that are long enough, whole, to complete lines of."""


def read_texts(
    folder: Path,
    reader: TextReader,
    tokens: dict[str, int],
    least: int,
    most: int,
    left_out: Container[str] = (),
) -> Texts:
    """Read the documents of a domain; dev and test are drawn at random until they have enough tokens.

    Args:
        folder: with ``store.jsonl``, ``dev.jsonl`` and ``test.jsonl``.
        reader: the object with the tokenizer.
        tokens: number of tokens of ``dev`` and of ``test``; the last document may exceed the number.
        least: shorter documents are left out of dev and test, in tokens.
        most: longer documents of dev and test are cut to their beginning, in tokens.
        left_out: ids of documents of dev and test that are not used, because the store has them too.
    """
    shuffled = {split: shuffle(read_documents([folder / f"{split}.jsonl"])) for split in ("store", *tokens)}
    *store, extra = shuffled.pop("store")
    others = {split: [one for one in shuffled[split] if one.id not in left_out] for split in tokens}
    held_out = {split: cut(others[split], reader, tokens[split], least, most) for split in tokens}
    whole = [one for one in others["test"] if len(reader.tokenize(one.text)) >= least]
    return Texts(store, extra, **held_out, whole=whole)


def shuffle(documents: Iterable[TextDocument]) -> list[TextDocument]:
    """Return documents in an order drawn once."""
    listed = list(documents)
    return [listed[number] for number in np.random.default_rng(0).permutation(len(listed))]


def cut(
    documents: Sequence[TextDocument], reader: TextReader, enough: int, least: int, most: int
) -> list[TextDocument]:
    """Return the first documents that are long enough, each cut to its beginning, until they suffice."""
    taken, total = [], 0
    for document in documents:
        if total >= enough:
            break
        if (count := len(reader.tokenize(document.text))) >= least:
            text = document.text if count <= most else _cut_text(reader, document.text, most)
            taken.append(replace(document, text=text))
            total += min(count, most)
    return taken


def _cut_text(reader: TextReader, text: str, most: int) -> str:
    """Return the part of a text before its token number `most`."""
    return text[: find_offsets(text, reader)[most][0]]


def find_offsets(text: str, reader: TextReader) -> list[tuple[int, int]]:
    """Return for each token of a text where it begins and ends, in characters."""
    encoded = reader.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets: list[tuple[int, int]] = encoded["offset_mapping"]
    return offsets


def take_tokens(documents: Sequence[TextDocument], reader: TextReader, tokens: int) -> list[TextDocument]:
    """Return the first documents that have so many tokens together; the last one may exceed the number."""
    taken, total = [], 0
    for document in documents:
        if total >= tokens:
            break
        taken.append(document)
        total += len(reader.tokenize(document.text))
    return taken


def find_rare_terms(domain: Iterable[TextDocument], others: Iterable[TextDocument]) -> set[str]:
    """Return the words that are frequent in a domain and rare elsewhere.

    A word has three or more letters, digits or underscores, begins with a letter and is compared in lower
    case. It is such a term if the domain's store has it 20 times or more, and if its share of the store's
    words is at least 20 times its share of the words of the other domains' stores, where it counts once more
    than it occurs.
    """
    here, elsewhere = (count_words(documents) for documents in (domain, others))
    here_total, elsewhere_total = here.total(), max(1, elsewhere.total())
    return {
        word
        for word, count in here.items()
        if count >= _LEAST_COUNT
        and count / here_total >= _LEAST_RATIO * (elsewhere[word] + 1) / elsewhere_total
    }


def count_words(documents: Iterable[TextDocument]) -> Counter[str]:
    """Count the words of documents in lower case."""
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(word.lower() for word in _WORD.findall(document.text))
    return counts


def mark_terms(
    documents: Sequence[TextDocument], reader: TextReader, terms: set[str]
) -> list[NDArray[np.bool_]]:
    """Return for each token of each document whether it has a letter of one of the terms, shapes (n_i,)."""
    marked = []
    for document in documents:
        letters = np.zeros(len(document.text) + 1, np.bool_)
        for match in _WORD.finditer(document.text):
            letters[match.start() : match.end()] = match.group().lower() in terms
        offsets = find_offsets(document.text, reader)
        marked.append(np.array([letters[start:stop].any() for start, stop in offsets]))
    return marked
