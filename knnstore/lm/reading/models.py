"""Loading models and tokenizers, and checking that a store was made with them (`check_matches`)."""

import json
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.hub import cached_file

from knnstore.datastore import Metric
from knnstore.errors import ConfigError, FingerprintMismatchError
from knnstore.lm.keys import (
    AUTO,
    Joining,
    Source,
    compute_fingerprint,
    describe_same_checkpoint,
    key_dim,
    locate,
    make_forward_kwargs,
    model_fingerprint,
    reads_source,
    seq2seq_tokenizer_fingerprint,
    tokenizer_fingerprint,
)
from knnstore.lm.reading.encoder import check_logits
from knnstore.lm.reading.token_text import is_panic
from knnstore.lm.reading.windows import (
    check_window,
    find_decoder_prefix,
    get_decoder_prefix,
    prefix_of,
    read_max_length,
)
from knnstore.model_names import add_gguf_file, check_model, split_gguf_file
from knnstore.store import Identity

_logger = logging.getLogger(__name__)

_LOGIT_ROUNDING = 0.05
"""Largest difference of two logits that counts as a rounding error, as a fraction of the largest logit."""

_NO_CODE = "knnstore runs no code that comes with a model"

_MAX_SIZES = {
    "num_hidden_layers": ("layers", 10_000),
    "hidden_size": ("components of a hidden state", 1 << 20),
    "intermediate_size": ("components of a feed-forward layer", 1 << 23),
    "head_dim": ("components of an attention head", 1 << 13),
}
"""Largest accepted size of each field of a configuration, far above the sizes of real models.

Transformers builds all layers before it compares them with the weights, so a wrong size would take minutes or
all memory.
"""

_WORD_START = "▁"
"""Token that marks the beginning of a word.

If a tokenizer's files are missing, transformers may create a tokenizer that has only this token and special
tokens.
"""

_DEFAULT_WINDOW = 2_048
"""Number of tokens in a window if an encoder-decoder model names no limit, as T5 does.

A store without keys for an encoder-decoder model has the same number, but never uses it."""

_GENERATING_CLASSES = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
"""Classes of transformers that generate text, each mapping by the class of the configuration."""

_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
"""Options of `from_pretrained` that choose a model's files."""

_REASON_CHARACTERS = 300
"""Largest number of characters of another package's error message in a message of ours."""


Kind = Literal["causal", "seq2seq"]
"""Kind of a language model: ``causal`` continues a text; ``seq2seq`` (encoder-decoder) reads a source, and
generates a text."""


