"""Finding the places in a model where keys are taken. The names of places are the same for every model.

The places are found from the structure of the model. Most layers normalize first (pre-norm); in these layers
two of the names mean::

    x ──┬── norm ── attention ── + ──┬── norm ──┬── feed-forward ── + ──
        └────────────────────────┘   │          └ ffn_input         │
                                     ├ ffn_input_before_norm        │
                                     └──────────────────────────────┘

The definition is the same for layers that run attention and feed-forward in parallel, or that normalize last:
``ffn_input`` is the input of the feed-forward module, and ``ffn_input_before_norm`` is the input of the
normalization whose output is ``ffn_input``.
"""

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from knnstore.errors import ConfigError
from knnstore.lm.keys.key_capture import KeyCapture, KeyLocation, Source, key_dim, make_forward_kwargs

LAYER_PLACES = ("ffn_input", "ffn_input_before_norm", "attention_input", "attention_input_before_norm")
"""Names of the places in a layer: the last layer, unless ``@LAYER`` follows the name."""

FINAL_PLACES = ("final_hidden", "final_hidden_before_norm")
"""Names of the places after the last layer."""

AUTO = "auto"
"""``ffn_input`` if the model has this place, else ``final_hidden``."""

_FEED_FORWARD = re.compile(r"mlp|ffn|feed_?forward|moe|experts", re.IGNORECASE)
"""Pattern that matches the attribute name or the class name of a feed-forward module."""

_NAME = re.compile(r"(final_hidden|ffn_input|attention_input)(_before_norm)?(?:@(-?\d+))?")


def locate(model: PreTrainedModel, key: str = "ffn_input") -> KeyLocation:
    """Find the tensor of a language model that `key` names, and return its location.

    In an encoder-decoder model all places are in the decoder.

    The names are those of Khandelwal et al. 2020, table 5, whose best key is ``ffn_input``:

    - ``ffn_input``: the input of the feed-forward module of the last layer;
    - ``attention_input``: the input of the attention module of the last layer;
    - ``final_hidden``: the output of the decoder, which is the input of the output head.

    A name with ``_before_norm`` means the input of the normalization whose output is the named tensor. A
    number selects another layer for the first two names: ``ffn_input@0`` is in the first layer and
    ``ffn_input@-2`` in the last but one. ``auto`` is ``ffn_input``, or ``final_hidden`` if the model has no
    ``ffn_input`` with one vector for each token. Any other key is the dotted path of a module, followed by
    ``:input`` (the default) or ``:output``.

    Raises:
        ConfigError: the model does not have the place; the message names candidates.

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
        return _locate_module(model, key)
    place, before_norm, layer = named.groups()
    if place == "final_hidden":
        if layer is not None:
            raise ConfigError(
                f"key {key!r}: final_hidden is the output of the last layer; leave the @{layer} out"
            )
        location = KeyLocation(_find_module_path(model, _find_decoder(model)), "output")
    else:
        part = _find_layer_module(model, key, place, -1 if layer is None else int(layer))
        location = KeyLocation(_find_module_path(model, part), "input")
    return _find_norm_input(model, key, location) if before_norm else location


def count_layers(model: PreTrainedModel) -> int:
    """Return the number of decoder layers of a model.

    Raises:
        ConfigError: no list of decoder layers is found in the model.
    """
    return len(_find_layers(model))


def _locate_default(model: PreTrainedModel) -> KeyLocation:
    """Return the location ``ffn_input`` if it gives one vector for each token, else ``final_hidden``.

    Runs the model once on two tokens, to find the shape.
    """
    try:
        location = locate(model, LAYER_PLACES[0])
        key_dim(model, location)
    except ConfigError:
        return locate(model, FINAL_PLACES[0])
    return location


def _locate_module(model: PreTrainedModel, key: str) -> KeyLocation:
    """Find a location by the path of its module: ``PATH`` (the input), ``PATH:input`` or ``PATH:output``.

    Raises:
        ConfigError: the model has no module of this path, or the side is neither input nor output.
    """
    path, colon, side = key.rpartition(":")
    if not colon:
        path, side = key, "input"
    if side not in ("input", "output"):
        raise ConfigError(f"key {key!r}: expected 'input' or 'output' after the colon, got {side!r}")
    if not path or path not in dict(model.named_modules()):
        candidates = _describe_candidates(_find_layers(model)[-1], model)
        raise ConfigError(
            f"key {key!r}: {type(model).__name__} has no module {path!r}; use "
            f"{', '.join((*LAYER_PLACES, *FINAL_PLACES))} or one of: {candidates}"
        )
    return KeyLocation(path, "input" if side == "input" else "output")


def _find_layer_module(model: PreTrainedModel, key: str, place: str, layer: int) -> nn.Module:
    """Find the attention module or the feed-forward module of a layer.

    Args:
        model: the model.
        key: the key that was asked for, for the error message.
        place: ``attention_input`` or ``ffn_input``.
        layer: index of the layer; negative values count from the last layer.

    Raises:
        ConfigError: the model has no layer of this index, or the layer has no module of this kind.
    """
    layers = _find_layers(model)
    if not -len(layers) <= layer < len(layers):
        raise ConfigError(
            f"key {key!r}: {type(model).__name__} has {len(layers)} layers, 0 to {len(layers) - 1} or "
            f"-{len(layers)} to -1"
        )
    children = list(_get_parts(layers[layer]).items())
    attentions = [at for at, (_, child) in enumerate(children) if _is_attention(child)]
    if attentions and place == "attention_input":
        return _skip_norm(children[attentions[0]][1])
    if place == "ffn_input":
        for _, child in children[attentions[0] + 1 :] if attentions else ():
            # The weights of a normalization are vectors; dropouts and activations have no weights.
            if not _is_attention(child) and _has_matrix(child) and not isinstance(child, nn.ModuleList):
                return _skip_norm(child)
        # Some layers list the feed-forward module first, or have another mixer instead of attention.
        for name, child in children:
            names = f"{name} {type(child).__name__}"
            if _FEED_FORWARD.search(names) and _has_matrix(child) and not isinstance(child, nn.ModuleList):
                return _skip_norm(child)
    missing = "attention" if place == "attention_input" else "feed-forward part"
    raise ConfigError(
        f"key {key!r}: {type(model).__name__} has no {missing} in layer {layer}; name the key's module, one "
        f"of: {_describe_candidates(layers[layer], model)}"
    )


def _get_parts(layer: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a layer by name, e.g. normalizations, attention and feed-forward module.

    If the only child of the layer is a `ModuleList` (T5), the modules of this list are returned.
    """
    children = dict(layer.named_children())
    only = next(iter(children.values())) if len(children) == 1 else None
    return dict(only.named_children()) if isinstance(only, nn.ModuleList) else children


