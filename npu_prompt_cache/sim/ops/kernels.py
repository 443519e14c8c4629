"""The generic kernel: an operator on npu tensors, computed by a CPU function over tensors that alias their memory.

What a kernel does, in order: arguments are checked to be on one device; what torch_npu and the simulated stream
have queued before it is run, as it would run before the operator on a device; the CPU function computes; a result
that lies in the memory of an argument becomes that argument or a view of it, any other is copied to the device.
The current device is left as it is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor

from npu_prompt_cache import sim
from npu_prompt_cache.sim.ops.aliases import alias, is_alias, moved, view_of

__all__ = ["Arguments", "Kernel", "Parameters", "drain", "is_written"]

# Arguments that torch allows, or wants, on the host whatever their shape.
_HOST_ARGUMENTS = {
    "aten::_index_put_impl_": "indices",
    "aten::_pack_padded_sequence": "lengths",
    "aten::_pad_packed_sequence": "batch_sizes",
    "aten::gru": "batch_sizes",
    "aten::index": "indices",
    "aten::index_put": "indices",
    "aten::index_put_": "indices",
    "aten::lstm": "batch_sizes",
}

# Of the results, which stays on the host, as on any device.
_HOST_RESULTS = {"aten::_pack_padded_sequence": 1, "aten::_pad_packed_sequence": 1}

# Runs torch_npu's own queue, as every way to a handle does: that of the current device, whichever it is asked for.
_current_raw_stream = torch_npu._C._npu_getCurrentRawStream
_current_device = torch_npu._C._npu_getDevice

_started: set[int] = set()  # devices whose streams torch_npu has made


def drain(device_index: int) -> None:
    """Runs what is queued on the current stream of a device: by torch_npu itself, and by late streams.

    An operator runs behind it on a device too, so this is no synchronisation and is not counted as one.
    """
    if device_index not in _started:
        torch_npu.npu.init()  # this may be the program's first call on a device
    elif _current_device() == device_index:
        sim.run_stream(_current_raw_stream(device_index))
        return
    with torch_npu.npu.device(device_index):  # its queue is run, and its streams are made when it is first set
        sim.run_stream(_current_raw_stream(device_index))
    _started.add(device_index)


class Arguments:
    """The tensors of one call: those on the device beside what the CPU function gets for them, those on the host."""

    __slots__ = ("host", "npu", "numbers", "on_host")

    def __init__(self) -> None:
        self.npu: list[Tensor] = []
        self.on_host: list[Tensor] = []  # on_host[i] stands for npu[i]
        self.host: list[Tensor] = []
        self.numbers = False  # whether a number stands where the schema has a tensor

    def to_cpu(self, argument: Any) -> Any:
        """An argument, or a list of them, as the CPU function gets it."""
        if isinstance(argument, Tensor):
            if argument.is_cpu or argument.is_meta:  # quicker to ask than is_npu
                self.host.append(argument)
                return argument
            found = alias(argument)
            self.npu.append(argument)
            self.on_host.append(found)
            return found
        if isinstance(argument, (list, tuple)):
            return [self.to_cpu(element) for element in argument]
        self.numbers |= argument is not None
        return argument

    def to_npu(self, result: Any, device: torch.device) -> Any:
        """A result of the CPU function, or a structure of them, as the operator returns it."""
        if isinstance(result, Tensor):
            for i, known in enumerate(self.on_host):
                if result is known:
                    return self.npu[i]
            return view_of(self.npu, result) if is_alias(result) else moved(result, device)
        if isinstance(result, (list, tuple)):
            return type(result)([self.to_npu(element, device) for element in result])
        return result


class Parameters:
    """Names the arguments of a call by an operator's schema; the dispatcher leaves out trailing defaults."""

    def __init__(self, schema: torch._C.FunctionSchema) -> None:
        self._names = [argument.name for argument in schema.arguments]
        self._defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every parameter of the operator by name."""
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        return {name: given[name] for name in self._names}


class Kernel:
    """Serves one operator; an instance is what the dispatcher calls.

    Args:
        name: qualified, with the overload, such as ``aten::add.Tensor``.
        schema: the operator's.
        compute: takes what the operator takes, with CPU tensors, and returns what it returns.
        outs: names of the out arguments that the kernel fills itself, after ``compute`` filled new tensors.
    """

    def __init__(
        self, name: str, schema: torch._C.FunctionSchema, compute: Callable[..., Any], outs: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._compute = compute
        self._compute_numbers = _for_numbers(schema, compute)
        self.positional = [argument for argument in schema.arguments if not argument.kwarg_only]
        self.keyword = [argument for argument in schema.arguments if argument.kwarg_only]
        self._tensors = [i for i, argument in enumerate(self.positional) if _holds_tensors(argument)]
        self._written = [i for i in self._tensors if is_written(self.positional[i])]
        self._tensor_keywords = [a.name for a in self.keyword if _holds_tensors(a) and a.name not in outs]
        host_argument = _HOST_ARGUMENTS.get(schema.name)
        self._host_result = _HOST_RESULTS.get(schema.name)
        self._host = next((i for i, a in enumerate(self.positional) if a.name == host_argument), None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the operator on npu tensors; the dispatcher leaves out trailing defaults."""
        arguments, cpu_args = self.convert(args, kwargs)
        device = self.device_of(arguments, args)
        drain(device.index)
        result = self.run(arguments, cpu_args, kwargs)
        for i in self._written:
            if isinstance(args[i], Tensor) and args[i].shape != cpu_args[i].shape:
                raise RuntimeError(f"{self.name} resized what it was to write into: its memory is no longer right")
        return self.returned(arguments, result, device)

    def convert(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
        """Positional arguments as the CPU function gets them; those in ``kwargs`` are replaced there."""
        arguments = Arguments()
        cpu_args = list(args)
        try:
            for i in self._tensors:
                if i < len(cpu_args):
                    cpu_args[i] = arguments.to_cpu(cpu_args[i])
            for key in self._tensor_keywords:
                if key in kwargs:
                    kwargs[key] = arguments.to_cpu(kwargs[key])
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} ({self.name})") from None
        return arguments, cpu_args

    def returned(self, arguments: Arguments, result: Any, device: torch.device) -> Any:
        """What the CPU function returned, as the operator returns it."""
        try:
            if self._host_result is None:
                return arguments.to_npu(result, device)
            at = self._host_result
            return tuple(value if i == at else arguments.to_npu(value, device) for i, value in enumerate(result))
        except NotImplementedError as error:
            raise NotImplementedError(f"{error} ({self.name})") from None

    def run(self, arguments: Arguments, cpu_args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls the CPU function."""
        compute = self._compute_numbers if arguments.numbers else self._compute
        if torch.is_autocast_enabled("cpu"):  # the program's wish for its CPU tensors, not for these
            with torch.autocast("cpu", enabled=False):
                return compute(*cpu_args, **kwargs)
        return compute(*cpu_args, **kwargs)

    def device_of(self, arguments: Arguments, args: tuple[Any, ...]) -> torch.device:
        """The one device of all tensors; host tensors without dimensions are numbers.

        Raises:
            RuntimeError: there are several, or what is to be written is on another.
        """
        device = arguments.npu[0].device
        strangers = [tensor.device for tensor in arguments.npu[1:] if tensor.get_device() != device.index]
        if arguments.host:
            allowed = _identities(args[self._host]) if self._host is not None else set()
            strangers += [t.device for t in arguments.host if id(t) not in allowed and not _is_number(t)]
            strangers += [args[i].device for i in self._written if isinstance(args[i], Tensor) and args[i].is_cpu]
        if strangers:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
                f"{strangers[0]}! ({self.name})"
            )
        return device


def is_written(argument: torch._C.Argument) -> bool:
    """Whether an operator writes into an argument."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _holds_tensors(argument: torch._C.Argument) -> bool:
    return "Tensor" in str(argument.type)


def _is_number(tensor: Tensor) -> bool:
    return tensor.dim() == 0 and tensor.is_cpu


def _identities(argument: Any) -> set[int]:
    return {id(tensor) for tensor in (argument if isinstance(argument, (list, tuple)) else [argument])}


def _for_numbers(schema: torch._C.FunctionSchema, compute: Callable[..., Any]) -> Callable[..., Any]:
    """What computes where torch made a tensor of a number: the dispatcher hands it over as a number again.

    Some operators take it so. Of others there is an overload for numbers, which the call without an overload finds.
    """
    namespace, _, operator = schema.name.partition("::")
    if namespace != "aten" or torch._C._should_allow_numbers_as_tensors(operator):
        return compute
    found: Callable[..., Any] = torch._C._jit_get_operation(schema.name)[0]
    return found
