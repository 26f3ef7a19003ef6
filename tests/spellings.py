"""Small tokenizers of every kind that spells text in another way, trained on texts of many scripts."""

import base64
import json
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges

TEXTS = [
    "The harbour was quiet when the last boat came in, and the harbour lights were lit. It's what we do.",
    "Déjà vu – naïve café, Ångström, Łódź; e\u0301 o\u0308 n\u0303 (combining marks).",
    "東京は日本の首都です。 港は静かだった。 中文字符,没有空格。 한국어 문장입니다.",
    "السلام عليكم ورحمة الله. שלום עולם. नमस्ते दुनिया, क्षत्रिय। ไทยไม่มีช่องว่าง",
    "🙂 👩‍👩‍👧 👍🏽 🇩🇪🇫🇷 ❤️‍🔥 — “quotes” … €100 ½ ≠ ∑ 𝔘𝔫𝔦",
    "def f(x):\n\treturn x  +  1\r\n\n    # two  spaces\x0b\x1b[0m\u200b\u00a0\u3000",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
ADDED = [
    AddedToken("<tool>", normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<mark>", special=True, normalized=False),
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def _trained(model: Any, trainer: Any, **parts: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer


def _with_bytes(tokenizer: Tokenizer, decoder: Any) -> Tokenizer:
    """The same BPE with a token for each byte, for characters that have none."""
    state = json.loads(tokenizer.to_str())["model"]
    names = sorted(state["vocab"], key=state["vocab"].get)
    names = [*SPECIAL, *BYTES, *(name for name in names if name not in SPECIAL)]
    vocab = {name: at for at, name in enumerate(names)}
    merges = [tuple(pair) for pair in state["merges"]]
    rebuilt = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if tokenizer.normalizer is not None:
        rebuilt.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        rebuilt.pre_tokenizer = tokenizer.pre_tokenizer
    rebuilt.decoder = decoder
    return rebuilt


def _metaspace(scheme: str, decoder: Any) -> Tokenizer:
    # Characters that are not frequent are left to byte fallback.
    trainer = trainers.BpeTrainer(
        vocab_size=220, special_tokens=SPECIAL, limit_alphabet=70, show_progress=False
    )
    pre = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return _with_bytes(_trained(models.BPE(), trainer, pre_tokenizer=pre), decoder)


def _build(kind: str) -> Tokenizer:
    bpe = {"special_tokens": SPECIAL, "show_progress": False}
    if kind in ("byte-level", "byte-level with space"):
        space = kind.endswith("space")
        pre = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **bpe
        )
        return _trained(models.BPE(), trainer, pre_tokenizer=pre, decoder=decoders.ByteLevel())
    if kind.startswith("metaspace"):
        scheme = kind.split()[1]
        return _metaspace(
            scheme, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
        )
    if kind == "llama":
        return _metaspace("first", decoders.Sequence(LLAMA))
    if kind == "llama legacy":
        trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=70, max_token_length=12, **bpe)
        spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        return _with_bytes(_trained(models.BPE(), trainer, normalizer=spaces), decoders.Sequence(LLAMA))
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(vocab_size=250, unk_token="<unk>", **bpe)
        parts = {"pre_tokenizer": pre_tokenizers.Metaspace(), "decoder": decoders.Metaspace()}
        return _trained(models.Unigram(), trainer, **parts)
    if kind in ("word pieces", "lower case"):
        trainer = trainers.WordPieceTrainer(vocab_size=300, **bpe)
        parts = {"pre_tokenizer": pre_tokenizers.BertPreTokenizer(), "decoder": decoders.WordPiece()}
        if kind == "lower case":
            parts["normalizer"] = normalizers.BertNormalizer(lowercase=True)
        return _trained(models.WordPiece(unk_token="<unk>"), trainer, **parts)
    if kind == "word ends":
        trainer = trainers.BpeTrainer(vocab_size=350, end_of_word_suffix="</w>", **bpe)
        model = models.BPE(unk_token="<unk>", end_of_word_suffix="</w>")
        parts = {"pre_tokenizer": pre_tokenizers.WhitespaceSplit(), "decoder": decoders.BPEDecoder("</w>")}
        return _trained(model, trainer, **parts)
    assert kind == "words"
    trainer = trainers.WordLevelTrainer(**bpe)
    return _trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizer=pre_tokenizers.Whitespace())


BYTE_LEVEL = ["byte-level", "byte-level with space"]
BYTE_FALLBACK = ["metaspace always", "metaspace first", "metaspace never", "llama", "llama legacy"]
KINDS = [*BYTE_LEVEL, *BYTE_FALLBACK, "unigram", "word pieces", "lower case", "word ends", "words"]


@cache
def small_tokenizer(kind: str, clean_up: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer of a kind, with special tokens and others that were added to its vocabulary."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_build(kind),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=clean_up,
        model_max_length=96,
    )
    made.add_tokens([one for one in ADDED if not one.special])
    made.add_tokens([one for one in ADDED if one.special], special_tokens=True)
    return made


REAL_KINDS = ["SentencePiece", "tekken"]


@cache
def real_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of Mistral's, built from the vocabulary in the package mistral-common.

    transformers reads these files only with packages that the tests do without. Skips the test where
    mistral-common is missing.
    """
    data = Path(pytest.importorskip("mistral_common").__file__).parent / "data"
    built = _sentence_piece(data / "tokenizer.model.v1") if kind == "SentencePiece" else _tekken(data)
    return PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=96
    )


def _sentence_piece(file: Path) -> Tokenizer:
    """Build the tokenizer of a SentencePiece file of BPE with byte fallback."""
    pieces = [*_pieces_of(file.read_bytes())]
    vocab = {piece: at for at, (piece, _) in enumerate(pieces)}
    merges = generate_merges(vocab, dict(pieces))
    built = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(LLAMA)
    return built


def _pieces_of(model: bytes) -> Iterator[tuple[str, float]]:
    """Yield the pieces and scores of a SentencePiece model: field 1 of the protocol buffer, repeated."""
    fields = _fields_of(model)
    for number, value in fields:
        if number == 1:
            piece = dict(_fields_of(value))
            yield piece[1].decode(), struct.unpack("<f", piece[2])[0]


def _fields_of(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protocol buffer."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
            continue
        length = {1: 8, 5: 4}.get(kind) or varint()
        yield number, message[at : at + length]
        at += length


def _tekken(data: Path) -> Tokenizer:
    """Build a byte-level tokenizer of tekken's vocabulary; words that are no tokens become bytes."""
    read = json.loads((data / "tekken_240911.json").read_text())
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{at}>" for at in range(3, 1000))]
    letters = bytes_to_unicode()
    names = ["".join(letters[byte] for byte in base64.b64decode(one["token_bytes"])) for one in read["vocab"]]
    vocab = {name: at for at, name in enumerate([*special, *names[: 131_072 - len(special)]])}
    built = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    split = pre_tokenizers.Split(Regex(read["config"]["pattern"]), "isolated")
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built


def save_model(folder: Path, tokenizer: Any, spread: float = 0.2) -> Path:
    """A random GPT-2 with a tokenizer; its predictions depend on the context."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=96,
        pad_token_id=tokenizer.pad_token_id, **ids,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=spread)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
