"""Passes what transformers sets on a model, or asks of it, on to the base model.

`PreTrainedModel` has some two hundred attributes: which attention and which experts may be used, embeddings
and tied heads, gradient checkpointing, adapters, plans for several devices. All of them are about weights and
layers, and the model with a store has none of its own. So the base model answers all but `_OWN`, also those
that later versions of transformers add.
"""

import sys
from types import FrameType
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

Model = TypeVar("Model", bound=type[PreTrainedModel])

_OWN = frozenset(
    {
        # What class this is, and how it is saved and found again.
        "_auto_class", "base_model", "base_model_prefix", "can_generate", "config_class", "is_custom_code",
        "is_remote_code", "register_for_auto_class",
        # The loss is that of the mixture.
        "loss_function",
        # `forward` searches on the CPU, so it cannot be compiled as one graph.
        "_can_compile_fullgraph", "_default_compile_config", "get_compiled_call",
        # Names of weights begin with "base." here.
        "get_parameter_or_buffer", "named_non_persistent_buffers", "retrieve_modules_from_names",
    }
)  # fmt: skip
"""Attributes of `PreTrainedModel` that the model with a store has itself, beside those of `nn.Module`."""

_BY_CLASS_NAME = frozenset({"_prepare_cache_for_generation", "_supports_default_dynamic_cache"})
"""Methods of `GenerationMixin` that decide by the name of the model's class."""


class _OfBase:
    """An attribute that the base model answers; of the class itself it is that of transformers."""

    def __init__(self, name: str, inherited: Any) -> None:
        self._name = name
        self._inherited = inherited

    def __get__(self, model: Any, owner: type) -> Any:
        if model is None:
            get = getattr(type(self._inherited), "__get__", None)
            return self._inherited if get is None else get(self._inherited, None, owner)
        return getattr(model.base, self._name)

    def __set__(self, model: Any, value: Any) -> None:
        setattr(model.base, self._name, value)


class _OfGeneration:
    """A step of `generate` that the base model takes if its class has a version of its own."""

    def __init__(self, name: str, inherited: Any) -> None:
        self._name = name
        self._inherited = inherited

    def __get__(self, model: Any, owner: type) -> Any:
        if model is not None:
            of_class = getattr(type(model.base), self._name, None)
            plain = getattr(GenerationMixin, self._name)
            is_plain = getattr(of_class, "__func__", of_class) is getattr(plain, "__func__", plain)
            if of_class is not None and (not is_plain or self._name in _BY_CLASS_NAME):
                return getattr(model.base, self._name)
        return self._inherited.__get__(model, owner)


def delegate_to_base(model_class: Model) -> Model:
    """Let the attribute `base` of a model class answer for it; for use as a decorator.

    What the class and its ancestors of this package define, what `nn.Module` has, and `_OWN` stay. Steps of
    `generate` go to the base model only if its class overrides them.
    """
    package = __name__.partition(".")[0]
    ours = [one for one in model_class.__mro__ if one.__module__.partition(".")[0] == package]
    kept = {*dir(nn.Module), *vars(PushToHubMixin), *_OWN, *(name for one in ours for name in vars(one))}
    for ancestor in model_class.__mro__:
        if ancestor in nn.Module.__mro__ or ancestor in ours:
            continue
        kind = _OfGeneration if issubclass(GenerationMixin, ancestor) else _OfBase
        for name, inherited in vars(ancestor).items():
            if name in kept or name.startswith("__"):
                continue
            kept.add(name)
            if kind is _OfBase or (name.startswith("_") and hasattr(inherited, "__get__")):
                setattr(model_class, name, kind(name, inherited))
    return model_class


def is_answered_by_base(base: Any, name: str) -> bool:
    """Whether the base model answers for an attribute that the model with a store does not have at all.

    A private attribute of one object, such as a hook or a compiled call, belongs to that object alone.
    """
    return not name.startswith("_") or hasattr(type(base), name)


def is_trainer_calling() -> bool:
    """Whether a method of a `transformers.Trainer` is among the callers.

    `Trainer.train` gives a model no other sign: it calls ``model.train()`` before each step, as anyone's own
    loop does. `Trainer.evaluate` calls ``model.eval()``.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame: FrameType | None = sys._getframe(1)
    while trainer is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), trainer):
            return True
        frame = frame.f_back
    return False