class Loaded(NamedTuple):
    """A language model in evaluation mode, and its tokenizer."""

    model: PreTrainedModel
    """The model, on its device."""
    tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer."""


def load_model(
    name: str,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    gguf_file: str | None = None,
    kind: Kind | None = None,
    **options: Any,
) -> Loaded:
    """Load a causal language model or an encoder-decoder model, and its tokenizer.

    Args:
        name: a folder or a hub id; or the path of a GGUF file, for example ``models/small.gguf``.
        device: device name of torch; default is the GPU if torch finds one, else the CPU.
        dtype: ``float32``, ``bfloat16`` or ``float16``. The default on a CPU is float32. The default on a GPU
            is the dtype of the saved weights.
        gguf_file: name of the GGUF file in the folder or hub id `name`.
        kind: the kind of model that is accepted; the other kind raises ConfigError. None accepts both.
        **options: passed on to ``from_pretrained`` of the `Auto` class (revision, device_map, ...).

    Returns:
        The model in evaluation mode, on its device, and the tokenizer.

    Raises:
        ConfigError: the model, device or dtype does not exist; the files of the model are damaged or
            incomplete; or the model needs code from its repository.
    """
    if options.get("trust_remote_code"):
        raise ConfigError(f"{_NO_CODE}: trust_remote_code is not accepted")
    # 1) Choose device, dtype and files.
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    wanted = dtype or ("float32" if place == "cpu" else "auto")
    if isinstance(wanted, str) and wanted not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype must be float32, bfloat16 or float16, got {wanted!r}")
    name = add_gguf_file(name, gguf_file)
    folder, gguf_file = split_gguf_file(name)
    of_file = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        # 2) Check the configuration, and that no code from a repository would run.
        _check_device_exists(torch.device(place))
        config, tokenizer = load_text_parts(name, revision=options.get("revision"))
        auto_class = _choose_auto_class(name, config, kind)
        _check_sizes(name, config)
        # Without this option transformers asks on the terminal if it may run code from the repository.
        safe: dict[str, Any] = {"trust_remote_code": False}
        if check_model(name, options.get("revision")):
            safe["local_files_only"] = True
        options |= safe
        wanted_attention = options.get("attn_implementation") or config._attn_implementation
        if "/" in str(wanted_attention):  # a repository: transformers would download and run its code
            raise ConfigError(f"the model {name!r} needs code from {wanted_attention!r}: {_NO_CODE}")
        if gguf_file is None:
            check_shards(folder, **options)
        # 3) Load the weights.
        loading: Any = auto_class.from_pretrained(
            folder, dtype=wanted, use_safetensors=True, output_loading_info=True, **options | safe | of_file
        )
        model, found = loading
        missing = sorted(found["missing_keys"])
        if missing:  # transformers would initialize them randomly
            raise ConfigError(
                f"the files of the model {name!r} lack {len(missing):,} of the weights that its config.json "
                f"describes, such as {missing[0]!r}: the files belong to different models"
            )
        if gguf_file is not None:
            model.name_or_path = model.config.name_or_path = get_model_name(name)
        placed = model if "device_map" in options else model.to(place)
        return Loaded(placed.eval(), tokenizer)
    except ConfigError:
        raise
    except MemoryError:
        raise
    # 4) Explain an error. It may be of any type, because transformers and torch do not check the types of
    # values in a model's files.
    except BaseException as error:
        if not is_caused_by_files(error):
            raise
        files = gguf_file or _find_damaged_file(Path(folder))
        raise ConfigError(
            f"the model {name!r} cannot be loaded on {place}, because of "
            f"{files or 'the weights, config.json or generation_config.json'}: {describe_reason(error)}"
        ) from error


class TextParts(NamedTuple):
    """The configuration and the tokenizer of a model of any class, without its weights."""

    config: PreTrainedConfig
    """The configuration of transformers."""
    tokenizer: PreTrainedTokenizerBase
    """The tokenizer."""


def load_text_parts(
    name: str, tokenizer: PreTrainedTokenizerBase | None = None, *, revision: str | None = None
) -> TextParts:
    """Load the configuration and the tokenizer of a model of any class, without its weights.

    Args:
        name: a folder or a hub id, or the path of a GGUF file.
        tokenizer: a loaded tokenizer to return; None loads the model's tokenizer.
        revision: revision of the hub id; default is ``main``.

    Raises:
        ConfigError: the model does not exist, or a file is damaged or missing; the message names the file.
    """
    folder, gguf_file = split_gguf_file(name)
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    part = "config.json"  # the file that is loaded now, for the error message
    try:
        if check_model(name, revision):
            options["local_files_only"] = True
        config = AutoConfig.from_pretrained(folder, **options)
        part = "the tokenizer's files (tokenizer.json, tokenizer_config.json)"
        return TextParts(config, tokenizer or _load_tokenizer(folder, **options))
    except (ConfigError, MemoryError):
        raise
    except BaseException as error:
        if not is_caused_by_files(error):
            raise
        files = gguf_file or _find_damaged_file(Path(folder)) or part
        raise ConfigError(
            f"the model {name!r} cannot be loaded, because of {files}: {describe_reason(error)}"
        ) from error


def load_decoder_prefix(name: str) -> tuple[int, ...]:
    """Return the tokens with which the decoder of an encoder-decoder model begins every text.

    Only the configuration is loaded.

    Args:
        name: a folder or a hub id.

    Raises:
        ConfigError: the model does not exist, or names no single token that starts the decoder.
    """
    is_local = check_model(name)
    try:
        config = GenerationConfig.from_pretrained(name, local_files_only=is_local)
    except OSError:  # older models have it in their configuration
        try:
            config = GenerationConfig.from_pretrained(
                name, "config.json", local_files_only=is_local, _from_model_config=True
            )
        except OSError as error:
            raise ConfigError(f"the model {name!r} cannot be loaded: {describe_reason(error)}") from error
    return get_decoder_prefix(config, name)


def is_causal(config: PreTrainedConfig) -> bool:
    """Check whether a configuration belongs to a causal language model, which continues a text.

    False for encoder-decoder models and for models that do not predict the next token of a text.
    """
    return not config.is_encoder_decoder and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def is_seq2seq(config: PreTrainedConfig) -> bool:
    """Check whether a configuration belongs to an encoder-decoder model that reads and generates text."""
    return config.is_encoder_decoder and type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING


def generates_text(config: PreTrainedConfig) -> bool:
    """Check whether transformers has a class that generates text, from any input, for a configuration."""
    return any(type(config) in classes for classes in _GENERATING_CLASSES)


def warn_if_no_text(config: PreTrainedConfig, name: str) -> None:
    """Log a warning if a model generates no text, because a store of n-grams is of no use to it.

    Args:
        config: the model's configuration.
        name: name of the model.
    """
    if not generates_text(config):
        _logger.warning(
            "the model %r (%s) generates no text, so only its tokenizer is used: no n-grams can be added to "
            "its predictions",
            name,
            config.model_type,
        )


def _choose_auto_class(name: str, config: PreTrainedConfig, wanted: Kind | None) -> Any:
    """Return the `Auto` class of transformers that loads a model.

    Args:
        name: name of the model, for the message.
        config: the model's configuration.
        wanted: the kind of model that the caller needs; None for both.

    Raises:
        ConfigError: the model is neither a causal language model nor an encoder-decoder model of texts, or it
            is refused; the message says what can be done.
    """
    if is_causal(config):
        if wanted == "seq2seq":
            raise ConfigError(
                f"the model {name!r} ({config.model_type}) is a causal model, but an encoder-decoder model "
                "is needed"
            )
        return AutoModelForCausalLM
    if is_seq2seq(config) and wanted != "causal":
        return AutoModelForSeq2SeqLM
    if is_seq2seq(config):
        raise ConfigError(
            f"the model {name!r} ({config.model_type}) is an encoder-decoder model, but a causal model is "
            "needed"
        )
    kind = "an encoder-decoder model" if config.is_encoder_decoder else "not a causal language model"
    advice = (
        "; with a store of `knnstore init --key none`, NGramLogitsProcessor adds n-grams to such a model"
        if generates_text(config)
        else ": choose a model that generates text"
    )
    raise ConfigError(
        f"the model {name!r} ({config.model_type}) is {kind}, so knnstore cannot run it{advice}"
    )


def _find_damaged_file(folder: Path) -> str | None:
    """Return the name of the first damaged JSON or safetensors file in a model's folder.

    A JSON file is damaged if it is not a JSON object, a safetensors file if its header cannot be read.
    Returns None if no file is damaged, or if the model is on the hub.
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


