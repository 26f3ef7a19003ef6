"""The type of a saved model in transformers' registers, so that its `Auto` classes find it by the folder."""

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
    {"config", "revision", "subfolder", "trust_remote_code", "code_revision", "gguf_file", "_commit_hash",
     "_from_auto", "adapter_kwargs"}
)  # fmt: skip
"""What the `Auto` classes pass on of the folder, and not of the base model."""


class KNNLMConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """What ``config.json`` of a saved folder says: that ``knn_config.json`` says the rest."""

    model_type = "knnstore"

    @classmethod
    def of(cls, base: PreTrainedConfig) -> "KNNLMConfig":
        """With what callers read before the model is loaded."""
        text = base.get_text_config()
        names = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
        known = {name: getattr(text, name, None) for name in names}
        given = {name: value for name, value in known.items() if value is not None}
        return cls(architectures=["KNNLMForCausalLM"], **given)


def register(model: type[PreTrainedModel]) -> None:
    """Let the `Auto` classes know saved models, and pipelines and lm-eval that these write."""
    AutoConfig.register(KNNLMConfig.model_type, KNNLMConfig)
    AutoModelForCausalLM.register(KNNLMConfig, model)
    # Who checks a model beforehand looks here, and warns with all names that it finds.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[KNNLMConfig.model_type] = model.__name__


def write_type(
    folder: str | PathLike[str], base: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write ``config.json``, and the tokenizer, which the `Auto` classes look for beside it."""
    KNNLMConfig.of(base).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def of_base_model(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `from_pretrained` that are of the base model, where an `Auto` class gives them."""
    if not isinstance(options.get("config"), KNNLMConfig):
        return options
    given = {name: value for name, value in options.items() if value is not None}
    kept = {name: value for name, value in given.items() if name not in _OF_THE_FOLDER}
    dtype = kept.pop("torch_dtype", None)
    return {**kept, "dtype": dtype} if dtype is not None and "dtype" not in kept else kept
