"""Registering the model with a store in transformers, so that the `Auto` classes can load a saved folder."""

from os import PathLike
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_OF_THE_FOLDER = frozenset(
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
    """Content of ``config.json`` in a saved folder: the model's type. ``knn_config.json`` has the rest."""

    model_type = "knnstore"

    @classmethod
    def of(cls, base: PreTrainedConfig) -> "KNNLMConfig":
        """Create the configuration with the fields of the base model that callers read before they load it.

        Fields that the base model does not have are left out.
        """
        text = base.get_text_config()
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        known = {name: getattr(text, name, None) for name in names}
        given = {name: value for name, value in known.items() if value is not None}
        return cls(architectures=["KNNLMForCausalLM"], **given)


def register(model: type[PreTrainedModel]) -> None:
    """Register the model in the `Auto` classes, and as a model that generates text.

    Pipelines and lm-eval look for a model in the list of causal language models.
    """
    AutoConfig.register(KNNLMConfig.model_type, KNNLMConfig)
    AutoModelForCausalLM.register(KNNLMConfig, model)
    # Callers that check the type of a model look in this mapping, and list all its names in a warning.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KNNLMConfig.model_type] = model.__name__


def write_type(
    folder: str | PathLike[str], base: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write ``config.json`` and the tokenizer's files to a folder, for the `Auto` classes.

    Without a tokenizer only ``config.json`` is written.
    """
    KNNLMConfig.of(base).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def of_base_model(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `from_pretrained` that concern the base model.

    Options that do not come from an `Auto` class are returned unchanged. Otherwise options of the folder and
    options that are None are removed, and ``torch_dtype`` becomes ``dtype``.
    """
    if not isinstance(options.get("config"), KNNLMConfig):
        return options
    given = {name: value for name, value in options.items() if value is not None}
    kept = {name: value for name, value in given.items() if name not in _OF_THE_FOLDER}
    dtype = kept.pop("torch_dtype", None)
    return {**kept, "dtype": dtype} if dtype is not None and "dtype" not in kept else kept