def load_or_accept_model(
    model: str | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Loaded:
    """Load a model by its name, or accept a loaded model; return it with its tokenizer.

    Args:
        model: a folder, a hub id, or a loaded causal language model or encoder-decoder model, e.g. quantized,
            distributed over devices or with adapters of PEFT. A loaded model is set to evaluation mode.
        tokenizer: default is the tokenizer in the model's folder or hub id.
        device: device of the model; only for a model that is given by its name. Default is the GPU if torch
            finds one, else the CPU.
        dtype: dtype of the weights; only for a model that is given by its name.
        **options: passed on to ``from_pretrained`` of the `Auto` class; only for a model that is given by its
            name.

    Raises:
        ConfigError: a loaded model is given together with options for loading; its tokenizer is not found;
            the adapters are learned prompts of PEFT; or the model cannot be loaded.
    """
    if isinstance(model, str | os.PathLike):
        found = load_model(os.fspath(model), device=device, dtype=dtype, **options)
        return found if tokenizer is None else found._replace(tokenizer=tokenizer)
    asked = {"device": device, "dtype": dtype, **options}
    given = [name for name, value in asked.items() if value is not None]
    if given:
        raise ConfigError(
            f"{given[0]} has no effect on a model that is already loaded: load the model with it, or give "
            "the model's name"
        )
    adapted: Any = model
    if hasattr(adapted, "get_base_model"):  # PEFT's wrapper; its adapters are inside the model
        if adapted.active_peft_config.is_prompt_learning:
            raise ConfigError(
                "knnstore cannot use learned prompts (prompt tuning), because they are not part of the model"
            )
        model = adapted.get_base_model()
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"a model must be a name or a transformers model, not {type(model).__name__}")
    if tokenizer is None:
        try:
            folder, gguf_file = split_gguf_file(get_model_name(model))
            of_file = {} if gguf_file is None else {"gguf_file": gguf_file}
            tokenizer = _load_tokenizer(folder, trust_remote_code=False, **of_file)
        except BaseException as error:
            if not is_caused_by_files(error):
                raise
            raise ConfigError("the model's folder has no tokenizer: give it as tokenizer=...") from error
    model.eval()  # type: ignore[no-untyped-call]
    return Loaded(model, tokenizer)


