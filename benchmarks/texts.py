"""The documents of an experiment: which of a data folder are used, and in which parts they are stored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from knnstore.documents import TextDocument, read_documents
from knnstore.errors import InputError
from knnstore.lm.keys import locate
from knnstore.lm.reading import Encoder, TextReader, choose_window, load_model

SPLITS = ("store", "dev", "test")
FRACTIONS = (1, 2, 4, 8, 16, 32)
"""Nested parts of every store: one half, one quarter, ... of its documents' tokens."""
MIN_DOCUMENTS = 12
"""Of dev and test, however long they are: fewer make an interval over documents meaningless."""


@dataclass(frozen=True)
class Limits:
    """How much of the data is used."""

    documents: int | None = None
    """Of each split of a domain."""
    store_tokens: int = 272_000
    """Of a domain's store: whole documents, the first ones, until there are so many."""
    held_out_tokens: int = 15_000
    """Of dev and of test likewise, but at least `MIN_DOCUMENTS`."""
    held_out_characters: int = 8_000
    """Of each of their documents: its beginning."""
    train_tokens: int | None = None
    """Of a domain's store, to fine-tune on: the largest nested part with no more; default is all of it."""
    k: int = 1024
    fractions: int = len(FRACTIONS)
    generated: int = 128
    """Tokens of each continuation."""
    prompts: int = 32
    codes: str = "pq32"
    """What keys are kept as where they are coded."""


def reader_of(model: str, device: str | None = "cpu") -> TextReader:
    """Return a model from its folder, as a store of it would read text, in single precision."""
    lm, tokenizer = load_model(model, device=device, dtype="float32")
    window = choose_window(lm)
    return TextReader(Encoder(lm, locate(lm)), tokenizer, window, max(1, window // 2))


def read(folder: Path, domains: Sequence[str], model: str, limits: Limits) -> dict[str, Any]:
    """Read the documents of each domain's splits, as many as the limits allow.

    Args:
        folder: with a folder for each domain, which holds ``store.jsonl``, ``dev.jsonl``, ``test.jsonl``.
        domains: their names; none is all.
        model: whose tokens are counted.
        limits: how much is used.

    Raises:
        InputError: there is no domain, or a split of one cannot be read.
        ConfigError: there is no such model.
    """
    names = domains or domains_in(folder)
    reader = reader_of(model)
    return {
        name: {
            split: cut(read_documents([folder / name / f"{split}.jsonl"]), split, reader, limits)
            for split in SPLITS
        }
        for name in names
    }


def domains_in(folder: Path) -> list[str]:
    """Names of the folders that have something to store.

    Raises:
        InputError: there are none.
    """
    names = sorted(path.parent.name for path in folder.glob("*/store.jsonl"))
    if not names:
        problem = "no domain in this folder" if folder.is_dir() else "no such folder"
        raise InputError(
            f"{folder}: {problem}; a domain is a folder with store.jsonl, dev.jsonl and test.jsonl"
        )
    return names


def cut(
    documents: Iterator[TextDocument], split: str, reader: TextReader, limits: Limits
) -> list[TextDocument]:
    """Return the first documents of a split, as many as the limits allow."""
    stored = split == "store"
    enough, least = (limits.store_tokens, 0) if stored else (limits.held_out_tokens, MIN_DOCUMENTS)
    taken: list[TextDocument] = []
    tokens = 0
    for document in documents:
        if len(taken) == limits.documents or (tokens >= enough and len(taken) >= least):
            break
        used = document if stored else replace(document, text=document.text[: limits.held_out_characters])
        taken.append(used)
        tokens += len(reader.tokenize(used.text))
    return taken


def leveled(documents: Sequence[TextDocument], fractions: Sequence[int]) -> list[tuple[TextDocument, int]]:
    """Each document with the smallest nested part that it is in, in an order drawn once.

    Args:
        documents: of a store.
        fractions: 1, 2, 4, ...: the parts are one half, one quarter, ... of the text.
    """
    order = np.random.default_rng(0).permutation(len(documents))
    sizes = [len(documents[at].text) for at in order]
    shares = (np.cumsum(sizes) - 0.5 * np.array(sizes)) / sum(sizes)
    shares[0] = 0  # every part has a document
    return [
        (documents[at], max(fraction for fraction in fractions if share * fraction <= 1))
        for at, share in zip(order.tolist(), shares, strict=True)
    ]
