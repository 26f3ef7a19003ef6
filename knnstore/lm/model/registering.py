"""Registering the model with a store in transformers, so that the `Auto` classes can load a saved folder."""

from os import PathLike
from typing import Any, Self

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

_FOLDER_OPTIONS = frozenset(
    {
        "config",
        "revision",
        "subfolder",
        "trust_remote_code",
        "code_revision",
        "gguf_file",
        "_commit_hash",
        "_from_auto",
        "adapter_kwargs",
    }
)
"""Options from the `Auto` classes that concern the saved folder, and not the base model."""


class KNNLMConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Content of ``config.json`` in a saved folder: only the model's type and a few sizes and tokens.

    The file ``knn_config.json`` has the rest.
    """

    model_type = "knnstore"
    _architecture = "KNNLMForCausalLM"

    @classmethod
    def from_base_config(cls, base: PreTrainedConfig) -> Self:
        """Create the configuration with the fields that callers read before they load the model.

        The fields are the size of the vocabulary, the largest number of positions, and the special tokens.
        Fields that the base model does not have are left out.
        """
        text = base.get_text_config()
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        known = {name: getattr(text, name, None) for name in names}
        given = {name: value for name, value in known.items() if value is not None}
        return cls(architectures=[cls._architecture], **given)


class KNNSeq2SeqConfig(KNNLMConfig):  # type: ignore[no-untyped-call]
    """Content of ``config.json`` in the saved folder of an encoder-decoder model, as `KNNLMConfig`."""

    model_type = "knnstore_seq2seq"
    _architecture = "KNNLMForSeq2SeqLM"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"is_encoder_decoder": True, **options})


def register_models(causal: type[PreTrainedModel], seq2seq: type[PreTrainedModel]) -> None:
    """Register the model classes in the `Auto` classes and in transformers' lists of models.

    Pipelines and lm-eval look for a model in these lists.

    Args:
        causal: the class for causal models.
        seq2seq: the class for encoder-decoder models.
    """
    AutoConfig.register(KNNLMConfig.model_type, KNNLMConfig)
    AutoConfig.register(KNNSeq2SeqConfig.model_type, KNNSeq2SeqConfig)
    AutoModelForCausalLM.register(KNNLMConfig, causal)
    AutoModelForSeq2SeqLM.register(KNNSeq2SeqConfig, seq2seq)
    # Callers that check the type of a model look in these mappings, and list all their names in a warning.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KNNLMConfig.model_type] = causal.__name__
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[KNNSeq2SeqConfig.model_type] = seq2seq.__name__


def write_transformers_config(
    folder: str | PathLike[str], config: KNNLMConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write ``config.json`` and the tokenizer's files to a folder, so that the `Auto` classes can load it.

    Without a tokenizer only ``config.json`` is written.
    """
    config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def select_base_model_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that are passed on to load the base model.

    An `Auto` class that calls `from_pretrained` adds options of its own, among them ``config``. If the
    options have this ``config``, the options in `_FOLDER_OPTIONS` and all options that are None are removed,
    and ``torch_dtype`` is renamed to ``dtype`` unless ``dtype`` is set. Otherwise `options` itself is
    returned.
    """
    if not isinstance(options.get("config"), KNNLMConfig):
        return options
    given = {name: value for name, value in options.items() if value is not None}
    kept = {name: value for name, value in given.items() if name not in _FOLDER_OPTIONS}
    dtype = kept.pop("torch_dtype", None)
    return {**kept, "dtype": dtype} if dtype is not None and "dtype" not in kept else kept