def _load_tokenizer(name: str, **options: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or by its hub id, and test it on one letter.

    Raises:
        ConfigError: the files of the tokenizer are missing. In this case transformers raises no error, but
            returns a tokenizer that has only special tokens.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, _WORD_START}:
        raise ConfigError(
            f"the model {name!r} has no tokenizer: save the tokenizer in the model's folder (save_pretrained)"
        )
    tokenizer("a", add_special_tokens=False)  # raises an error if its files have an invalid value
    return tokenizer


def _check_sizes(name: str, config: Any) -> None:
    """Check that the sizes in a model's configuration are possible, before the layers are built.

    Args:
        name: name of the model, for the error message.
        config: the configuration of transformers.

    Raises:
        ConfigError: a size is larger than in `_MAX_SIZES`, or the number of layers is below 1.
    """
    text = config.get_text_config()
    for field, (things, most) in _MAX_SIZES.items():
        try:
            size = getattr(text, field, None)
        except Exception:  # each layer has its own size, which transformers checks
            size = None
        if isinstance(size, int) and (size > most or (size < 1 and field == "num_hidden_layers")):
            raise ConfigError(
                f"the configuration of the model {name!r} is damaged: it asks for {size:,} {things} "
                f"({field}), but only 1 to {most:,} are accepted"
            )


def check_shards(name: str, **options: Any) -> None:
    """Check that a model's index of weight files names only safetensors files in its own folder.

    Transformers opens every file that the index names, in any folder, and unpickles files of other formats. A
    model without an index is accepted.

    Args:
        name: a folder or a hub id; the index of a hub id is downloaded.
        **options: the options of `load_model`.

    Raises:
        ConfigError: the index is damaged, or names any other file.
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
        raise ConfigError(f"{file} cannot be read: {describe_reason(error)}; copy the model again") from error
    shards = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shards, dict) or not shards or not isinstance(index.get("metadata", {}), dict):
        raise ConfigError(f"{file} is not an index of weights: copy the model again")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(
                f"{file} names {str(shard)[:200]!r}: only safetensors files of its own folder are loaded"
            )


def is_caused_by_files(error: BaseException) -> bool:
    """Check whether an error during loading may be caused by the model's files.

    True for every `Exception`, and for a panic of the package tokenizers, which is a `BaseException` only.
    """
    return isinstance(error, Exception) or is_panic(error)


def describe_reason(error: BaseException) -> str:
    """Return one line that explains an error of another package.

    Returns the name of the error's type if the error has no message.
    """
    lines = [line for line in str(error).strip().strip('"').splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    whole = " ".join(" ".join(lines).split())[:_REASON_CHARACTERS]
    if isinstance(error, struct.error):
        return f"its file ends too early ({whole})"
    if isinstance(error, KeyError | AttributeError | TypeError | IndexError | ZeroDivisionError):
        return f"its files contain an invalid value ({whole})"
    if "ignore_mismatched_sizes" in lines[0]:  # the advice of transformers does not apply here
        return "its weights have other shapes than its configuration asks for"
    return whole if lines[0].endswith(":") else lines[0][:_REASON_CHARACTERS]


def get_model_name(model: str | PreTrainedModel) -> str:
    """Return the name to load a model again: the absolute path of its folder, or its hub id.

    Returns an empty string if the model has no name.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else str(model.config.name_or_path or "")
    return os.path.abspath(name) if name and os.path.exists(name) else name


