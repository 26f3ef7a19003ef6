"""Loading the model of a store, for the commands that need it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from knnstore.cli.output import one_line
from knnstore.errors import ConfigError

if TYPE_CHECKING:
    from knnstore import KNNLMForCausalLM


def open_model(
    home: Path,
    mode: Literal["r", "a"],
    *,
    device: str | None,
    dtype: str | None,
    params: Mapping[str, Any] | None = None,
) -> "KNNLMForCausalLM":
    """Open a store with its model; see `knnstore.load`. Commands that retrieve choose their own settings."""
    import knnstore
    from knnstore.store import Home

    Home.open(home)  # importing torch takes seconds: say before that there is no store
    quiet_transformers()
    return knnstore.load(home, mode, params=params, knn=knnstore.KNNSettings(), device=device, dtype=dtype)


def load_tokenizer(model: str) -> Any:
    """Load a model's tokenizer alone.

    Raises:
        ConfigError: it is not there.
    """
    quiet_transformers()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer of {model!r} cannot be loaded: {one_line(error)}") from error


def quiet_transformers() -> None:
    """Keep transformers' own bars and advice off stderr."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
