"""What transformers asks of a model that is the base model's to answer."""

from collections.abc import Callable
from typing import Any


def of_base(name: str) -> Callable[..., Any]:
    """The method of this name of the base model."""

    def method(model: Any, *args: Any) -> Any:
        return getattr(model.base, name)(*args)

    method.__name__ = name
    method.__doc__ = f"Do what `{name}` of the base model does."
    return method