def _check_device_exists(device: torch.device) -> None:
    """Check that a CUDA device exists, before a model is loaded.

    Raises:
        ConfigError: torch does not find the device. Devices of other types are not checked.
    """
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0" if count else "no CUDA device"
        raise ConfigError(
            f"the device {device} does not exist: torch finds {there}; name another device, e.g. cpu"
        )


def check_model_predicts_text(model: PreTrainedModel) -> None:
    """Check with a pass over three tokens that a model predicts the next token of a text.

    Logs a warning if the logits depend on later tokens, as for BERT without ``is_decoder``.

    Raises:
        ConfigError: the forward pass fails, or its result does not have logits for each token. Also raised
            for an encoder-decoder model whose source is not text (Whisper), or whose sources have another
            vocabulary than its texts.
        ModelOutputError: the logits are NaN or infinite.
    """
    name = type(model).__name__
    if reads_source(model) and model.main_input_name != "input_ids":
        raise ConfigError(f"{name} reads {model.main_input_name}: only sources that are text are supported")
    ids = torch.tensor([[0, 1, 2], [0, 1, 0]], device=model.device)
    try:
        inputs = make_forward_kwargs(model, ids, Source.make_probe(model, len(ids)))
        with torch.inference_mode():
            logits: Any = model(**inputs, use_cache=False).logits
        shape = tuple(logits.shape)
    except Exception as error:  # any exception of the model's layers
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"the model cannot read text: {name} fails on three tokens: {reason}") from error
    if len(shape) != 3 or shape[:2] != (2, 3):
        raise ConfigError(
            f"the model does not predict text: {name} gives logits of shape {shape} for 2 x 3 tokens"
        )
    if reads_source(model) and shape[2] != model.config.vocab_size:
        raise ConfigError(
            f"{name} has different vocabularies for sources and for texts: that is not supported"
        )
    check_logits(model, logits)
    before = logits[:, :2].float()
    if (before[0] - before[1]).abs().amax() > _LOGIT_ROUNDING * before.abs().amax():
        _logger.warning(
            "%s looks at later tokens, so perplexities are too low: a model like BERT needs is_decoder=True "
            "in its configuration",
            name,
        )


