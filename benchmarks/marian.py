"""A small model of Marian's architecture: its tokenizer, its weights, and a plain training loop."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

Pair = dict[str, str]
PAD, EOS = 0, 1
_SPECIAL = ["<pad>", "</s>", "<unk>"]
_WARMUP = 0.05
"""Share of the steps in which the learning rate rises; then it falls linearly to 0."""
BATCH_TOKENS = 2_048


def train_tokenizer(pairs: Iterable[Pair], size: int) -> PreTrainedTokenizerFast:
    """Train one BPE vocabulary for sources and texts; a source and a label end with ``</s>``.

    Args:
        pairs: the pairs whose sources and texts are read.
        size: number of tokens in the vocabulary.
    """
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.normalizer = normalizers.NFKC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    bpe.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=_SPECIAL, limit_alphabet=300, show_progress=False
    )
    bpe.train_from_iterator((pair[side] for pair in pairs for side in ("source", "text")), trainer)
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(vocabulary: int, width: int, layers: tuple[int, int]) -> MarianMTModel:
    """Build a model with random weights, the same each time.

    Args:
        vocabulary: number of tokens.
        width: size of the hidden states, a multiple of 64.
        layers: number of layers of the encoder and of the decoder.
    """
    torch.manual_seed(0)
    heads = width // 64
    config = MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers[0],
        decoder_layers=layers[1],
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=256,
        dropout=0.0,
        activation_function="relu",
        scale_embedding=True,
        bos_token_id=None,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=EOS,
        attn_implementation="eager",  # faster than the others in bfloat16 on the CPU
    )
    return MarianMTModel(config)


def save_model(model: MarianMTModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a model and its tokenizer to a folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_batches(
    tokenizer: PreTrainedTokenizerFast, pairs: Sequence[Pair]
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return batches of sources and texts of similar lengths, padded: int64, shapes (b, s) and (b, t).

    Sources and texts of a batch have at most `BATCH_TOKENS` tokens together, padding included.
    """
    sources, texts = (tokenizer([pair[side] for pair in pairs]).input_ids for side in ("source", "text"))
    rows = sorted(zip(sources, texts, strict=True), key=lambda row: (len(row[1]), len(row[0])))
    batches = []
    while rows:
        count, width = 0, 0
        while count < len(rows):
            width = max(width, *map(len, rows[count]))
            if 2 * width * (count + 1) > BATCH_TOKENS and count:
                break
            count += 1
        members, rows = rows[:count], rows[count:]
        batches.append((_pad([row[0] for row in members]), _pad([row[1] for row in members])))
    return batches


def _pad(rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return rows of tokens as an array, with `PAD` behind the shorter ones."""
    padded = np.full((len(rows), max(map(len, rows))), PAD)
    for row, tokens in zip(padded, rows, strict=True):
        row[: len(tokens)] = tokens
    return padded


def train(
    model: Any,
    batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
    *,
    steps: int,
    rate: float,
    say: Callable[[str], None],
) -> float:
    """Train all weights with AdamW, in passes over the batches in a new order; return the seconds taken.

    Matrices are multiplied in bfloat16; weights and optimizer stay in single precision.

    Args:
        model: the model, trained in place.
        batches: the pairs, as `make_batches` returns them.
        steps: number of batches that are read.
        rate: the highest learning rate.
        say: called with the loss now and then.

    Raises:
        RuntimeError: the loss became NaN or infinite.
    """
    torch.manual_seed(0)
    order = np.random.default_rng(0)
    started = time.perf_counter()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1.0, _WARMUP * steps), 1 - step / steps)
    )
    passes = math.ceil(steps / len(batches))
    chosen = np.concatenate([order.permutation(len(batches)) for _ in range(passes)])[:steps]
    model.train()
    for done, at in enumerate(chosen.tolist(), 1):
        source, text = map(torch.from_numpy, batches[at])
        with torch.autocast("cpu", torch.bfloat16):
            logits = _predict(model, source, text)
        loss = cross_entropy(logits, text.flatten(), ignore_index=PAD)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if done % 100 == 0 or done == steps:
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"training diverged at a learning rate of {rate}")
            say(f"step {done:,} of {steps:,}: loss {loss.item():.2f}")
    model.eval()
    return time.perf_counter() - started


def measure_perplexity(model: Any, batches: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> float:
    """Return exp of the mean negative log-likelihood of the tokens of texts, ``</s>`` included."""
    loss, count = 0.0, 0
    for source, text in (map(torch.from_numpy, batch) for batch in batches):
        with torch.inference_mode():
            logits = _predict(model, source, text)
        loss += cross_entropy(logits, text.flatten(), ignore_index=PAD, reduction="sum").item()
        count += int((text != PAD).sum())
    return math.exp(loss / count)


def _predict(model: Any, source: Tensor, text: Tensor) -> Tensor:
    """Return the logits of each token of texts, float32, shape (b * t, vocabulary)."""
    logits: Tensor = model(
        input_ids=source,
        attention_mask=(source != PAD).long(),
        decoder_input_ids=torch.cat([torch.full_like(text[:, :1], PAD), text[:, :-1]], 1),
        use_cache=False,
    ).logits
    return logits.flatten(0, 1).float()
