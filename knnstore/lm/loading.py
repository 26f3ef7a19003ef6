"""Loading a model and its tokenizer, and telling whether they are the ones a store was made with."""

import base64
import hashlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from knnstore.datastore import Metric
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.keys import key_dim
from knnstore.lm.locations import locate
from knnstore.lm.windows import check_window, max_length_of, prefix_of
from knnstore.store import Identity

_VALUES_A_TENSOR = 16
_PROBES = (
    "The quick brown fox jumps over 12,345.67 lazy dogs.",
    "  indented\n\ttabs\r\nand  runs   of spaces ",
    "naïve façade – 東京 🙂 ½ ﬁ",
    "def f(x): return x**2  # comment",
)


class Loaded(NamedTuple):
    """A causal language model, ready to run, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(
    name: str, *, device: str | None = None, dtype: str | torch.dtype | None = None, **options: Any
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        name: a folder or a hub id.
        device: as torch names it; default is the GPU if there is one, else the CPU.
        dtype: ``float32``, ``bfloat16`` or ``float16``; default is what the model was saved in on
            a GPU, and float32 on the CPU.
        **options: passed on to ``AutoModelForCausalLM.from_pretrained`` (revision, device_map, ...).

    Raises:
        ConfigError: there is no such model, device or dtype.
    """
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = dtype or ("float32" if place == "cpu" else "auto")
    if isinstance(wanted, str) and wanted not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {wanted!r} is none of float32, bfloat16, float16")
    try:
        _check_present(torch.device(place))
        tokenizer = AutoTokenizer.from_pretrained(name, revision=options.get("revision", "main"))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=wanted, use_safetensors=True, **options)
        placed = model if "device_map" in options else model.to(place)  # type: ignore[arg-type]
        return Loaded(placed.eval(), tokenizer)
    except ConfigError:
        raise
    # Torch asserts that it was made for a device.
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"the model {name!r} cannot be loaded on {place}: {reason}") from error


def _check_present(device: torch.device) -> None:
    """Refuse a GPU that is not there, before a model is read."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "no CUDA device"
        raise ConfigError(f"there is no {device} here: torch finds {there}; name another device, e.g. cpu")


def identify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    key: str = "ffn_input",
    metric: str = "l2",
    max_length: int | None = None,
    stride: int | None = None,
) -> Identity:
    """Describe what a store for this model is made for.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        name: the folder or hub id to load it from again.
        key: where the keys are taken; see `locate`.
        metric: ``l2`` or ``ip``.
        max_length: tokens in a window, the prefix included; default is the model's limit.
        stride: tokens by which a window moves on; default is half of `max_length`.

    Raises:
        ConfigError: the key location, the metric or the window is not possible for this model.
    """
    if metric not in {choice.value for choice in Metric}:
        raise ConfigError(f"metric {metric!r} is none of {', '.join(Metric)}")
    location = locate(model, key)
    window = window_of(model, max_length)
    step = stride or max(1, window // 2)
    check_window(window, step)
    return Identity(
        model=name,
        model_fingerprint=model_fingerprint(model),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        key=str(location),
        dim=key_dim(model, location),
        metric=metric,
        vocab_size=max(len(tokenizer), model.config.get_text_config().vocab_size),
        max_length=window,
        stride=step,
        has_prefix=prefix_of(tokenizer) is not None,
    )


def window_of(model: PreTrainedModel, max_length: int | None = None) -> int:
    """The length of windows: what was asked for, which the model must take; default its limit.

    Raises:
        ConfigError: the model takes less, or has no limit and nothing was asked for.
    """
    try:
        limit = max_length_of(model.config)
    except ConfigError:
        if max_length is None:
            raise
        return max_length  # a model without a limit
    if max_length is not None and max_length > limit:
        raise ConfigError(f"max_length is {max_length}, the model takes at most {limit} tokens")
    return max_length or limit


def check_matches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, identity: Identity
) -> None:
    """Refuse a model or tokenizer that is not the one the store was made with.

    Args:
        model: the model about to use the store.
        tokenizer: its tokenizer; None leaves it unchecked.
        identity: the store's.

    Raises:
        FingerprintMismatchError: one differs; both are named.
    """
    found = model_fingerprint(model)
    if not same_model(found, identity.model_fingerprint):
        raise FingerprintMismatchError(
            f"the store was made with the model {identity.model} ({identity.model_fingerprint[:12]}), "
            f"this is {model.config.name_or_path or type(model).__name__} ({found[:12]}): "
            "load that one, or make a store for this one"
        )
    if tokenizer is None:
        return
    found = tokenizer_fingerprint(tokenizer)
    if found != identity.tokenizer_fingerprint:
        raise FingerprintMismatchError(
            f"the store was made with the tokenizer of {identity.model} "
            f"({identity.tokenizer_fingerprint[:12]}), this is {tokenizer.name_or_path} ({found[:12]})"
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
