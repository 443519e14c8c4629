"""Kernels that do more than compute: they fill out arguments, make tensors, draw random numbers, wait for the host."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_npu
from torch import Tensor

from npu_prompt_cache.sim.ops.aliases import alias, require_no_partial_overlap
from npu_prompt_cache.sim.ops.generators import borrowed
from npu_prompt_cache.sim.ops.kernels import Arguments, Kernel, drain, is_written

__all__ = ["SpecialKernel", "make_kernel"]

_HOST_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_MASKS = (torch.bool, torch.uint8)

# The argument that spares these the wait, by telling the size of the result; and its value where it does not.
_TOLD_SIZES = {"aten::one_hot": ("num_classes", -1), "aten::repeat_interleave": ("output_size", None)}


def make_kernel(
    name: str,
    schema: torch._C.FunctionSchema,
    compute: Callable[..., Any],
    tags: set[torch.Tag],
    *,
    fills_outs: bool = False,
    draws: bool = False,
) -> Kernel:
    """The kernel of an operator.

    Args:
        name: as :class:`Kernel` takes it, like ``schema`` and ``compute``.
        schema: the operator's.
        compute: what computes it.
        tags: the operator's.
        fills_outs: whether ``compute`` is given the memory of out arguments and writes there; else it is given
            empty tensors, and the kernel sees to the rest.
        draws: whether ``compute`` takes a ``generator`` that the operator does not.
    """
    # torch_npu does not mark an out argument as written where it is a list.
    outs = [a.name for a in schema.arguments if a.kwarg_only and (is_written(a) or a.name == "out")]
    outs = [] if fills_outs else outs
    names = {argument.name for argument in schema.arguments}
    if outs or draws or names & {"device", "generator"} or _HOST_WAITS & tags or schema.name in _INDEXING:
        return SpecialKernel(name, schema, compute, tags, outs, draws)
    return Kernel(name, schema, compute)


class SpecialKernel(Kernel):
    """A kernel with any of: out arguments, options of a new tensor, randomness, a result the host waits for.

    * An out argument may alias what is read, so a new tensor is filled, and then copied where it is to go.
    * A tensor that is to be made on the device is made on the host, and copied there.
    * Random numbers are the CPU's for the state of the npu generator; see ``generators``.
    * Where a device would have to tell the host a size or a value, the stream is synchronised, which is counted.
    """

    def __init__(
        self,
        name: str,
        schema: torch._C.FunctionSchema,
        compute: Callable[..., Any],
        tags: set[torch.Tag],
        outs: Sequence[str],
        draws: bool,
    ) -> None:
        super().__init__(name, schema, compute, outs)
        self._outs = outs
        self._where = {argument.name: i for i, argument in enumerate(schema.arguments)}
        self._defaults = {argument.name: argument.default_value for argument in schema.arguments}
        self._makes = "device" in self._where
        self._is_random = draws or "generator" in self._where
        self._indexes = schema.name in _INDEXING
        self._waits = bool(_HOST_WAITS & tags)
        told_size = _TOLD_SIZES.get(schema.name)
        self._told_size = told_size if told_size is not None and told_size[0] in self._where else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As :meth:`Kernel.__call__`."""
        arguments, cpu_args = self.convert(args, kwargs)
        read = list(arguments.npu)
        given = {name: kwargs[name] for name in self._outs}
        if self._is_random:
            self._require_device(read, args, kwargs)
        for out in given.values():
            require_no_partial_overlap(out, read)
        fresh = {name: self._fresh(out, arguments) for name, out in given.items()}
        kwargs.update(fresh)
        device = self._result_device(arguments, args, kwargs)
        at = device.index if device.type == "npu" else arguments.npu[0].get_device()
        if device.type == "npu" and self._makes:
            kwargs.pop("pin_memory", None)
            kwargs["device"] = torch.device("cpu")
        drain(at)
        if self._waits_for_host(args, kwargs):
            torch_npu.npu.current_stream(at).synchronize()
        if self._is_random:
            with self._randomness(at, cpu_args, kwargs):
                result = self.run(arguments, cpu_args, kwargs)
        else:
            result = self.run(arguments, cpu_args, kwargs)
        for name, out in given.items():
            _fill(out, fresh[name], read)
        return self.returned(arguments, result, device) if device.type == "npu" else result

    def _value(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An argument by name; None where the operator has none of that name."""
        at = self._where.get(name, len(args))
        return args[at] if at < len(args) else kwargs.get(name, self._defaults.get(name))

    def _fresh(self, out: Any, arguments: Arguments) -> Any:
        if isinstance(out, (list, tuple)):
            return [self._fresh(element, arguments) for element in out]
        if not out.is_npu:
            raise RuntimeError(f"{self.name}: an out tensor is on the device {out.device}; expected npu")
        fresh = torch.empty(0, dtype=out.dtype)
        arguments.npu.append(out)
        arguments.on_host.append(fresh)
        return fresh

    def _result_device(self, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        asked = self._value("device", args, kwargs) if self._makes else None
        if asked is None:
            return self.device_of(arguments, args)
        device = torch.device(asked)
        if device.type == "npu" and device.index is None:
            device = torch.device("npu", torch_npu.npu.current_device())
        return device

    def _waits_for_host(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self._indexes:
            return any(index is not None and index.dtype in _MASKS for index in args[1])
        if self._told_size is not None:
            argument, untold = self._told_size
            return bool(self._value(argument, args, kwargs) == untold)
        return self._waits

    def _require_device(self, read: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises where nothing but the generator, which brought the call here, is on the device."""
        asked = self._value("device", args, kwargs) if self._makes else None
        written = [kwargs[name] for name in self._outs]
        if not read and not any(out.is_npu for out in written) and (asked is None or torch.device(asked).type != "npu"):
            raise RuntimeError(f"Expected a 'cpu' device type for generator but found 'npu' ({self.name})")

    @contextlib.contextmanager
    def _randomness(self, device_index: int, cpu_args: list[Any], kwargs: dict[str, Any]) -> Iterator[None]:
        """Puts a CPU generator in the place of the npu one, or of none, in the arguments."""
        given = self._value("generator", cpu_args, kwargs)
        generator = given if given is not None else torch_npu.npu.default_generators[device_index]
        if generator.device.type != "npu":
            raise RuntimeError(
                f"Expected a 'npu' device type for generator but found '{generator.device.type}' ({self.name})"
            )
        with borrowed(generator) as cpu:
            at = self._where.get("generator", len(cpu_args))
            if at < len(cpu_args):
                cpu_args[at] = cpu
            else:
                kwargs["generator"] = cpu
            yield


def _fill(out: Any, fresh: Any, read: list[Tensor]) -> None:
    if isinstance(out, (list, tuple)):
        for one, value in zip(out, fresh, strict=True):
            _fill(one, value, read)
        return
    if out.shape != fresh.shape:
        if any(out is tensor for tensor in read):
            raise RuntimeError(
                f"output with shape {list(out.shape)} doesn't match the broadcast shape {list(fresh.shape)}"
            )
        _resize(out, fresh)
    alias(out).copy_(fresh)


def _resize(out: Tensor, like: Tensor) -> None:
    if out.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
            f"match the required output shape {list(like.shape)}. This behavior is deprecated",
            stacklevel=2,
        )
    out.resize_(like.shape)  # torch_npu queues a copy of what was there
    drain(out.get_device())
    if not like.is_contiguous():
        out.as_strided_(like.shape, like.stride())
