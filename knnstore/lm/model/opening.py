"""Creating a store for a model, and loading a store together with its model."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from knnstore.documents import OnBad
from knnstore.errors import ConfigError
from knnstore.lm.keys import AUTO, Joining, describe_keys, fit_projection, locate
from knnstore.lm.model.modeling import KNNLM, choose_model_class
from knnstore.lm.reading import (
    Encoder,
    TextReader,
    check_model_predicts_text,
    create_identity,
    get_model_name,
    load_or_accept_model,
    sample_keys,
    vocabulary_size,
    warn_of_unknown_tokens,
)
from knnstore.lm.settings import KNNSettings, resolve
from knnstore.progress import Progress
from knnstore.store import KEYLESS, KNNStore, Mode, check_new

_ENGINE = "cells"
_STATES = 3
"""Default number of hidden states in a key, see docs/benchmarks.md."""


def create(
    home: str | os.PathLike[str],
    model: str | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    store: str = _ENGINE,
    location: str | None = None,
    params: Mapping[str, Any] | None = None,
    catalog: str | None = None,
    key: str | None = AUTO,
    states: int = _STATES,
    discounts: Sequence[float] | None = None,
    metric: str = "l2",
    dim: int | None = None,
    sample: Iterable[object] | None = None,
    on_bad: OnBad | None = None,
    max_length: int | None = None,
    stride: int | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> KNNLM:
    """Create an empty store for a model, and return the model with the store opened for writing.

    If an error occurs, the new store is removed again.

    Args:
        home: the folder of the store; new or empty.
        model: folder or hub id of a causal language model or of an encoder-decoder model, the path of a GGUF
            file, or a loaded model.
        tokenizer: the model's tokenizer; default is the tokenizer in the model's folder or hub id.
        store: name of the adapter (vector engine) that stores the keys.
        location: URL or folder where the adapter stores the keys; default ``HOME/keys``.
        params: parameters of the adapter.
        catalog: SQLAlchemy URL of the catalog; default is SQLite in the home.
        key: name of the place in the model where keys are captured; `locate` lists the names. Default is
            ``ffn_input``, or ``final_hidden`` if the model has no ``ffn_input``. None or ``none`` stores no
            keys: adding text does not need the model, and the store retrieves with n-grams only. For an
            encoder-decoder model, `KeylessText.create` creates such a store.
        states: number of hidden states that are combined in a key: the state of its token and of the
            preceding tokens. A key has as many components as one state.
        discounts: discount of the state of the preceding token, then of the token before the preceding one,
            and so on; default 0.5, 0.35, ...
        metric: ``l2`` (squared Euclidean distance) or ``ip`` (inner product).
        dim: number of components of the projected keys (PCA); default is no projection.
        sample: documents like the documents that will be stored; the projection is fitted on their keys.
            `dim` and `sample` are given together or not at all.
        on_bad: called with the error of each document of the sample that cannot be used; the document is
            skipped. With None the first bad document raises an error.
        max_length: largest number of tokens in a window, and in a source; default is the model's limit, or
            2,048 for an encoder-decoder model without a limit.
        stride: number of tokens between the ends of two windows; default is half of `max_length`.
        device: device of the model; default is the GPU if torch finds one, else the CPU.
        dtype: dtype of the weights; default is float32 on the CPU, and the saved dtype on a GPU.
        progress: progress display, which receives the number of keys of each batch of the sample; None for no
            display.
        **options: passed on to ``from_pretrained`` of the `Auto` class (revision, device_map,
            quantization_config, ...). The store saves only ``gguf_file``, so `load` needs all other options
            again.

    Returns:
        A `KNNLMForCausalLM`, or a `KNNLMForSeq2SeqLM` for an encoder-decoder model.

    Raises:
        StoreExistsError: the folder has a store already.
        ConfigError: an argument or the model cannot be used.
        ModelOutputError: the model's logits are NaN or infinite.
        InputError: a document of the sample cannot be used and `on_bad` is None.
    """
    if key in (None, KEYLESS):  # the recent-text cache still uses keys
        if store != _ENGINE or location is not None:
            raise ConfigError("a store without keys has no vector engine: leave out store and location")
        store, key = KEYLESS, AUTO
    # 1) Check the arguments.
    check_new(home, store)
    joining = Joining.from_state_count(states, discounts)
    if (dim is None) != (sample is None):
        raise ConfigError(
            "dim and sample belong together, because the projection of the keys is fitted to the sample: "
            "give both"
        )
    # 2) Load the model, and describe it and the keys in the store's identity.
    base, tokenizer = load_or_accept_model(model, tokenizer, device=device, dtype=dtype, **options)
    model_class = choose_model_class(base)
    check_model_predicts_text(base)
    identity = create_identity(
        base,
        tokenizer,
        name=get_model_name(base if options.get("gguf_file") else model),
        key=key,
        joining=joining,
        metric=metric,
        max_length=max_length,
        stride=stride,
    )
    warn_of_unknown_tokens(vocabulary_size(base), tokenizer)
    # 3) Fit the projection.
    projection = None
    if sample is not None and dim is not None:
        encoder = Encoder(base, locate(base, key), joining)
        reader = TextReader(encoder, tokenizer, identity.max_length, identity.stride)
        given = reader.document_tokenizer.read(sample, on_bad)
        keys = sample_keys(reader, given, on_bad=on_bad, progress=progress)
        fitted, kept = fit_projection(keys, dim, metric)
        identity = replace(identity, dim=dim)
        projection = fitted.to_weights({**describe_keys(identity), "keys": len(keys), "kept": kept})
    # 4) Create the store.
    made = KNNStore.create(
        home, identity, store=store, location=location, params=params, catalog=catalog, projection=projection
    )
    try:
        return model_class.from_base(base, made, tokenizer=tokenizer)
    except BaseException:
        made.discard_new()
        raise


def load(
    home: str | os.PathLike[str],
    mode: Mode = "r",
    *,
    params: Mapping[str, Any] | None = None,
    knn: KNNSettings | None = None,
    model: str | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: str | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> KNNLM:
    """Open a store, load the model that it was made for, and return both as one model.

    Args:
        home: the folder of the store.
        mode: ``"r"`` to read, also while another process writes; ``"a"`` to read and write.
        params: parameters of the adapter (vector engine) that replace the saved parameters; for reading only.
        knn: settings that replace the saved settings.
        model: folder or hub id of the model, or a loaded model, e.g. quantized, distributed over devices or
            with adapters of PEFT; default is the folder or hub id that the store has saved.
        tokenizer: the model's tokenizer; default is the tokenizer in the model's folder or hub id.
        device: device of the model; default is the GPU if torch finds one, else the CPU.
        dtype: dtype of the weights; default is float32 on the CPU, and the saved dtype on a GPU.
        **options: passed on to ``from_pretrained`` of the `Auto` class, as in `create`.

    Returns:
        A `KNNLMForCausalLM`, or a `KNNLMForSeq2SeqLM` for an encoder-decoder model.

    Raises:
        StoreNotFoundError: the folder has no store.
        FingerprintMismatchError: the loaded model is not the model of the store, or the saved settings were
            fitted for another model.
        CorruptWeightsError: the weights of a network of the saved settings are missing or damaged. If `mode`
            is ``"a"``, unusable settings cause only a warning, so that `calibrate` can replace them.
    """
    opened = KNNStore.open(home, mode, params=params)
    try:
        place = opened.identity.model if model is None else model
        base, tokenizer = load_or_accept_model(place, tokenizer, device=device, dtype=dtype, **options)
        # Without saved settings no document was added yet: the default is derived from keys that come later.
        if knn is None and opened.settings() is not None:
            knn = resolve(opened, default_if_unusable=mode == "a")
        return choose_model_class(base).from_base(base, opened, tokenizer=tokenizer, knn=knn)
    except BaseException:
        opened.close()
        raise
