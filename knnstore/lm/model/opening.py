"""Making a store for a model, and loading the model that a store was made for."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from knnstore.documents import OnBad, documents_of
from knnstore.errors import ConfigError
from knnstore.lm.keys import AUTO, Joining, described, fit_projection, locate
from knnstore.lm.model.modeling import KNNLMForCausalLM
from knnstore.lm.reading import (
    Encoder,
    TextReader,
    check_runs,
    identify,
    loaded,
    name_of,
    sample_keys,
    warn_of_unknown_tokens,
)
from knnstore.lm.settings import KNNSettings, resolve
from knnstore.progress import Progress
from knnstore.store import KEYLESS, KNNStore, Mode, check_new

_ENGINE = "cells"
_STATES = 3
"""That make a key: see docs/benchmarks.md."""


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
) -> KNNLMForCausalLM:
    """Make an empty store for a model and open both, the store for writing. If it fails, nothing is left.

    Args:
        home: the folder that the store is known by; new or empty.
        model: folder or hub id of a causal language model, or a GGUF file in one; or one that was loaded.
        tokenizer: the model's; default is that of its folder or hub id.
        store: the adapter that holds the keys.
        location: where it keeps them: a URL or a folder; default ``HOME/keys``.
        params: the adapter's own parameters.
        catalog: SQLAlchemy URL of the catalog; default is SQLite in the home.
        key: where in the model the keys are taken, see `locate`; default is ``ffn_input``, or
            ``final_hidden`` in a model without such a place. None keeps no keys: the model reads nothing that
            is added, and n-grams are all that is retrieved.
        states: how many states make a key: that of its token there, and those of the tokens before. A key
            is as wide as one state.
        discounts: of the state before, of the one before that, and so on; default 0.5, 0.35, ...
        metric: ``l2`` or ``ip``.
        dim: to how many components the keys are projected (PCA); default is as many as they have.
        sample: documents of the kind to be stored, on whose keys the projection is fitted.
        on_bad: called for each document of the sample that cannot be used, which is then left out; None
            raises at the first.
        max_length: tokens in a window; default is the model's limit.
        stride: tokens by which a window moves on; default is half of it.
        device: where the model runs; default is the GPU if there is one, else the CPU.
        dtype: of its weights; see `load_model`.
        progress: is told of the sample's keys.
        **options: passed on to ``AutoModelForCausalLM.from_pretrained`` (revision, device_map,
            quantization_config, ...). The store remembers ``gguf_file`` alone: give `load` the others.

    Raises:
        StoreExistsError: there is a store already.
        ConfigError: something given cannot be used.
        ModelOutputError: the model predicts NaN.
        InputError: a document of the sample cannot be used and `on_bad` is None.
    """
    if key is None:  # keys of the text that is being read, for a cache, are made all the same
        if store != _ENGINE or location is not None:
            raise ConfigError("a store that keeps no keys has no engine and no location for them")
        store, key = KEYLESS, AUTO
    check_new(home, store)
    joining = Joining.of(states, discounts)
    if (dim is None) != (sample is None):
        raise ConfigError("dim and sample belong together: the keys are projected as fits those of a sample")
    base, tokenizer = loaded(model, tokenizer, device=device, dtype=dtype, **options)
    check_runs(base)
    identity = identify(
        base, tokenizer,
        name=name_of(base if options.get("gguf_file") else model), key=key, joining=joining, metric=metric,
        max_length=max_length, stride=stride,
    )  # fmt: skip
    warn_of_unknown_tokens(base, tokenizer)
    projection = None
    if sample is not None and dim is not None:
        encoder = Encoder(base, locate(base, key), joining)
        reader = TextReader(encoder, tokenizer, identity.max_length, identity.stride)
        given = documents_of(sample, on_bad=on_bad)
        keys = sample_keys(reader, given, on_bad=on_bad, progress=progress)
        fitted, kept = fit_projection(keys, dim, metric)
        identity = replace(identity, dim=dim)
        projection = fitted.weights({**described(identity), "keys": len(keys), "kept": kept})
    made = KNNStore.create(
        home, identity, store=store, location=location, params=params, catalog=catalog, projection=projection
    )
    try:
        return KNNLMForCausalLM.from_base(base, made, tokenizer=tokenizer)
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
) -> KNNLMForCausalLM:
    """Open a store and load the model that it was made for.

    Args:
        home: the folder that the store is known by.
        mode: ``"r"`` to read, beside a writer; ``"a"`` to read and write.
        params: parameters of the adapter in place of the store's own; for reading only.
        knn: settings in place of those that are saved.
        model: where it is now, or the model itself, e.g. quantized, spread over devices, with adapters of
            PEFT; default is where it was when the store was made.
        tokenizer: the model's; default is that of its folder or hub id.
        device: where the model runs; default is the GPU if there is one, else the CPU.
        dtype: of its weights; see `load_model`.
        **options: passed on to ``AutoModelForCausalLM.from_pretrained``, as in `create`.

    Raises:
        StoreNotFoundError: there is no store.
        FingerprintMismatchError: what is at the model's place is another model now, or the saved settings
            were fitted for another.
        CorruptWeightsError: a network of the saved settings is missing or damaged. For writing, this and the
            latter are but a warning, so that `calibrate` can mend it.
    """
    opened = KNNStore.open(home, mode, params=params)
    try:
        place = opened.identity.model if model is None else model
        base, tokenizer = loaded(place, tokenizer, device=device, dtype=dtype, **options)
        if knn is None:
            knn = resolve(opened, default_if_unusable=mode == "a")
        return KNNLMForCausalLM.from_base(base, opened, tokenizer=tokenizer, knn=knn)
    except BaseException:
        opened.close()
        raise
