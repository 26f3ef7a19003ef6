"""A device that is simulated on the CPU, to list what a program waits for (`SimulatedDevice`).

A program that runs on a GPU puts operations into a queue, and goes on before they have run. It has to wait if
it reads a result: it copies a tensor to main memory, asks for a number, or asks for something whose shape
depends on values. Such an operation *synchronises*. Under `SimulatedDevice`, tensors on the device named
`NAME` are in main memory, but code sees them only through operations, as it would on a GPU::

    with SimulatedDevice() as device:
        keys = torch.randn(4, 8, device=NAME)
        keys.sum().item()
    device.waits                        # [Wait(what="a number is read", where="test_x.py:12 test_x")]

An operation on a tensor of the device and a tensor of main memory raises an error, as on a GPU, unless the
latter has no dimension.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "meta"
"""Name of the simulated device. torch has a device of this name in every build, which holds no values."""

_DEVICE, _CPU = torch.device(NAME), torch.device("cpu")
_ROOT = Path(__file__).parents[2]
_ATEN: Any = torch.ops.aten
_BY_VALUES: dict[Any, str] = {
    _ATEN._local_scalar_dense: "a number is read",
    _ATEN.is_nonzero: "a number is read",
    _ATEN.equal: "tensors are compared by the host",
    _ATEN.nonzero: "nonzero",
    _ATEN.masked_select: "a boolean mask selects",
    _ATEN._unique2: "unique",
    _ATEN.unique_dim: "unique",
    _ATEN.unique_consecutive: "unique",
    _ATEN.bincount: "bincount",
}
"""Operations whose result, or its shape, the host has to wait for."""


class Wait(NamedTuple):
    """An operation for which the host waits until the device has done everything before it."""

    what: str
    where: str
    """File, line and function of the innermost code of this repository that asked for the operation."""


class _OnDevice(Tensor):
    """A tensor on the simulated device: it has the device's name, and holds its values in another tensor."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "_OnDevice":
        made: _OnDevice = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=_DEVICE
        )
        made.values = values
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"_OnDevice({self.values})"

    def tolist(self) -> Any:
        """Copy the values to a list, which waits; torch refuses this method to subclasses."""
        return self.cpu().tolist()

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
        """Copy values of main memory to the device; torch leaves them out on a device of this name."""
        return torch.tensor(data, dtype=dtype or self.dtype).to(_DEVICE)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor of the simulated device is used outside `SimulatedDevice`")