def warn_of_unknown_tokens(vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a warning if the tokenizer has tokens that the model does not have; text with them is refused.

    Args:
        vocabulary: number of token ids of the model.
        tokenizer: the tokenizer.
    """
    unknown = {id: token for token, id in tokenizer.get_vocab().items() if not 0 <= id < vocabulary}
    if unknown:
        first = min(unknown)
        _logger.warning(
            "the tokenizer has %s tokens that are not among the model's %s, such as %r (token %s): text "
            "that contains such a token is refused",
            f"{len(unknown):,}",
            f"{vocabulary:,}",
            unknown[first],
            first,
        )


def create_identity(
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
    """Create the identity of a store: what its model, tokenizer, keys, metric and windows must be.

    Args:
        model: a causal language model or an encoder-decoder model, in evaluation mode.
        tokenizer: the model's tokenizer.
        name: the folder or hub id from which the model can be loaded again.
        key: name of the place in the model where keys are captured, as `locate` takes it.
        joining: how a key is computed from the states of several tokens; default is a single state.
        metric: ``l2`` or ``ip``.
        max_length: largest number of tokens in a window, the prefix included; default is the model's limit.
        stride: number of tokens between the ends of two windows; default is half of `max_length`.

    Raises:
        ConfigError: the place of the keys, the metric, the prefix or the window is not possible for this
            model; or the tokenizer of an encoder-decoder model has two vocabularies, or no EOS token.
    """
    if metric not in {choice.value for choice in Metric}:
        raise ConfigError(f"metric must be one of {', '.join(Metric)}, got {metric!r}")
    location, joined = locate(model, key), joining or Joining()
    vocabulary = int(model.config.get_text_config().vocab_size)
    if reads_source(model):
        _check_pair_tokenizer(tokenizer, name)
        prefix = find_decoder_prefix(model)
    else:
        prefix = prefix_of(tokenizer)
    _check_prefix(prefix, vocabulary, tokenizer)
    window = choose_window(model, max_length)
    step = stride or max(1, window // 2)
    check_window(window, step)
    return Identity(
        model=name,
        model_fingerprint=model_fingerprint(model),
        tokenizer_fingerprint=_compute_tokenizer_fingerprint(
            tokenizer, prefix if reads_source(model) else None
        ),
        key=f"{location}{joined}",
        dim=key_dim(model, location),
        metric=metric,
        vocab_size=vocabulary,
        max_length=window,
        stride=step,
        has_prefix=bool(prefix),
    )


def _check_pair_tokenizer(tokenizer: Any, name: str) -> None:
    """Check that a tokenizer can be used with an encoder-decoder model.

    Raises:
        ConfigError: it has a vocabulary for sources and another one for texts, or no EOS token, which ends
            every text.
    """
    if getattr(tokenizer, "separate_vocabs", False):  # Marian's
        raise ConfigError(
            f"the tokenizer of {name!r} has two vocabularies, for source and target: that is not supported"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {name!r} has no EOS token, which every translation needs at its end"
        )


def identify_text(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, *, name: str) -> Identity:
    """Create the identity of a store without keys for a model whose weights are not loaded.

    The fingerprint of the model holds no weights, so it matches no model that is loaded later.

    Args:
        config: the model's configuration, of any class.
        tokenizer: the model's tokenizer.
        name: the folder or hub id of the model.

    Raises:
        ConfigError: the configuration names no vocabulary; the tokenizer's BOS or EOS token is not a token of
            the model; or the tokenizer has a vocabulary of its own for the text that the model generates.
    """
    try:
        vocabulary = config.get_text_config(decoder=True).vocab_size
    except (AttributeError, ValueError):  # no vocabulary, or several text models
        vocabulary = None
    if not isinstance(vocabulary, int):
        raise ConfigError(f"the configuration of the model {name!r} does not give the size of its vocabulary")
    if hasattr(tokenizer, "spm_target"):  # Marian's
        raise ConfigError(
            f"the tokenizer of {name!r} has two vocabularies, for source and target: that is not supported"
        )
    prefix = prefix_of(tokenizer)
    _check_prefix(prefix, vocabulary, tokenizer)
    try:
        window = read_max_length(config)
    except ConfigError:
        window = _DEFAULT_WINDOW
    return Identity(
        model=name,
        model_fingerprint=compute_fingerprint({}, lambda _, at: at, config),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        key="none",  # this and the next two have no effect without keys
        dim=1,
        metric=Metric.L2,
        vocab_size=vocabulary,
        max_length=window,
        stride=max(1, window // 2),
        has_prefix=bool(prefix),
    )


def _check_prefix(prefix: Sequence[int], vocabulary: int, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a model has the tokens that precede each document.

    Args:
        prefix: the token ids; empty if there are no such tokens.
        vocabulary: number of token ids of the model.
        tokenizer: the tokenizer, for the message.

    Raises:
        ConfigError: an id is not below `vocabulary`.
    """
    for token in prefix:
        if token >= vocabulary:
            raise ConfigError(
                f"the tokenizer begins texts with token {token} "
                f"({tokenizer.convert_ids_to_tokens(token)!r}), which is not among the model's "
                f"{vocabulary:,} tokens: use the tokenizer that the model was trained with"
            )


def choose_window(model: PreTrainedModel, max_length: int | None = None) -> int:
    """Return the number of tokens in a window: `max_length`, or the model's limit if `max_length` is None.

    An encoder-decoder model without a limit gets windows of 2,048 tokens.

    Raises:
        ConfigError: `max_length` is above the model's limit; or `max_length` is None and a causal model has
            no limit.
    """
    try:
        limit = read_max_length(model.config)
    except ConfigError:
        if max_length is None and reads_source(model):
            return _DEFAULT_WINDOW
        if max_length is None:
            raise
        return max_length  # a model without a limit
    if max_length is not None and max_length > limit:
        raise ConfigError(f"max_length is {max_length}, the model takes at most {limit} tokens")
    return max_length or limit


def check_matches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, identity: Identity
) -> None:
    """Check that a store was made with a model and a tokenizer.

    Args:
        model: the model.
        tokenizer: the tokenizer; None checks only the model.
        identity: the store's identity.

    Raises:
        FingerprintMismatchError: the model or the tokenizer differs; the message names both.
    """
    check_fingerprint(model_fingerprint(model), model.config.name_or_path or type(model).__name__, identity)
    if tokenizer is not None:
        check_tokenizer(tokenizer, identity, find_decoder_prefix(model) if reads_source(model) else None)


