"""Delegating attributes of transformers models from the model with a store to its base model.

`PreTrainedModel` has about two hundred attributes: attention implementations, experts, embeddings, tied
heads, gradient checkpointing, adapters, device plans. All these attributes concern weights and layers, and
the model with a store has no weights or layers except those of its base model. So every attribute except
`_NOT_DELEGATED` is delegated to the base model, also attributes that later versions of transformers add.
"""

import sys
from types import FrameType
from typing import Any, TypeVar

from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

Model = TypeVar("Model", bound=type[PreTrainedModel])

_NOT_DELEGATED = frozenset(
    {
        # The class of the model, and how it is saved and loaded.
        "_auto_class",
        "base_model",
        "base_model_prefix",
        "can_generate",
        "config_class",
        "is_custom_code",
        "is_remote_code",
        "register_for_auto_class",
        # The loss is computed from the mixture.
        "loss_function",
        # `forward` retrieves on the CPU, so it cannot be compiled as one graph.
        "_can_compile_fullgraph",
        "_default_compile_config",
        "get_compiled_call",
        # Names of weights begin with "base." in the model with a store.
        "get_parameter_or_buffer",
        "named_non_persistent_buffers",
        "retrieve_modules_from_names",
    }
)
"""Attributes of `PreTrainedModel` that are not delegated to the base model; attributes of `nn.Module` are not
delegated either."""

_BY_CLASS_NAME = frozenset({"_prepare_cache_for_generation", "_supports_default_dynamic_cache"})
"""Methods of `GenerationMixin` that depend on the name of the model's class."""


class _BaseAttribute:
    """Descriptor that reads and sets an attribute on the base model instead of the model with a store.

    If the attribute is read from the class, not from an object, it is the attribute of transformers.
    """

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


class _GenerationStep:
    """Descriptor that returns a step (method) of `generate` for a model with a store.

    If the base model's class overrides the step, the base model's method is returned, else the method of
    `GenerationMixin`. Methods in `_BY_CLASS_NAME` are always those of the base model.
    """

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
    """Decorate a model class: its objects take the attributes of transformers from their attribute `base`.

    Changes `model_class` and returns it. Attributes that the class inherits from transformers are read and
    set on the base model, with these exceptions: attributes that this package defines, attributes of
    `nn.Module`, and `_NOT_DELEGATED`. Public methods of `GenerationMixin` are not delegated either, and its
    private methods only if the class of the base model overrides them.
    """
    package = __name__.partition(".")[0]
    own_classes = [
        ancestor for ancestor in model_class.__mro__ if ancestor.__module__.partition(".")[0] == package
    ]
    own_names = {name for ancestor in own_classes for name in vars(ancestor)}
    kept = {*dir(nn.Module), *vars(PushToHubMixin), *_NOT_DELEGATED, *own_names}
    for ancestor in model_class.__mro__:
        if ancestor in nn.Module.__mro__ or ancestor in own_classes:
            continue
        kind = _GenerationStep if issubclass(GenerationMixin, ancestor) else _BaseAttribute
        for name, inherited in vars(ancestor).items():
            if name in kept or name.startswith("__"):
                continue
            kept.add(name)
            if kind is _BaseAttribute or (name.startswith("_") and hasattr(inherited, "__get__")):
                setattr(model_class, name, kind(name, inherited))
    return model_class


def is_delegated(base: Any, name: str) -> bool:
    """Check whether a missing attribute of the model with a store is read from the base model.

    True for public names, and for private names that the class of the base model defines. A private attribute
    of a single object, for example a hook or a compiled call, is not delegated.
    """
    return not name.startswith("_") or hasattr(type(base), name)


def is_trainer_calling() -> bool:
    """Check whether a method of a `transformers.Trainer` is in the call stack.

    The call stack is the only way to detect `Trainer.train`: it calls ``model.train()`` before each step, as
    other training loops do. `Trainer.evaluate` calls ``model.eval()``.
    """
    trainer: Any = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    frame: FrameType | None = sys._getframe(1)
    while trainer is not None and frame is not None:
        if isinstance(frame.f_locals.get("self"), trainer):
            return True
        frame = frame.f_back
    return False
