"""Fingerprints of models and tokenizers, to check that a store is used with the right model."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from knnstore.errors import CatalogError
from knnstore.store import PAIR_MARK

_VALUES_PER_TENSOR = 16
_LENGTH = 64
"""Number of characters of a tokenizer's fingerprint."""

_IGNORED_FIELDS = frozenset(
    (
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "experts_implementation",
        "id2label",
        "gradient_checkpointing",
        "is_decoder",
        "name_or_path",
        "output_attentions",
        "pad_token_id",
        "output_hidden_states",
        "problem_type",
        "quantization_config",
        "return_dict",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Fields of a configuration that do not change the hidden states of a forward pass."""
_TRAINING_NAME_PARTS = ("drop", "initializer", "_loss", "loss_", "summary_", "label")
"""Fields whose names contain one of these parts matter in training only; they are ignored as well."""

_PROBE_TEXTS = (
    "The quick brown fox jumps over 12,345.67 lazy dogs.",
    "  indented\n\ttabs\r\nand  runs   of spaces ",
    "naïve façade – 東京 🙂 ½ ﬁ",
    "def f(x): return x**2  # comment",
)


def model_fingerprint(model: PreTrainedModel) -> str:
    """Compute a fingerprint of a model from its configuration and 16 evenly spaced values of each weight.

    The values are read in the precision in which the model is loaded. `describe_same_checkpoint` compares two
    fingerprints.

    Returns:
        Three parts with colons between them: the SHA-256 of the values, hexadecimal; the values,
        little-endian float32, in base64; and the fields of the configuration that change a forward pass,
        JSON in base64.
    """

    def read_values(name: str, at: Tensor) -> Tensor:
        flat: Tensor = weights[name].detach().reshape(-1)
        return flat[at.to(flat.device)]

    weights = model.state_dict()
    sizes = {name: weight.numel() for name, weight in weights.items()}
    return compute_fingerprint(sizes, read_values, model.config)


def compute_fingerprint(
    sizes: Mapping[str, int], read_values: Callable[[str, Tensor], Tensor], config: PreTrainedConfig
) -> str:
    """Compute a fingerprint of a model from single values of its weights, which need not be loaded.

    Args:
        sizes: number of values of each weight, by its name in the model's `state_dict`. An empty mapping
            gives a fingerprint of the configuration alone; it matches no loaded model.
        read_values: function that returns values of one weight. Its arguments are the name of the weight, and
            the indices of the values in the flattened weight, int64, shape (m,).
        config: the model's configuration.

    Returns:
        Three parts with colons between them: the SHA-256 of 16 values of each weight, hexadecimal; the
        values, little-endian float32, in base64; and the fields of the configuration that change a forward
        pass, JSON in base64.
    """
    values = [np.empty(0, np.float32)]
    for name, size in sorted(sizes.items()):
        count = min(size, _VALUES_PER_TENSOR)
        at = torch.arange(count) * (size - 1) // max(1, count - 1)
        values.append(read_values(name, at).to("cpu", torch.float32).numpy())
    sample = np.concatenate(values).astype("<f4").tobytes()
    fields = json.dumps(_select_forward_fields(config.to_dict()), sort_keys=True, default=str).encode()
    parts = (base64.b64encode(part).decode() for part in (sample, fields))
    return ":".join((hashlib.sha256(sample).hexdigest(), *parts))


def describe_same_checkpoint(one: str, other: str) -> bool:
    """Check whether two fingerprints describe the same checkpoint.

    Each model may have been loaded in float32, float16 or bfloat16. Only fields that both configurations have
    are compared, because versions of transformers add fields. Fingerprints of earlier versions of knnstore
    have no configuration; then only the values are compared.

    Raises:
        CatalogError: one of the strings is not a fingerprint.
    """
    if one == other:
        return True
    try:
        return _compare_fingerprints(one, other)
    except (ValueError, IndexError, TypeError, RecursionError) as error:  # binascii.Error is a ValueError
        raise CatalogError(
            "the catalog is damaged: the model's fingerprint is invalid; restore the catalog from a backup"
        ) from error


def _compare_fingerprints(one: str, other: str) -> bool:
    """Check whether two fingerprints match: shared configuration fields are equal, and values up to rounding.

    Raises:
        ValueError, IndexError, TypeError or RecursionError: one of the texts is not a fingerprint.
    """
    (_, *first), (_, *second) = (text.split(":") for text in (one, other))
    configs = [json.loads(base64.b64decode(parts[1])) for parts in (first, second) if len(parts) > 1]
    if len(configs) == 2 and not _check_shared_fields(*configs):
        return False
    a, b = (
        torch.from_numpy(np.frombuffer(base64.b64decode(parts[0]), "<f4").astype(np.float32))
        for parts in (first, second)
    )
    return (
        a.shape == b.shape
        and len(a) > 0
        and bool((_match_rounded_values(a, b) | _match_rounded_values(b, a)).all())
    )


def _select_forward_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that change a forward pass, also of configurations inside it."""
    return {
        name: _select_forward_fields(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in _IGNORED_FIELDS
        and value is not None
        and not any(part in name for part in _TRAINING_NAME_PARTS)
    }


def _check_shared_fields(one: Any, other: Any) -> bool:
    """Check whether the fields that two configurations share are equal, also in configurations inside them.

    Two values that are not both mappings must be equal.
    """
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return bool(one == other)
    return all(_check_shared_fields(one[name], other[name]) for name in one.keys() & other.keys())


def _match_rounded_values(fine: Tensor, coarse: Tensor) -> Tensor:
    """Check, for each pair of values, whether they may be one number in two precisions; return a mask.

    The mask is True where `coarse` (the value in the lower precision) equals `fine`, or equals `fine` rounded
    to float16 or bfloat16. It is also True where `fine` is a float16, `coarse` is a bfloat16, and a float32
    exists that may have been rounded to both.
    """
    half, brain = fine.half().float(), fine.bfloat16().float()
    rounded = (coarse == fine) | (coarse == half) | (coarse == brain)
    # The float32 value that was rounded to a float16 lies within half a step of that float16.
    step = fine.abs() * 2**-11 + 2**-25
    between = ((fine - step).bfloat16() <= coarse) & (coarse <= (fine + step).bfloat16())
    return rounded | ((fine == half) & (coarse == coarse.bfloat16()) & between)


def seq2seq_tokenizer_fingerprint(tokenizer: Any, prefix: Sequence[int]) -> str:
    """Compute a fingerprint of an encoder-decoder model's tokenizer, its languages and its decoder prefix.

    These turn a pair of a source and a text into the model's input.

    Args:
        tokenizer: the model's tokenizer.
        prefix: the tokens with which the decoder begins every text.

    Returns:
        `PAIR_MARK` and the beginning of a SHA-256, hexadecimal; 64 characters in total.
    """
    digest = hashlib.sha256(tokenizer_fingerprint(tokenizer).encode())
    for probe in _PROBE_TEXTS:
        digest.update(repr(tokenizer(probe)["input_ids"]).encode())
        digest.update(repr(tokenizer(text_target=probe, add_special_tokens=False)["input_ids"]).encode())
    digest.update(repr(tuple(prefix)).encode())
    return f"{PAIR_MARK}{digest.hexdigest()}"[:_LENGTH]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash a tokenizer: its vocabulary, its BOS and EOS tokens, and the tokens of four difficult texts.

    Returns:
        SHA-256, hexadecimal.
    """
    digest = hashlib.sha256()
    for token, id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{id} {token!r}\n".encode())
    digest.update(repr((tokenizer.bos_token_id, tokenizer.eos_token_id)).encode())
    for probe in _PROBE_TEXTS:
        digest.update(repr(tokenizer(probe, add_special_tokens=False)["input_ids"]).encode())
    return digest.hexdigest()
