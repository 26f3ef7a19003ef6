"""How keys are read from the forward pass of a model."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from knnstore.errors import ConfigError
from knnstore.lm.keys.precision import model_precision

Side = Literal["input", "output"]


@dataclass(frozen=True, slots=True)
class KeyLocation:
    """The tensor that serves as key: what one module of a model takes in or gives out.

    ``str(location)`` is the canonical name, e.g. ``transformer.h.3.mlp:input``, which
    `knnstore.lm.keys.places.locate` takes back.
    """

    path: str
    """The module's dotted path in the model."""

    side: Side
    """Whether the key is its input or its output."""

    def __str__(self) -> str:
        return f"{self.path}:{self.side}"


def key_dim(model: PreTrainedModel, location: KeyLocation) -> int:
    """Return the number of components of the keys, by trying two tokens."""
    keys, _ = hidden_forward(model, location, torch.zeros((1, 2), dtype=torch.long, device=model.device))
    return keys.shape[-1]


def hidden_forward(model: PreTrainedModel, location: KeyLocation, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Run a causal language model without its output head, gradients and cache.

    Args:
        model: the model, in evaluation mode.
        location: where the keys are.
        input_ids: int64, shape (b, t), on the model's device; padded on the right, if at all.

    Returns:
        The keys, shape (b, t, d), and the final hidden states, shape (b, t, h), in the model's dtype.

    Raises:
        ConfigError: see `KeyCapture.keys`.
    """
    with torch.inference_mode(), KeyCapture(model, location) as capture:
        output = model.base_model(input_ids, use_cache=False)
    return capture.keys(*input_ids.shape), output[0]


def keys_forward(model: PreTrainedModel, location: KeyLocation, input_ids: Tensor) -> Tensor:
    """Run a causal language model only as far as its keys; what lies behind them costs nothing.

    The module that holds the keys must be called once in a forward pass. Arguments, errors and keys are
    those of `hidden_forward`.
    """
    with torch.inference_mode(), KeyCapture(model, location, stop=True) as capture:
        model.base_model(input_ids, use_cache=False)
    return capture.keys(*input_ids.shape)


class _Reached(BaseException):
    """Ends a forward pass whose keys were captured; no `except Exception` of a model may stop it."""


_module_at = cache(attrgetter)  # `get_submodule` checks each step of the way, with every token
_registration = threading.Lock()  # torch numbers its hooks without a lock of its own


class KeyCapture:
    """A context in which forward passes of the calling thread leave their keys behind.

    The passes have the precision that the caller's autocast asks for, see `knnstore.lm.keys.precision`.
    The hook is removed when the context ends, also by an exception. Other threads may run the
    same model at the same time, each with a capture of its own.

    Args:
        model: a model that holds the location.
        location: the tensor to capture.
        stop: end the forward pass, and with it the ``with`` block, when the keys are there.
    """

    def __init__(self, model: PreTrainedModel, location: KeyLocation, *, stop: bool = False) -> None:
        self.location = location
        self._stop = stop
        self._module = _module_at(location.path)(model)
        self._captured: Tensor | None = None
        self._thread: int | None = None
        self._hook: RemovableHandle | None = None
        self._precision = ExitStack()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._precision.enter_context(model_precision())
        with _registration:
            if self.location.side == "input":
                self._hook = self._module.register_forward_pre_hook(self._keep_input, with_kwargs=True)
            else:
                self._hook = self._module.register_forward_hook(self._keep_output)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        assert self._hook is not None
        with _registration:
            self._hook.remove()
        self._precision.close()
        return isinstance(error, _Reached)

    def keys(self, batch: int, length: int) -> Tensor:
        """Return the keys of the latest forward pass and forget them.

        Returns:
            Shape (batch, length, d), as the pass's input, in the model's dtype, cut from the autograd graph.

        Raises:
            ConfigError: the pass did not reach the location, or what is there is not one vector
                for each input token.
        """
        captured, self._captured = self._captured, None
        if captured is None:
            raise ConfigError(f"key {self.location}: no tensor came by; choose a module that the model calls")
        # Some models (OPT) flatten batch and sequence before the feed-forward part.
        if captured.ndim < 2 or captured.shape[:-1].numel() != batch * length:
            raise ConfigError(
                f"key {self.location}: its shape {tuple(captured.shape)} is not one vector for each of "
                f"{batch} x {length} tokens; choose another module"
            )
        return captured.detach().reshape(batch, length, -1)

    # While another thread adds or removes its hook, torch may call that one without the keywords.
    def _keep_input(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        self._keep((*args, *(kwargs or {}).values()))

    def _keep_output(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._keep((output,) if isinstance(output, Tensor) else output[:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep(self, values: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread:
            tensors = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
            self._captured = next(tensors, None)
            if self._stop:
                raise _Reached


def keep_positions(values: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Take the positions that a model predicts from, as transformers does before the output head.

    Args:
        values: shape (b, t, ...).
        logits_to_keep: how many of the last positions (0 is all); or positions, shape (p,) or
            (b, p); or a bool mask, shape (b, t), which flattens batch and positions.

    Returns:
        Shape (b, p, ...), or (n, ...) for a bool mask.
    """
    if isinstance(logits_to_keep, int):
        return values[:, -logits_to_keep:]
    wanted = logits_to_keep.to(values.device)
    if wanted.ndim == 1:
        return values[:, wanted]
    if wanted.dtype == torch.bool:
        return values[wanted]
    return values.take_along_dim(wanted[..., None], dim=1)
