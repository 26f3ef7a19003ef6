"""Capturing keys during the forward pass of a model, with forward hooks of torch, in the model's precision.

Under ``torch.autocast`` each matrix product is rounded to bfloat16 or float16: also distances, projections
and the networks that choose weights. Rounded keys are harder to distinguish, and some operations refuse mixed
dtypes. So code that retrieves from a store runs in `disable_autocast`, and each forward pass of the model
runs in `restore_autocast`, which restores the caller's autocast. `KeyCapture` does this itself.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from operator import attrgetter
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from knnstore.errors import ConfigError

Side = Literal["input", "output"]

_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu", "mps")
_disabled_autocast: ContextVar[tuple[tuple[str, torch.dtype], ...]] = ContextVar(
    "_disabled_autocast", default=()
)
"""Device types whose autocast `disable_autocast` disabled, each with its dtype."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class KeyLocation:
    """The tensor that serves as key: the input or the output of one module of a model.

    ``str(location)`` is the canonical name, e.g. ``transformer.h.3.mlp:input``, which `locate` accepts.
    """

    path: str
    """The module's dotted path in the model."""

    side: Side
    """``input`` if the key is the module's input, ``output`` if it is the output."""

    def __str__(self) -> str:
        return f"{self.path}:{self.side}"


class Source(NamedTuple):
    """The texts that the encoder of an encoder-decoder model reads, one for each row of a forward pass."""

    input_ids: Tensor
    """Token ids, int64, shape (b, s)."""
    attention_mask: Tensor
    """1 at tokens and 0 at padding, int64, shape (b, s)."""

    @classmethod
    def make_probe(cls, model: PreTrainedModel, rows: int) -> "Source | None":
        """Return a source of two tokens for each row, to try a model; None for a model without an encoder."""
        if not reads_source(model):
            return None
        input_ids = torch.tensor([[0, 1]] * rows, device=model.device)
        return cls(input_ids, torch.ones_like(input_ids))


def reads_source(model: PreTrainedModel) -> bool:
    """Check whether a model is an encoder-decoder model, which predicts a text together with its source."""
    return bool(model.config.is_encoder_decoder)


def make_forward_kwargs(
    model: PreTrainedModel, input_ids: Tensor, source: Source | None
) -> dict[str, Tensor]:
    """Return the keyword arguments of a forward pass over texts, for a model or for its base model.

    Args:
        model: the model.
        input_ids: token ids of the texts, int64, shape (b, t), on the model's device.
        source: the source of each text for an encoder-decoder model; None for another model.
    """
    if source is None:
        assert not reads_source(model)
        return {"input_ids": input_ids}
    return {**source._asdict(), "decoder_input_ids": input_ids}


def key_dim(model: PreTrainedModel, location: KeyLocation) -> int:
    """Return the number of components of a key, d. Runs the model once on two tokens to find it.

    Args:
        model: the model.
        location: the tensor that serves as key.

    Raises:
        ConfigError: the model does not call the location's module, or the tensor is not one vector for each
            token.
    """
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    keys, _ = run_without_head(model, location, ids, Source.make_probe(model, 1))
    return keys.shape[-1]


def run_without_head(
    model: PreTrainedModel, location: KeyLocation, input_ids: Tensor, source: Source | None = None
) -> tuple[Tensor, Tensor]:
    """Run a language model without its output head, without gradients and without a KV cache.

    Args:
        model: the model, in evaluation mode.
        location: the tensor that serves as key.
        input_ids: int64, shape (b, t), on the model's device; padding is allowed on the right only.
        source: the source of each row for an encoder-decoder model, else None.

    Returns:
        The keys, shape (b, t, d), and the final hidden states, shape (b, t, h), in the model's dtype.

    Raises:
        ConfigError: the model does not call the location's module, or the tensor is not one vector for each
            token.
    """
    with torch.inference_mode(), KeyCapture(model, location) as capture:
        output = model.base_model(**make_forward_kwargs(model, input_ids, source), use_cache=False)
    return capture.take_keys(*input_ids.shape), output[0]


def run_until_keys(
    model: PreTrainedModel, location: KeyLocation, input_ids: Tensor, source: Source | None = None
) -> Tensor:
    """Run a language model only until the keys are computed; later layers do not run.

    The keys are taken from the first call of the location's module, so a model must call the module only once
    in a forward pass.

    Args:
        model: the model, in evaluation mode.
        location: the tensor that serves as key.
        input_ids: int64, shape (b, t), on the model's device; padding is allowed on the right only.
        source: the source of each row for an encoder-decoder model, else None.

    Returns:
        The keys, shape (b, t, d), in the model's dtype.

    Raises:
        ConfigError: the model does not call the location's module, or the tensor is not one vector for each
            token.
    """
    with torch.inference_mode(), KeyCapture(model, location, stop=True) as capture:
        model.base_model(**make_forward_kwargs(model, input_ids, source), use_cache=False)
    return capture.take_keys(*input_ids.shape)


