"""Loading of models and tokenizers, for the commands that need one."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from knnstore.cli.options import DEFAULT_HOME, HomeOption, ModelAtOption
from knnstore.cli.output import format_error, print_detail, show_activity
from knnstore.errors import ConfigError
from knnstore.model_names import check_model, split_gguf_file

if TYPE_CHECKING:
    from knnstore.lm import KNNLM, KeylessText, Kind
    from knnstore.store import KNNStore


@dataclass(frozen=True)
class Runtime:
    """Options for running a model: device and dtype."""

    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="a GPU if there is one",
            help="Device that the model runs on, such as cpu or cuda:1.",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default="float32 on a CPU, else as the model was saved",
            help="Floating-point type that the model runs in: float32, bfloat16 or float16.",
        ),
    ] = None


@dataclass(frozen=True)
class StoreRuntime(Runtime):
    """Options for running the model of a store, and the folder of the store."""

    model_at: ModelAtOption = None
    home: HomeOption = DEFAULT_HOME

    @contextmanager
    def open_model(
        self,
        mode: Literal["r", "a"],
        *,
        params: Mapping[str, Any] | None = None,
        domains: Sequence[str] | None = None,
        kind: "Kind | None" = None,
    ) -> Iterator["KNNLM"]:
        """Open the store, load its model, and yield the model; the end of the context closes the store.

        The model has unset settings, so the store's saved or default settings count.

        Args:
            mode: "r" opens the store for reading, "a" for reading and writing.
            params: parameters of the adapter (vector engine) that replace the saved parameters this time;
                None replaces none.
            domains: names of domains that must exist; None and an empty sequence check nothing. An unknown
                domain raises DomainNotFoundError before torch is imported, which takes seconds.
            kind: the kind of model that the command needs; another model raises ConfigError before its
                weights are loaded. None accepts both kinds.
        """
        from knnstore.store import KNNStore, Selection

        with KNNStore.open(self.home, mode, params=params) as store:
            if domains:
                store.record_count(Selection(domains=tuple(domains)))
            yield self._load_model(store, kind)

    @contextmanager
    def open_for_adding(self) -> Iterator["KNNLM | KeylessText"]:
        """Open the store for writing, and yield an object that can add documents to it.

        The object is the store's model. For a store without keys, it is a `KeylessText`, and only the
        tokenizer is loaded. The end of the context closes the store.
        """
        from knnstore.store import KNNStore

        with KNNStore.open(self.home, "a") as store:
            if not store.is_keyless:
                yield self._load_model(store, None)
                return
            with show_activity("loading the tokenizer"):
                tokenizer = load_tokenizer(resolve_model_location(store, self.model_at))
                from knnstore.lm import KeylessText

            yield KeylessText(store, tokenizer)

    def _load_model(self, store: "KNNStore", kind: "Kind | None") -> "KNNLM":
        """Load the model of an open store, and return it with unset settings.

        Args:
            store: the store. A store without keys needs a causal model.
            kind: the kind of model that the command needs; None for both kinds.
        """
        name = resolve_model_location(store, self.model_at)
        with show_activity(f"loading {Path(name).name}"):
            silence_transformers()
            import torch

            from knnstore import KNNSettings
            from knnstore.lm import choose_model_class, load_model

            needed = "causal" if store.is_keyless else kind
            base, tokenizer = load_model(name, device=self.device, dtype=self.dtype, kind=needed)
            print_detail(f"{Path(name).name} runs on {base.device}, with {torch.get_num_threads()} threads")
            return choose_model_class(base).from_base(base, store, KNNSettings(), tokenizer)


def resolve_model_location(store: "KNNStore", model_at: str | None) -> str:
    """Return the path or hub id of a store's model: `model_at`, or the saved one if `model_at` is None.

    Raises:
        ConfigError: if no model is found at this place.
    """
    location = model_at or store.identity.model
    try:
        check_model(location)
    except ConfigError as error:
        raise ConfigError(f"{error}; give its new location with --model-at") from error
    return location


def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model. Raises ConfigError if it is missing or cannot be loaded."""
    is_cached = check_model(model)
    silence_transformers()
    from transformers import AutoTokenizer

    try:
        folder, gguf_file = split_gguf_file(model)
        options = {} if gguf_file is None else {"gguf_file": gguf_file}
        return AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=is_cached, **options
        )
    except MemoryError:
        raise
    except (
        BaseException
    ) as error:  # any kind is possible: transformers does not check the values in its files
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise ConfigError(
            f"the tokenizer of {model!r} cannot be loaded: {format_error(error)[:300]}"
        ) from error


def silence_transformers() -> None:
    """Turn off the progress bars and warnings of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
