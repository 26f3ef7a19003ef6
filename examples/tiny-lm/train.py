"""Train a small GPT-2 from scratch on a folder of text files, on a CPU or a GPU.

    python examples/tiny-lm/train.py books/ --out my-lm --minutes 75

Every file is a document. A byte-level BPE tokenizer is trained first; then the model reads random
windows of the documents for the time given. One file in twenty is held out and scored at the end.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

END = "<|endoftext|>"
"""Begins every document; also the end-of-text and padding token."""
CONTEXT = 512
SHORT = 256
"""Tokens in a training window until the last fifth of the time, which uses the whole context."""
TOKENS_A_STEP = 4096
PEAK_LEARNING_RATE = 1.5e-3
WARMUP = 0.02
"""Share of the time in which the learning rate rises; it falls linearly over the second half."""


def train_tokenizer(files: list[Path], vocabulary: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE vocabulary."""
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(file) for file in files], vocab_size=vocabulary, min_frequency=2, special_tokens=[END])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        unk_token=END,
        model_max_length=CONTEXT,
    )


def read(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Join all documents, each behind an END, to one int64 tensor of shape (tokens,)."""
    ids: list[int] = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        ids += [tokenizer.bos_token_id, *tokenizer(text, verbose=False)["input_ids"]]
    return torch.tensor(ids)


def windows(tokens: Tensor, length: int) -> Tensor:
    """Draw windows that begin anywhere, int64 of shape (TOKENS_A_STEP / length, length)."""
    starts = torch.randint(0, len(tokens) - length + 1, (TOKENS_A_STEP // length, 1))
    return tokens[starts + torch.arange(length)]


def loss_of(model: GPT2LMHeadModel, batch: Tensor) -> Tensor:
    """Mean negative log-likelihood of each token after those before it, for a (b, t) batch."""
    logits = model(batch).logits[:, :-1]  # (b, t - 1, vocabulary)
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(done: float) -> float:
    """Return the learning rate when this share of the time is over."""
    return PEAK_LEARNING_RATE * min(1.0, done / WARMUP, max(0.0, 2 * (1 - done)))


def parameter_groups(model: GPT2LMHeadModel) -> Iterator[dict[str, object]]:
    """Weight decay for matrices, none for biases and layer norms."""
    for decay, wanted in ((0.1, True), (0.0, False)):
        chosen = [parameter for parameter in model.parameters() if (parameter.ndim >= 2) == wanted]
        yield {"params": chosen, "weight_decay": decay}


def train(model: GPT2LMHeadModel, tokens: Tensor, seconds: float, device: str) -> None:
    """Run AdamW for so many seconds."""
    optimizer = torch.optim.AdamW(list(parameter_groups(model)), lr=0.0, betas=(0.9, 0.95))
    model.train()
    started, step, done = time.monotonic(), 0, 0.0
    while done < 1:
        batch = windows(tokens, SHORT if done < 0.8 else CONTEXT).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{done:6.1%}  step {step}  loss {loss.item():.3f}", flush=True)
        step, done = step + 1, (time.monotonic() - started) / seconds
    print(f"{step} steps, {step * TOKENS_A_STEP:,} tokens")


@torch.inference_mode()
def perplexity(model: GPT2LMHeadModel, tokens: Tensor, device: str) -> float:
    """Score consecutive windows of the whole context."""
    model.eval()
    length = min(CONTEXT, len(tokens))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    losses = [loss_of(model, row[None].to(device)).item() for row in rows]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="its .txt files, at any depth, are the documents")
    parser.add_argument("--out", type=Path, required=True, help="where to save model and tokenizer")
    parser.add_argument("--minutes", type=float, default=75, help="how long to train")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of the tokenizer")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()

    random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = sorted(options.folder.rglob("*.txt"))
    if len(files) < 2:
        parser.error(f"{options.folder} holds {len(files)} .txt files; at least two are needed")
    random.shuffle(files)
    held_out = max(1, len(files) // 20)
    tokenizer = train_tokenizer(files[held_out:], options.vocabulary)
    tokens = read(files[held_out:], tokenizer)
    print(f"{len(files)} files, {len(tokens):,} tokens to train on")
    if len(tokens) < CONTEXT:
        parser.error(f"a window takes {CONTEXT} tokens: give more text")

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=CONTEXT,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config).to(device)
    train(model, tokens, options.minutes * 60, device)
    print(f"held out: perplexity {perplexity(model, read(files[:held_out], tokenizer), device):.1f}")
    model.half().save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
