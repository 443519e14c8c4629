"""Copies between tensors: those that cross devices go through the runtime, as torch_npu does them.

torch_npu's own kernel moves contiguous tensors of one dtype between host and device, and between devices, by calls
of the runtime alone; the simulator counts, delays and checks these like any program's. What it would do with an
operator of the device, around such a move or within one device, is done here over the same memory.
"""

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.aliases import alias, moved
from npu_prompt_cache.sim.ops.kernels import drain

__all__ = ["Copy"]


class Copy:
    """``aten::copy_`` and the operators that are a copy by another name.

    Args:
        runtime_copy: torch_npu's kernel of ``aten::copy_``, taken before this one replaces it.
    """

    def __init__(self, runtime_copy: torch._C._SafeKernelFunction) -> None:
        self._runtime_copy = runtime_copy

    def copy_(self, keys: torch._C.DispatchKeySet, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Writes ``source``, converted and broadcast, into ``to``; returns ``to``."""
        if not source.is_cpu:
            drain(source.get_device())
        if to.device == source.device:
            alias(to).copy_(alias(source))
            return to
        source = source.expand_as(to)
        if to.numel():
            self._send(keys, to, source, non_blocking)
        return to

    def _send(self, keys: torch._C.DispatchKeySet, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        between_devices = not to.is_cpu and not source.is_cpu
        # torch_npu converts on the host where it waits for the copy, and on the device where it does not.
        convert_first = source.is_cpu != non_blocking and not between_devices
        dtype = to.dtype if convert_first else source.dtype
        sent = _plain(source, dtype, between_devices)
        direct = _is_plain(to, dtype, between_devices)
        landed = to if direct else torch.empty(to.shape, dtype=dtype, device=to.device)
        self._runtime_copy.call_boxed(keys, landed, sent, non_blocking)
        if not direct:
            to.copy_(landed)


def _is_plain(tensor: Tensor, dtype: torch.dtype, whole_storage: bool) -> bool:
    """Whether the runtime can move a tensor as it lies; between devices torch_npu moves storages, not slices."""
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    return not whole_storage or tensor.untyped_storage().nbytes() == tensor.nbytes


def _plain(source: Tensor, dtype: torch.dtype, whole_storage: bool) -> Tensor:
    """The tensor itself where it is plain, or a plain copy on its device."""
    if _is_plain(source, dtype, whole_storage):
        return source
    on_cpu = source if source.is_cpu else alias(source)
    made = on_cpu.to(dtype).resolve_conj().resolve_neg().contiguous()
    return made if source.is_cpu else moved(made, source.device)
