"""Loading a model and its tokenizer, and telling whether they are the ones a store was made with."""

import json
import logging
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from knnstore.datastore import Metric
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.keys import (
    AUTO,
    Joining,
    key_dim,
    locate,
    model_fingerprint,
    same_model,
    tokenizer_fingerprint,
)
from knnstore.lm.reading.encoder import check_logits, vocabulary_size
from knnstore.lm.reading.windows import check_window, max_length_of, prefix_of
from knnstore.model_names import add_gguf_file, check_model, split_gguf_file
from knnstore.store import Identity

_logger = logging.getLogger(__name__)

_ALIKE = 0.05
"""By how much, of the largest one, logits may differ through rounding alone."""

_NO_CODE = "knnstore runs no code that comes with a model"

_MOST = {
    "num_hidden_layers": ("layers", 10_000),
    "hidden_size": ("components of a hidden state", 1 << 20),
    "intermediate_size": ("components of a feed-forward layer", 1 << 23),
    "head_dim": ("components of an attention head", 1 << 13),
}
"""The largest sizes that are loaded, many times those of any model, by their names in a configuration.

Transformers builds all layers before it compares them with the weights, so a wrong size costs minutes, or
all memory.
"""

_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Options of `from_pretrained` that say where a model's files are."""

_REASON_CHARACTERS = 300
"""Most characters of another package's error message that are shown."""


class Loaded(NamedTuple):
    """A causal language model, ready to run, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    gguf_file: str | None = None,
    **options: Any,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        name: a folder or a hub id; or a GGUF file in one, as in ``models/small.gguf``.
        device: as torch names it; default is the GPU if there is one, else the CPU.
        dtype: ``float32``, ``bfloat16`` or ``float16``; default is what the model was saved in on
            a GPU, and float32 on the CPU.
        gguf_file: the file in `name` that has the model.
        **options: passed on to ``AutoModelForCausalLM.from_pretrained`` (revision, device_map, ...).

    Raises:
        ConfigError: there is no such model, device or dtype; or it could run only with code of its own.
    """
    if options.get("trust_remote_code"):
        raise ConfigError(f"{_NO_CODE}: trust_remote_code is not accepted")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = dtype or ("float32" if place == "cpu" else "auto")
    if isinstance(wanted, str) and wanted not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype {wanted!r} is none of float32, bfloat16, float16")
    name = add_gguf_file(name, gguf_file)
    folder, gguf_file = split_gguf_file(name)
    of_file = {} if gguf_file is None else {"gguf_file": gguf_file}
    part = "config.json"  # read now, for the message of an error
    try:
        _check_present(torch.device(place))
        # Without this transformers would ask on the terminal whether to run the folder's code.
        safe: dict[str, Any] = {"trust_remote_code": False}
        if check_model(name, options.get("revision")):
            safe["local_files_only"] = True
        options |= safe
        pinned = {"revision": options.get("revision", "main"), **safe, **of_file}
        config = AutoConfig.from_pretrained(folder, **pinned)
        _check_sizes(name, config)
        part = "the tokenizer's files (tokenizer.json, tokenizer_config.json)"
        tokenizer = _tokenizer_of(folder, **pinned)
        part = "the weights, config.json or generation_config.json"
        wanted_attention = options.get("attn_implementation") or config._attn_implementation
        if "/" in str(wanted_attention):  # a repository whose code transformers would fetch and run
            raise ConfigError(f"the model {name!r} wants code from {wanted_attention!r}: {_NO_CODE}")
        if gguf_file is None:
            _check_shards(folder, **options)
        loading: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=wanted, use_safetensors=True, output_loading_info=True, **options | safe | of_file
        )
        model, found = loading
        missing = sorted(found["missing_keys"])
        if missing:  # transformers would make them at random
            raise ConfigError(
                f"the files of the model {name!r} lack {len(missing):,} of the weights that its config.json "
                f"asks for, {missing[0]!r} for one: they are not of one model"
            )
        if gguf_file is not None:
            model.name_or_path = model.config.name_or_path = name_of(name)
        placed = model if "device_map" in options else model.to(place)
        return Loaded(placed.eval(), tokenizer)
    except ConfigError:
        raise
    except MemoryError:
        raise
    # Of any kind: transformers and torch use the values of a model's files without asking for their types.
    except BaseException as error:
        if not is_of_files(error):
            raise
        files = gguf_file or _find_damaged_file(Path(folder)) or part
        raise ConfigError(
            f"the model {name!r} cannot be loaded on {place}, because of {files}: {reason_of(error)}"
        ) from error


def _find_damaged_file(folder: Path) -> str | None:
    """Return the name of a file of a model's folder that is no JSON object or has no header of safetensors.

    None where every file is of its format, or where the model is on the hub.
    """
    for file in sorted(folder.glob("*.json")):
        try:
            is_object = isinstance(json.loads(file.read_text("utf-8")), dict)
        except (OSError, ValueError, RecursionError):
            return file.name
        if not is_object:
            return file.name
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError):
            return file.name
    return None