def check_fingerprint(found: str, name: str, identity: Identity) -> None:
    """Check that a store was made with the model whose fingerprint is given.

    Args:
        found: the model's fingerprint.
        name: the model's name, for the message.
        identity: the store's identity.

    Raises:
        FingerprintMismatchError: the weights or the configuration of the model differ; the message says
            which.
    """
    if not describe_same_checkpoint(found, identity.model_fingerprint):
        if found.partition(":")[0] == identity.model_fingerprint.partition(":")[0]:
            raise FingerprintMismatchError(
                f"the configuration of the model {identity.model} is not the one that the store was made "
                "with: restore its config.json, or make a store for this one"
            )
        raise FingerprintMismatchError(
            f"the store was made with the model {identity.model} ({identity.model_fingerprint[:12]}), "
            f"this is {name} ({found[:12]}): load that one, or make a store for this one"
        )


def check_tokenizer(
    tokenizer: PreTrainedTokenizerBase, identity: Identity, decoder_prefix: Sequence[int] | None = None
) -> None:
    """Check that this tokenizer is the one that a store was made with.

    Args:
        tokenizer: the tokenizer to check.
        identity: the store's identity.
        decoder_prefix: the tokens with which the decoder of an encoder-decoder model begins every text. They
            are compared too. None for a causal model.

    Raises:
        FingerprintMismatchError: the tokenizer differs; or, for an encoder-decoder model, its languages or
            `decoder_prefix` differ.
    """
    found = _compute_tokenizer_fingerprint(tokenizer, decoder_prefix)
    if found != identity.tokenizer_fingerprint:
        if identity.is_paired and decoder_prefix is None:
            raise FingerprintMismatchError(
                f"the store was made for the encoder-decoder model {identity.model}, but a store of a "
                "causal model is needed"
            )
        if decoder_prefix is not None:
            raise FingerprintMismatchError(
                f"the store was made with another tokenizer of {identity.model}, other languages of the "
                "tokenizer, or another decoder_start_token_id or forced_bos_token_id of the generation "
                "configuration: load the model as it was then"
            )
        raise FingerprintMismatchError(
            f"the store was made with the tokenizer of {identity.model} "
            f"({identity.tokenizer_fingerprint[:12]}), this is {tokenizer.name_or_path} ({found[:12]}): "
            "load the store's tokenizer"
        )


def _compute_tokenizer_fingerprint(
    tokenizer: PreTrainedTokenizerBase, decoder_prefix: Sequence[int] | None
) -> str:
    """Compute the fingerprint of a tokenizer that a store's identity contains.

    Args:
        tokenizer: the tokenizer.
        decoder_prefix: the tokens with which the decoder of an encoder-decoder model begins every text; None
            for another model. With them the fingerprint also covers the special tokens around a source.
    """
    if decoder_prefix is None:
        return tokenizer_fingerprint(tokenizer)
    return seq2seq_tokenizer_fingerprint(tokenizer, decoder_prefix)
