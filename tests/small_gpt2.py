"""A random GPT-2 with a tokenizer that knows some texts, for the tests of the server and of the commands."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

WINDOW = 96
"""Most tokens that the model reads."""


def save_gpt2(
    folder: Path,
    texts: Iterable[str],
    *,
    vocabulary: int,
    width: int,
    heads: int,
    deviation: float | None = None,
) -> Path:
    """Save a GPT-2 of two layers and its tokenizer, the same each time, and return their folder.

    Args:
        folder: where they are saved.
        texts: texts from which the tokenizer learns its tokens.
        vocabulary: most tokens of the tokenizer.
        width: number of components of the states.
        heads: number of heads of attention.
        deviation: standard deviation of the matrices. With 0.2, predictions depend on the context; with the
            small values that transformers draws (None), they hardly do.
    """
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=vocabulary, special_tokens=["<|end|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<|end|>", eos_token="<|end|>", model_max_length=WINDOW
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=WINDOW, n_embd=width, n_layer=2, n_head=heads,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if deviation is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=deviation)
    model.save_pretrained(folder)
    return folder
