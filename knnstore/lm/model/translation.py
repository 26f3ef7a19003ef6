"""Generating the texts of many sources with an encoder-decoder model and its store, and scoring them.

`translate` generates; `score_translations` compares with references, by BLEU and chrF.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from knnstore.errors import ConfigError, InputError
from knnstore.lm.model.text_generation import decode_continuation
from knnstore.lm.reading import BATCH_TOKENS, SourceBatch, TokenTexts
from knnstore.lm.settings import GeneratingModel, KNNSettings, Purpose, resolve
from knnstore.progress import Progress

_FACTOR, _ADDED = 2, 20
"""Default limit of a text's length in tokens: `_FACTOR` times the length of its source, plus `_ADDED`."""


def translate(
    lm: GeneratingModel,
    sources: Sequence[str],
    knn: KNNSettings | None = None,
    *,
    num_beams: int = 1,
    max_new_tokens: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    progress: Progress | None = None,
    **options: Any,
) -> list[str]:
    """Generate the text of each source, for example its translation.

    Sources of similar length are processed in one batch. A source that is empty or only spaces gives an empty
    text.

    Args:
        lm: the encoder-decoder model with its store.
        sources: the sources.
        knn: settings of this call; default ``lm.knn``. Unset fields get their values for generation.
        num_beams: number of beams of beam search; 1 is greedy search.
        max_new_tokens: largest number of tokens of a text. The default is twice the number of tokens in the
            longest source of the batch, plus 20.
        batch_tokens: largest number of source tokens in a batch, padding included, times `num_beams`.
        progress: progress display, which receives the number of tokens of the sources; None for no display.
        **options: passed on to `generate`.

    Returns:
        The text of each source, in the order of the sources.

    Raises:
        InputError: a source has too many tokens, or a token that the model does not have; the message has the
            number of the source, from 1.
        ConfigError: ``num_return_sequences`` is above 1.
    """
    if options.get("num_return_sequences") not in (None, 1):
        raise ConfigError("translate gives one text for each source: for several, use generate_text")
    shown, reader, texts = progress or Progress(), lm.reader, [""] * len(sources)
    # 1) Tokenize the sources, and sort them by length, longest first.
    tokens = {}
    for index, source in enumerate(sources):
        if source.strip():
            try:
                tokens[index] = reader.document_tokenizer.tokenize_sources([source])[0]
            except InputError as error:
                raise InputError(f"source {index + 1}: {error}") from error
    waiting = sorted(tokens, key=lambda index: -len(tokens[index]))
    shown.start("translating", total=sum(map(len, tokens.values())))
    # 2) Generate batch by batch. The first source of a batch is the longest.
    decoder = TokenTexts(reader.tokenizer)
    begun = len(reader.prefix[:1])
    room = reader.max_length - begun
    while waiting:
        longest = len(tokens[waiting[0]])
        count = max(1, batch_tokens // (longest * num_beams))
        members, waiting = waiting[:count], waiting[count:]
        batch = SourceBatch.from_rows([tokens[index] for index in members])
        input_ids, mask = (torch.as_tensor(part, device=reader.encoder.model.device) for part in batch)
        rows = lm.generate(
            input_ids,
            attention_mask=mask,
            knn=knn,
            num_beams=num_beams,
            max_new_tokens=min(room, max_new_tokens or _FACTOR * longest + _ADDED),
            **options,
        )
        # 3) Decode; special tokens, as EOS and padding, have no text.
        for index, row in zip(members, rows[:, begun:].tolist(), strict=True):
            texts[index] = decode_continuation(decoder, (), row)
            shown.advance(len(tokens[index]))
    shown.finish()
    return texts


@dataclass(frozen=True, slots=True)
class TranslationScores:
    """The result of `score_translations`: how close generated texts are to the texts of pairs."""

    pairs: int
    """Number of pairs."""
    base_bleu: float
    """BLEU of the model alone, 0 to 100."""
    knn_bleu: float
    """BLEU of the mixture."""
    base_chrf: float
    """chrF of the model alone, 0 to 100."""
    knn_chrf: float
    """chrF of the mixture."""
    bleu_signature: str
    """Signature of sacrebleu for BLEU: its version and settings, to be named in reports."""
    chrf_signature: str
    """Signature of sacrebleu for chrF: its version and settings, to be named in reports."""


def score_translations(
    lm: GeneratingModel,
    pairs: Iterable[object],
    knn: KNNSettings | None = None,
    *,
    num_beams: int = 1,
    progress: Progress | None = None,
    **options: Any,
) -> TranslationScores:
    """Translate the source of each pair with the model alone and with the mixture, and score the texts.

    BLEU and chrF are computed by sacrebleu with its default settings, over all pairs.

    Args:
        lm: the encoder-decoder model with its store.
        pairs: pairs that are not in the store, in any form that `add` takes; each text is the reference.
        knn: settings of this call; default ``lm.knn``. Unset fields get their values for generation.
        num_beams: number of beams of beam search; 1 is greedy search.
        progress: progress display, which receives the number of tokens of the sources; None for no display.
        **options: passed on to `translate`.

    Raises:
        ConfigError: sacrebleu is not installed.
        InputError: there is no pair, or a pair cannot be used.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU  # an optional dependency
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        install = "pip install 'knnstore[translate]'"
        raise ConfigError(f"BLEU and chrF need sacrebleu. Install it with: {install}") from error
    listed = list(lm.reader.document_tokenizer.read(pairs))
    if not listed:
        raise InputError("nothing to translate: there is no pair")
    sources = [lm.reader.document_tokenizer.get_source(pair) for pair in listed]
    references = [[pair.text for pair in listed]]
    mixed = resolve(lm.store, knn or lm.knn, Purpose.GENERATION)
    alone = replace(KNNSettings(lam=0.0), selection=mixed.selection)
    texts = [
        translate(lm, sources, settings, num_beams=num_beams, progress=progress, **options)
        for settings in (alone, mixed)
    ]
    bleu, chrf = BLEU(), CHRF()
    base_bleu, knn_bleu = (bleu.corpus_score(found, references).score for found in texts)
    base_chrf, knn_chrf = (chrf.corpus_score(found, references).score for found in texts)
    return TranslationScores(
        len(listed),
        base_bleu,
        knn_bleu,
        base_chrf,
        knn_chrf,
        str(bleu.get_signature()),
        str(chrf.get_signature()),
    )
