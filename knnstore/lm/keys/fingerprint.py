"""Telling whether a model and a tokenizer are those that a store was made with."""

import base64
import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

_VALUES_A_TENSOR = 16

_PROBES = (
    "The quick brown fox jumps over 12,345.67 lazy dogs.",
    "  indented\n\ttabs\r\nand  runs   of spaces ",
    "naïve façade – 東京 🙂 ½ ﬁ",
    "def f(x): return x**2  # comment",
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Describe a model by a few evenly spaced values of each weight, as they are in its precision.

    Returns:
        SHA-256 of the values, hexadecimal; a colon; the values themselves, little-endian float32, in
        base64. `same_model` compares two.
    """
    values = []
    for _, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        count = min(len(flat), _VALUES_A_TENSOR)
        at = torch.arange(count) * (len(flat) - 1) // max(1, count - 1)
        values.append(flat[at.to(flat.device)].to("cpu", torch.float32).numpy())
    sample = np.concatenate(values).astype("<f4").tobytes()
    return f"{hashlib.sha256(sample).hexdigest()}:{base64.b64encode(sample).decode()}"


def same_model(one: str, other: str) -> bool:
    """Whether two fingerprints are of one checkpoint, opened in float32, float16 or bfloat16 each."""
    if one == other:
        return True
    a, b = (
        torch.from_numpy(np.frombuffer(base64.b64decode(text.partition(":")[2]), "<f4").astype(np.float32))
        for text in (one, other)
    )
    return a.shape == b.shape and len(a) > 0 and bool((_may_be_rounded(a, b) | _may_be_rounded(b, a)).all())


def _may_be_rounded(fine: Tensor, coarse: Tensor) -> Tensor:
    """Where `coarse` is `fine` in another precision, or both may be one number in two precisions."""
    half, brain = fine.half().float(), fine.bfloat16().float()
    rounded = (coarse == fine) | (coarse == half) | (coarse == brain)
    # What a float16 was rounded from, and a bfloat16 too, lies within half a step of the float16.
    step = fine.abs() * 2**-11 + 2**-25
    between = ((fine - step).bfloat16() <= coarse) & (coarse <= (fine + step).bfloat16())
    return rounded | ((fine == half) & (coarse == coarse.bfloat16()) & between)


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash the vocabulary, the special tokens and what becomes of some difficult texts.

    Returns:
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256()
    for token, id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{id} {token!r}\n".encode())
    digest.update(repr((tokenizer.bos_token_id, tokenizer.eos_token_id)).encode())
    for probe in _PROBES:
        digest.update(repr(tokenizer(probe, add_special_tokens=False)["input_ids"]).encode())
    return digest.hexdigest()