def _skip_norm(part: nn.Module) -> nn.Module:
    """Return the attention or feed-forward module of a part of a layer.

    Some models (T5) wrap this module together with its normalization. If the part contains a normalization
    and exactly one module with matrices, the function returns the module with matrices. Otherwise it returns
    the part itself.
    """
    children = list(part.children())
    inner = [child for child in children if _has_matrix(child)]
    has_norm = any("norm" in type(child).__name__.lower() for child in children)
    return inner[0] if has_norm and len(inner) == 1 else part


def _find_norm_input(model: PreTrainedModel, key: str, location: KeyLocation) -> KeyLocation:
    """Find the input of the normalization whose output is the tensor at a location.

    Runs the model once on two tokens, and looks for a normalization whose output has the same memory as the
    tensor at the location.

    Args:
        model: the model.
        key: the key that was asked for, for the error message.
        location: the location of the normalization's output.

    Raises:
        ConfigError: the tensor at the location is not the output of a normalization.
    """
    results: list[tuple[str, Tensor]] = []

    def keep_output(path: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            results.append((path, output))  # kept alive, so that its memory is not reused

    hooks = [
        module.register_forward_hook(partial(keep_output, path))
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
    ]
    try:
        ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
        with torch.inference_mode(), KeyCapture(model, location) as capture:
            inputs = make_forward_kwargs(model, ids, Source.make_probe(model, 1))
            model.base_model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    wanted = capture.take_keys(1, 2)
    for path, output in reversed(results):
        # Some models (OPT) reshape the output, so only memory and size are compared.
        if output.data_ptr() == wanted.data_ptr() and output.numel() == wanted.numel():
            return KeyLocation(path, "input")
    raise ConfigError(
        f"key {key!r}: the tensor at {location} is not the output of a layer normalization in "
        f"{type(model).__name__}; leave _before_norm out"
    )


def _find_decoder(model: PreTrainedModel) -> nn.Module:
    """Find the decoder of a model: the module that contains its layers but not its output head.

    The first candidate that contains a `ModuleList` is returned. The candidates are ``get_decoder()``,
    ``base_model``, and the children of the model that are models of transformers. The model itself is not a
    candidate.

    Raises:
        ConfigError: no candidate contains a list of layers.
    """
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    candidates: list[nn.Module] = [model.get_decoder(), model.base_model, *inner]  # type: ignore[no-untyped-call]
    for candidate in candidates:
        if candidate is not model and any(isinstance(part, nn.ModuleList) for part in candidate.modules()):
            return candidate
    raise ConfigError(f"{type(model).__name__} has no list of decoder layers; name the key's module")


def _find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the decoder layers: the outermost `ModuleList` of the decoder.

    If several lists are equally far out, the list with the most parameters is returned.

    Raises:
        ConfigError: the decoder has no list of layers that is not empty.
    """
    lists = [
        (path.count("."), module)
        for path, module in _find_decoder(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 0
    ]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers; name the key's module")
    outermost = min(depth for depth, _ in lists)
    # Other modules may be in lists of the same depth; the layers have the most parameters.
    layers: nn.ModuleList = max(
        (module for depth, module in lists if depth == outermost),
        key=lambda module: sum(parameter.numel() for parameter in module.parameters()),
    )
    return layers


def _is_attention(module: nn.Module) -> bool:
    """Check by its class name whether a module is an attention module; ``AttentionLayerNorm`` is not."""
    name = type(module).__name__.lower()
    return ("attention" in name or "attn" in name) and not name.endswith("norm")


def _has_matrix(module: nn.Module) -> bool:
    """Check whether a module has a weight with at least two dimensions; normalizations have none."""
    # Quantized layers keep their weights in buffers.
    return any(weight.ndim >= 2 for weight in (*module.parameters(), *module.buffers()))


def _describe_candidates(layer: nn.Module, model: PreTrainedModel) -> str:
    """Return the paths and the class names of a layer's modules as one text, for an error message."""
    path = _find_module_path(model, layer)
    return ", ".join(f"{path}.{name} ({type(child).__name__})" for name, child in layer.named_children())


def _find_module_path(model: PreTrainedModel, wanted: nn.Module) -> str:
    """Return the dotted path of the module `wanted` inside a model, e.g. ``transformer.h.0.mlp``."""
    paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
    return paths[wanted]