class _KeysCaptured(BaseException):
    """Ends a forward pass as soon as its keys are captured.

    A BaseException, so that an ``except Exception`` in a model's code does not catch it.
    """


_get_module = cache(attrgetter)  # faster than `get_submodule`, and called for every decoded token
_hook_lock = threading.Lock()  # torch numbers its hooks without a lock


class KeyCapture:
    """Context manager that captures the keys of forward passes that the calling thread runs.

    The passes run under the autocast settings of the code that called `disable_autocast`, if any. The hook is
    removed when the context ends, also after an exception. Other threads may run the same model at the same
    time; each thread uses its own `KeyCapture`.

    Args:
        model: a model that has the location's module.
        location: the tensor to capture.
        stop: True to end the forward pass, and with it the ``with`` block, as soon as the keys are captured.
    """

    def __init__(self, model: PreTrainedModel, location: KeyLocation, *, stop: bool = False) -> None:
        self.location = location
        self._stop = stop
        self._module = _get_module(location.path)(model)
        self._captured: Tensor | None = None
        self._thread: int | None = None
        self._hook: RemovableHandle | None = None
        self._precision = ExitStack()

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        self._precision.enter_context(restore_autocast())
        with _hook_lock:
            if self.location.side == "input":
                self._hook = self._module.register_forward_pre_hook(self._capture_input, with_kwargs=True)
            else:
                self._hook = self._module.register_forward_hook(self._capture_output)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        assert self._hook is not None
        with _hook_lock:
            self._hook.remove()
        self._precision.close()
        return isinstance(error, _KeysCaptured)

    def take_keys(self, batch: int, length: int) -> Tensor:
        """Return the keys of the latest forward pass, and forget them.

        Args:
            batch: number of texts in the pass.
            length: number of tokens of each text.

        Returns:
            Shape (batch, length, d), in the model's dtype, detached from the autograd graph.

        Raises:
            ConfigError: no pass has run since the last call, the pass did not call the location's module, or
                the captured tensor is not one vector for each input token.
        """
        captured, self._captured = self._captured, None
        if captured is None:
            raise ConfigError(
                f"key {self.location}: no tensor was captured; choose a module that the model calls"
            )
        # Some models (OPT) flatten batch and sequence before the feed-forward layer.
        if captured.ndim < 2 or captured.shape[:-1].numel() != batch * length:
            raise ConfigError(
                f"key {self.location}: its shape {tuple(captured.shape)} is not one vector for each of "
                f"{batch} x {length} tokens; choose another module"
            )
        return captured.detach().reshape(batch, length, -1)

    # While another thread adds or removes a hook, torch may call this hook without the keywords.
    def _capture_input(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Forward pre-hook of the module: keep its input."""
        self._capture_first((*args, *(kwargs or {}).values()))

    def _capture_output(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the module: keep its output."""
        self._capture_first((output,) if isinstance(output, Tensor) else output[:])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _capture_first(self, values: tuple[Any, ...]) -> None:
        """Keep the first floating-point tensor among some values as the captured keys.

        Does nothing if another thread than the one that entered the context runs the model.

        Args:
            values: inputs or outputs of the hooked module.

        Raises:
            _KeysCaptured: the constructor got ``stop=True``; the exception ends the forward pass.
        """
        if threading.get_ident() == self._thread:
            tensors = (v for v in values if isinstance(v, Tensor) and v.is_floating_point())
            self._captured = next(tensors, None)
            if self._stop:
                raise _KeysCaptured


def select_positions_to_keep(values: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the rows of the positions whose logits are computed, as transformers selects them.

    Args:
        values: shape (b, t, ...).
        logits_to_keep: the number of last positions (0 selects all); or the positions, int64, shape (p,)
            or (b, p); or a bool mask, shape (b, t), which flattens batch and positions.

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


@contextmanager
def disable_autocast() -> Iterator[None]:
    """Disable autocast inside the context, and remember its settings for `restore_autocast`.

    Does nothing if autocast is not enabled.
    """
    enabled = tuple(
        (device, torch.get_autocast_dtype(device))
        for device in _AUTOCAST_DEVICES
        if torch.is_autocast_enabled(device)
    )
    if not enabled:
        yield
        return
    with ExitStack() as disabled:
        for device, _ in enabled:
            disabled.enter_context(torch.autocast(device, enabled=False))
        token = _disabled_autocast.set(enabled)
        try:
            yield
        finally:
            _disabled_autocast.reset(token)


@contextmanager
def restore_autocast() -> Iterator[None]:
    """Enable autocast inside the context again, as it was before `disable_autocast` disabled it.

    Does nothing if `disable_autocast` did not disable autocast.
    """
    with ExitStack() as restored:
        for device, dtype in _disabled_autocast.get():
            restored.enter_context(torch.autocast(device, dtype=dtype))
        yield


def run_without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that autocast is disabled while it runs. Not for generator functions."""

    @wraps(function)
    def call_in_full_precision(*args: P.args, **kwargs: P.kwargs) -> R:
        with disable_autocast():
            return function(*args, **kwargs)

    return call_in_full_precision