def loaded(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Loaded:
    """A model by its name, see `load_model`, or one that was loaded, with its tokenizer.

    Args:
        model: a folder, a hub id, or a causal language model, e.g. quantized, spread over devices or with
            adapters of PEFT; it is set to evaluation mode.
        tokenizer: default is that of the model's folder or hub id.
        device: of a model by its name.
        dtype: likewise.
        **options: likewise.

    Raises:
        ConfigError: a model that was loaded is given with what only loading can follow; or as `load_model`.
    """
    if isinstance(model, str | os.PathLike):
        found = load_model(os.fspath(model), device=device, dtype=dtype, **options)
        return found if tokenizer is None else found._replace(tokenizer=tokenizer)
    asked = {"device": device, "dtype": dtype, **options}
    given = [name for name, value in asked.items() if value is not None]
    if given:
        raise ConfigError(f"the model is loaded already: load it with {given[0]}, or give its name")
    adapted: Any = model
    if hasattr(adapted, "get_base_model"):  # PEFT's wrapper; its adapters are inside the model
        if adapted.active_peft_config.is_prompt_learning:
            raise ConfigError("prompts that were learned are no part of the model: knnstore cannot use them")
        model = adapted.get_base_model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a model is a name or a transformers model, not {type(model).__name__}")
    if tokenizer is None:
        try:
            folder, gguf_file = split_gguf_file(name_of(model))
            of_file = {} if gguf_file is None else {"gguf_file": gguf_file}
            tokenizer = _tokenizer_of(folder, trust_remote_code=False, **of_file)
        except BaseException as error:
            if not is_of_files(error):
                raise
            raise ConfigError("the model's folder has no tokenizer: give it as tokenizer=...") from error
    model.eval()  # type: ignore[no-untyped-call]
    return Loaded(model, tokenizer)


def _tokenizer_of(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer, and try it on one letter.

    Raises:
        ConfigError: its files are missing. Transformers would make a tokenizer that knows no text.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"the model {name!r} has no tokenizer: save that beside it (save_pretrained)")
    tokenizer("a", add_special_tokens=False)  # raises where its files hold a value that makes no sense
    return tokenizer


def _check_sizes(name: str, config: Any) -> None:
    """Refuse a configuration with sizes that no model has, before its layers are built."""
    text = config.get_text_config()
    for field, (things, most) in _MOST.items():
        try:
            size = getattr(text, field, None)
        except Exception:  # each layer has its own size, which transformers checks
            size = None
        if isinstance(size, int) and (size > most or (size < 1 and field == "num_hidden_layers")):
            raise ConfigError(
                f"the configuration of the model {name!r} asks for {size:,} {things} ({field}), and 1 to "
                f"{most:,} are loaded: it is damaged"
            )


def _check_shards(name: str, **options: Any) -> None:
    """Refuse an index of weights that names anything but safetensors files of its own folder.

    Transformers opens each file that the index names, wherever it is, and unpickles one of another kind.
    A model without an index is accepted.

    Args:
        name: a folder, or a hub id: then the index is fetched first.
        **options: of `load_model`.

    Raises:
        ConfigError: the index is not an index, or names such a file.
    """
    variant = options.get("variant")
    index_name = f"model.safetensors.index.{f'{variant}.' if variant else ''}json"
    path = cached_file(
        name,
        index_name,
        **{option: options[option] for option in _FILE_OPTIONS if options.get(option) is not None},
        _raise_exceptions_for_missing_entries=False,
    )
    if path is None:
        return
    file = Path(path)
    try:
        index = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}; copy the model again") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ConfigError(f"{file} is not an index of weights: copy the model again")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(
                f"{file} names {str(shard)[:200]!r}: only safetensors files of its own folder are loaded"
            )


