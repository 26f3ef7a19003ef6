"""The places in a model where keys can be taken: found from its structure, called alike in every model.

In a layer that normalizes first, as most do, these are the places of two of the names::

    x ──┬── norm ── attention ── + ──┬── norm ──┬── feed-forward ── + ──
        └────────────────────────┘   │          └ ffn_input         │
                                     ├ ffn_input_before_norm        │
                                     └──────────────────────────────┘

Where a layer runs attention and feed-forward side by side, or normalizes last, the name stands for the
same tensor: what enters the part, and what the normalization right before that took in.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from knnstore.errors import ConfigError
from knnstore.lm.keys.capture import KeyCapture, KeyLocation, key_dim

LAYER_PLACES = ("ffn_input", "ffn_input_before_norm", "attention_input", "attention_input_before_norm")
"""The names of places in a layer: the last one, unless ``@LAYER`` follows."""

FINAL_PLACES = ("final_hidden", "final_hidden_before_norm")
"""The names of places behind the layers."""

AUTO = "auto"
"""``ffn_input`` if the model has that place, else ``final_hidden``, as in a model without attention."""

_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward|moe|experts", re.IGNORECASE)
"""Matches the name or the class of a feed-forward part."""

_NAME = re.compile(r"(final_hidden|ffn_input|attention_input)(_before_norm)?(?:@(-?\d+))?")


def locate(model: PreTrainedModel, key: str = "ffn_input") -> KeyLocation:
    """Find a key location in a causal language model.

    The names are those of Khandelwal et al. 2020, table 5, whose best key is ``ffn_input``:

    - ``ffn_input``: what enters the feed-forward part of the last layer;
    - ``attention_input``: what enters its attention;
    - ``final_hidden``: what the decoder gives to the output head.

    ``_before_norm`` behind a name is what the layer normalization right before the place took in. ``@LAYER``
    behind one of the first two takes another layer: ``@0`` is the first and ``@-2`` the last but
    one. ``auto`` is ``ffn_input``, or ``final_hidden`` in a model that has no such part. Anything else is the
    path of a module, with ``:input`` (the default) or ``:output`` after it.

    Raises:
        ConfigError: the model has no such place; names the candidates.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=50))
        >>> str(locate(model)), str(locate(model, "attention_input_before_norm@0"))
        ('transformer.h.1.mlp:input', 'transformer.h.0.ln_1:input')
    """
    if key == AUTO:
        return _locate_default(model)
    named = _NAME.fullmatch(key)
    if not named:
        return _of_module(model, key)
    place, before_norm, layer = named.groups()
    if place == "final_hidden":
        if layer is not None:
            raise ConfigError(f"key {key!r}: final_hidden is behind all layers; leave the @{layer} out")
        location = KeyLocation(_path_of(model, _decoder(model)), "output")
    else:
        part = _part(model, key, place, -1 if layer is None else int(layer))
        location = KeyLocation(_path_of(model, part), "input")
    return _before_norm(model, key, location) if before_norm else location


def layer_count(model: PreTrainedModel) -> int:
    """Return how many decoder layers a model has."""
    return len(_layers(model))


def _locate_default(model: PreTrainedModel) -> KeyLocation:
    """Return the first of the default places that gives one vector for each token."""
    try:
        location = locate(model, LAYER_PLACES[0])
        key_dim(model, location)
    except ConfigError:
        return locate(model, FINAL_PLACES[0])
    return location


def _of_module(model: PreTrainedModel, key: str) -> KeyLocation:
    path, colon, side = key.rpartition(":")
    if not colon:
        path, side = key, "input"
    if side not in ("input", "output"):
        raise ConfigError(f"key {key!r}: after the colon stands 'input' or 'output', not {side!r}")
    if not path or path not in dict(model.named_modules()):
        raise ConfigError(
            f"key {key!r}: {type(model).__name__} has no module {path!r}; use "
            f"{', '.join((*LAYER_PLACES, *FINAL_PLACES))} or one of: {_candidates(_layers(model)[-1], model)}"
        )
    return KeyLocation(path, "input" if side == "input" else "output")


def _part(model: PreTrainedModel, key: str, place: str, layer: int) -> nn.Module:
    """Find the attention or the feed-forward part of a layer."""
    layers = _layers(model)
    if not -len(layers) <= layer < len(layers):
        raise ConfigError(
            f"key {key!r}: {type(model).__name__} has {len(layers)} layers, 0 to {len(layers) - 1} or "
            f"-{len(layers)} to -1"
        )
    children = list(layers[layer].children())
    attentions = [at for at, child in enumerate(children) if _is_attention(child)]
    if attentions and place == "attention_input":
        return children[attentions[0]]
    if place == "ffn_input":
        for child in children[attentions[0] + 1 :] if attentions else ():
            # Norms have vectors for weights, dropouts and activations have none.
            if not _is_attention(child) and _has_matrix(child) and not isinstance(child, nn.ModuleList):
                return child
        # Some layers list their feed-forward part first, or have another mixer in place of the attention.
        for name, child in layers[layer].named_children():
            names = f"{name} {type(child).__name__}"
            if _FEED_FORWARD.search(names) and _has_matrix(child) and not isinstance(child, nn.ModuleList):
                return child
    missing = "attention" if place == "attention_input" else "feed-forward part"
    raise ConfigError(
        f"key {key!r}: {type(model).__name__} has no {missing} in layer {layer}; name the key's module, one "
        f"of: {_candidates(layers[layer], model)}"
    )


def _before_norm(model: PreTrainedModel, key: str, location: KeyLocation) -> KeyLocation:
    """Find the input of the normalization whose result is what is at a location, by trying two tokens."""
    results: list[tuple[str, Tensor]] = []

    def keep(path: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            results.append((path, output))  # held, so that no other tensor takes its memory

    hooks = [
        module.register_forward_hook(partial(keep, path))
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
    ]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        with torch.inference_mode(), KeyCapture(model, location) as capture:
            model.base_model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    wanted = capture.keys(1, 2)
    for path, output in reversed(results):
        # Some models (OPT) give the result another shape on its way.
        if output.data_ptr() == wanted.data_ptr() and output.numel() == wanted.numel():
            return KeyLocation(path, "input")
    raise ConfigError(
        f"key {key!r}: what is at {location} comes from no layer normalization in {type(model).__name__}; "
        "leave _before_norm out"
    )


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Find the decoder without its output head.

    In some models `get_decoder` and `base_model` are the model itself, or the output head.
    """
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    candidates: list[nn.Module] = [model.get_decoder(), model.base_model, *inner]  # type: ignore[no-untyped-call]
    for candidate in candidates:
        if candidate is not model and any(isinstance(part, nn.ModuleList) for part in candidate.modules()):
            return candidate
    raise ConfigError(f"{type(model).__name__} has no list of decoder layers; name the key's module")


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the decoder layers: the outermost list of modules in the decoder."""
    lists = [
        (path.count("."), module)
        for path, module in _decoder(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers; name the key's module")
    outermost = min(depth for depth, _ in lists)
    # Beside the layers there may be lists of other parts; the layers are the larger thing.
    layers: nn.ModuleList = max(
        (module for depth, module in lists if depth == outermost),
        key=lambda module: sum(parameter.numel() for parameter in module.parameters()),
    )
    return layers


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and not name.endswith("norm")


def _has_matrix(module: nn.Module) -> bool:
    # Quantized layers keep their weights in buffers.
    return any(weight.ndim >= 2 for weight in (*module.parameters(), *module.buffers()))


def _candidates(layer: nn.Module, model: PreTrainedModel) -> str:
    path = _path_of(model, layer)
    return ", ".join(f"{path}.{name} ({type(child).__name__})" for name, child in layer.named_children())


def _path_of(model: PreTrainedModel, wanted: nn.Module) -> str:
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    return paths[wanted]