class _Lists(TorchFunctionMode):
    """Keeps the values of lists that become tensors; torch leaves them out on a device of this name."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if function in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
            if device is not None and torch.device(device).type == NAME:
                return function(*args, **{**kwargs, "device": None}).to(_DEVICE)
        elif function in (Tensor.__getitem__, Tensor.__setitem__):
            tensor, index, *value = args
            parts = index if isinstance(index, tuple) else (index,)
            listed = tuple(torch.tensor(part) if isinstance(part, list) else part for part in parts)
            return function(tensor, listed, *value)
        return function(*args, **kwargs)


class SimulatedDevice(TorchDispatchMode):
    """Runs the operations on tensors of the device `NAME` during a ``with`` block, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self._lists = _Lists()
        self.operations: list[str] = []
        """Names of all operations on the device but views, each of which starts at least one kernel."""
        self.copies: list[str] = []
        """Where the host copied to the device or from it, waiting or not."""
        self.waits: list[Wait] = []
        """The operations that synchronise, in their order."""

    def __enter__(self) -> Self:
        self._lists.__enter__()
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # so that `Module.to` keeps values
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        self._lists.__exit__(*error)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.operations, self.copies, self.waits = [], [], []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        on_device = [one for one in _list_tensors((args, *kwargs.values())) if isinstance(one, _OnDevice)]
        target = kwargs.get("device")
        to_device = target is not None and torch.device(target).type == NAME
        if not on_device and not to_device:
            return function(*args, **kwargs)
        packet = function.overloadpacket
        is_copy = packet in (_ATEN._to_copy, _ATEN.copy_)
        if not is_copy and on_device:
            _check_devices(function, args, kwargs)
        # 1) Record what the host waits for.
        if packet is _ATEN._to_copy and (to_device or not on_device or target is not None):
            crosses = to_device != bool(on_device)
            self._record_copy(crosses, kwargs.get("non_blocking", False), into_device=to_device)
        elif packet is _ATEN.copy_:
            crosses = isinstance(args[0], _OnDevice) != isinstance(args[1], _OnDevice)
            self._record_copy(crosses, len(args) > 2 and args[2], into_device=isinstance(args[0], _OnDevice))
        elif packet in _BY_VALUES:
            self._record(_BY_VALUES[packet])
        elif packet in (_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._index_put_impl_):
            self._record_index(packet, args)
        elif packet is _ATEN.repeat_interleave and kwargs.get("output_size") is None:
            self._record("repeat_interleave without a size")
        is_view = bool(on_device) and function.is_view
        if not is_view and not is_copy:
            self.operations.append(str(packet))
        # 2) Run the operation on the values.
        if to_device:
            kwargs["device"] = _CPU
        leaves = target is not None and not to_device
        if packet is _ATEN._to_copy and target is not None:
            kwargs.pop("non_blocking", None)
        inner = _map_tensors(_unwrap, args)
        found = function(*inner, **{name: _map_tensors(_unwrap, value) for name, value in kwargs.items()})
        if leaves:
            return found
        if on_device and found is inner[0] and not isinstance(found, list | tuple):
            return args[0]  # an operation in place
        return _map_tensors(_wrap, found)

    def _record(self, what: str) -> None:
        """Record a wait with the place in the repository from which it comes."""
        self.waits.append(Wait(what, _find_caller()))

    def _record_copy(self, crosses: bool, is_asynchronous: bool, *, into_device: bool) -> None:
        """Record a copy between the memories of host and device; to the host each waits."""
        if crosses:
            self.copies.append(_find_caller())
            if not into_device or not is_asynchronous:
                self._record("copy to the device" if into_device else "copy to the host")

    def _record_index(self, packet: Any, args: Any) -> None:
        """Record an index by a boolean mask; a number that is put by a mask does not wait."""
        masks = [one for one in args[1] if one is not None and one.dtype in (torch.bool, torch.uint8)]
        puts_number = packet is not _ATEN.index and args[2].numel() == 1
        if masks and not puts_number:
            self._record("a boolean mask selects")
        if any(one is not None and not isinstance(one, _OnDevice) for one in args[1]):
            self._record("copy to the device")  # of the indices


def _check_devices(function: Any, args: Any, kwargs: Any) -> None:
    """Raise an error, as a GPU does, if a tensor of main memory with a dimension is among the arguments."""
    indexes = function.overloadpacket in (
        _ATEN.index,
        _ATEN.index_put,
        _ATEN.index_put_,
        _ATEN._index_put_impl_,
    )
    checked = (args[:1], args[2:]) if indexes else (args, *kwargs.values())
    for tensor in _list_tensors(checked):
        if not isinstance(tensor, _OnDevice) and tensor.dim():
            raise RuntimeError(f"{function}: tensors are on the simulated device and in main memory")


def _list_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, which may be in lists and tuples. torch's own trees are slower."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _list_tensors(part)


def _map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return an argument or a result with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(change, part) for part in value)
    return value


def _unwrap(value: Tensor) -> Tensor:
    """Return the values of a tensor of the device; any other tensor unchanged."""
    return value.values if isinstance(value, _OnDevice) else value


def _wrap(value: Tensor) -> Tensor:
    """Return a tensor as a tensor of the device."""
    return value if isinstance(value, _OnDevice) else _OnDevice(value)


def _find_caller() -> str:
    """Return file, line and function of the innermost frame in this repository outside this module."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _name_file(frame.f_code.co_filename)
        if file is not None:
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside"


@cache
def _name_file(name: str) -> Path | None:
    """Return the path of a file of this repository relative to it; None for this module and other files."""
    path = Path(name)
    return path.relative_to(_ROOT) if path.is_relative_to(_ROOT) and path != Path(__file__) else None