def is_of_files(error: BaseException) -> bool:
    """Return whether loading may raise this for what is in a model's files.

    Tokenizers' panics are no `Exception`.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def reason_of(error: BaseException) -> str:
    """Return one line that says what is wrong: of an error's message, or its type where it has none."""
    lines = [line for line in str(error).strip().strip('"').splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    whole = " ".join(" ".join(lines).split())[:_REASON_CHARACTERS]
    if isinstance(error, struct.error):
        return f"its file ends too early ({whole})"
    if isinstance(error, KeyError | AttributeError | TypeError | IndexError | ZeroDivisionError):
        return f"its files hold a value that makes no sense ({whole})"
    if "ignore_mismatched_sizes" in lines[0]:  # an argument of transformers, which nobody has given
        return "its weights have other shapes than its configuration asks for"
    return whole if lines[0].endswith(":") else lines[0][:_REASON_CHARACTERS]


def name_of(model: str | PreTrainedModel) -> str:
    """The folder, as an absolute path, or the hub id to load a model from again; else empty."""
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else str(model.config.name_or_path or "")
    return os.path.abspath(name) if name and os.path.exists(name) else name


def _check_present(device: torch.device) -> None:
    """Refuse a GPU that is not there, before a model is read."""
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "no CUDA device"
        raise ConfigError(f"there is no {device} here: torch finds {there}; name another device, e.g. cpu")


def check_runs(model: PreTrainedModel) -> None:
    """Refuse a model that cannot predict the next token of a text, tried on three tokens.

    Logs a warning if what it predicts depends on later tokens, as in BERT without ``is_decoder``.

    Raises:
        ConfigError: the forward pass fails, or gives no logits for each token.
        ModelOutputError: the logits are NaN or infinite.
    """
    name = type(model).__name__
    ids = torch.tensor([[0, 1, 2], [0, 1, 0]], device=model.device)
    try:
        with torch.inference_mode():
            logits: Any = model(ids, use_cache=False).logits
        shape = tuple(logits.shape)
    except Exception as error:  # of any kind: whatever a model meets in its layers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the model cannot read text: {name} fails on three tokens: {reason}") from error
    if len(shape) != 3 or shape[:2] != (2, 3):
        raise ConfigError(
            f"the model does not predict text: {name} gives logits of shape {shape} for 2 x 3 tokens"
        )
    check_logits(model, logits)
    before = logits[:, :2].float()
    if (before[0] - before[1]).abs().amax() > _ALIKE * before.abs().amax():
        _logger.warning(
            "%s looks at later tokens, so perplexities are too low: a model like BERT needs is_decoder=True "
            "in its configuration",
            name,
        )


def warn_of_unknown_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if the tokenizer has tokens that the model has not. Text with such a token is refused."""
    vocabulary = vocabulary_size(model)
    unknown = {id: token for token, id in tokenizer.get_vocab().items() if not 0 <= id < vocabulary}
    if unknown:
        first = min(unknown)
        _logger.warning(
            "the tokenizer has %s tokens that are not among the model's %s, %r (token %s) for one: text that "
            "holds such a token is refused",
            f"{len(unknown):,}", f"{vocabulary:,}", unknown[first], first,
        )  # fmt: skip


def identify(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    key: str = AUTO,
    joining: Joining | None = None,
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
        joining: how many states there make a key; default one.
        metric: ``l2`` or ``ip``.
        max_length: tokens in a window, the prefix included; default is the model's limit.
        stride: tokens by which a window moves on; default is half of `max_length`.

    Raises:
        ConfigError: the key location, the metric or the window is not possible for this model.
    """
    if metric not in {choice.value for choice in Metric}:
        raise ConfigError(f"metric {metric!r} is none of {', '.join(Metric)}")
    location, joined = locate(model, key), joining or Joining()
    prefix, vocabulary = prefix_of(tokenizer), int(model.config.get_text_config().vocab_size)
    if prefix is not None and prefix >= vocabulary:
        raise ConfigError(
            f"the tokenizer begins texts with token {prefix} ({tokenizer.convert_ids_to_tokens(prefix)!r}), "
            f"which is not among the model's {vocabulary:,} tokens: use the tokenizer that the model was "
            "trained with"
        )
    window = window_of(model, max_length)
    step = stride or max(1, window // 2)
    check_window(window, step)
    return Identity(
        model=name,
        model_fingerprint=model_fingerprint(model),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        key=f"{location}{joined}",
        dim=key_dim(model, location),
        metric=metric,
        vocab_size=vocabulary,
        max_length=window,
        stride=step,
        has_prefix=prefix is not None,
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
    """Refuse a model or tokenizer, unless that is None, that is not the one the store was made with.

    Raises:
        FingerprintMismatchError: one differs; both are named.
    """
    found = model_fingerprint(model)
    if not same_model(found, identity.model_fingerprint):
        if found.partition(":")[0] == identity.model_fingerprint.partition(":")[0]:
            raise FingerprintMismatchError(
                f"the configuration of the model {identity.model} is not the one that the store was made "
                "with: restore its config.json, or make a store for this one"
            )
        raise FingerprintMismatchError(
            f"the store was made with the model {identity.model} ({identity.model_fingerprint[:12]}), "
            f"this is {model.config.name_or_path or type(model).__name__} ({found[:12]}): "
            "load that one, or make a store for this one"
        )
    if tokenizer is not None:
        check_tokenizer(tokenizer, identity)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, identity: Identity) -> None:
    """Refuse a tokenizer that is not the one the store was made with.

    Raises:
        FingerprintMismatchError: it differs; both are named.
    """
    found = tokenizer_fingerprint(tokenizer)
    if found != identity.tokenizer_fingerprint:
        raise FingerprintMismatchError(
            f"the store was made with the tokenizer of {identity.model} "
            f"({identity.tokenizer_fingerprint[:12]}), this is {tokenizer.name_or_path} ({found[:12]})"
        )
