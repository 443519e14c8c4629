"""npu tensors as CPU tensors over the same memory, and back.

Simulated HBM is host memory, so an address of the device is an address of the process. One CPU storage spans the
whole address space of the process (nothing is allocated: it is an address and a length), and the alias of an npu
tensor is a strided view of it. That costs about a microsecond, whatever the tensor's strides, and tells a result
that shares memory with an argument from a new one by its storage alone.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["alias", "is_alias", "moved", "require_no_partial_overlap", "view_of"]

_ADDRESS_SPACE_BYTES = 1 << 47  # of a process on x86-64 and AArch64 Linux
_START = 4096  # the lowest address that can be mapped; a multiple of every element size


def _make_spans() -> dict[torch.dtype, Tensor]:
    span_bytes = (ctypes.c_char * (_ADDRESS_SPACE_BYTES - _START)).from_address(_START)
    storage = torch.frombuffer(span_bytes, dtype=torch.uint8).untyped_storage()
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantized = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    empty = {dtype: torch.empty(0, dtype=torch.uint8).view(dtype) for dtype in dtypes - quantized}
    return {dtype: tensor.set_(storage, 0, (1,), (1,)) for dtype, tensor in empty.items()}


_spans = _make_spans()  # one tensor a dtype, all over the one storage


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of an npu tensor: same shape, strides, dtype, conjugate and negative bit.

    It requires no gradient, and keeps the npu tensor alive.

    Raises:
        NotImplementedError: it is quantized or sparse, or the address is not a multiple of the element size.
    """
    _require_simulated(tensor)
    span = _spans[tensor.dtype]
    address = tensor.data_ptr()  # 0 for a tensor without elements
    offset, rest = divmod(address - _START, tensor.itemsize) if address else (0, 0)
    if rest:
        raise NotImplementedError(f"npu_prompt_cache.sim: a {tensor.dtype} tensor lies at the odd address {address:#x}")
    found = torch.as_strided(span, tensor.shape, tensor.stride(), offset)
    if tensor.is_neg():
        found = torch._neg_view(found)
    if tensor.is_conj():
        found = torch._conj(found)
    found._npu_prompt_cache_owner = tensor  # type: ignore[attr-defined]
    return found


def _require_simulated(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.dtype not in _spans:
        what = tensor.layout if tensor.layout is not torch.strided else tensor.dtype
        raise NotImplementedError(f"npu_prompt_cache.sim: {what} tensors are not simulated; use the CPU for them")


def is_alias(tensor: Tensor) -> bool:
    """Whether a CPU tensor lies over device memory: an alias, or a view of one."""
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().data_ptr() == _START


def view_of(owners: Sequence[Tensor], found: Tensor) -> Tensor:
    """The npu tensor over the memory of ``found``, a view of the alias of one of ``owners``; it shares storage.

    Raises:
        RuntimeError: it lies in the memory of none of them.
    """
    for owner in owners:
        storage = owner.untyped_storage()
        offset_bytes = found.data_ptr() - storage.data_ptr()
        if found.numel() == 0:
            return _restored_bits(_strided(owner, found, 0), found)
        if 0 <= offset_bytes < storage.nbytes():
            return _restored_bits(_strided(owner, found, offset_bytes), found)
    raise RuntimeError("npu_prompt_cache.sim: an operator returned memory of the device that is none of its arguments'")


def _strided(owner: Tensor, found: Tensor, offset_bytes: int) -> Tensor:
    offset = offset_bytes // found.itemsize
    if owner.dtype == found.dtype:
        return torch.as_strided(owner, found.shape, found.stride(), offset)
    empty = torch.empty(0, dtype=found.dtype, device=owner.device)
    return empty.set_(owner.untyped_storage(), offset, found.shape, found.stride())


def _restored_bits(tensor: Tensor, like: Tensor) -> Tensor:
    if like.is_neg() != tensor.is_neg():
        tensor = torch._neg_view(tensor)
    if like.is_conj() != tensor.is_conj():
        tensor = torch._conj(tensor)
    return tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A new npu tensor with the shape, the strides and the elements of a CPU tensor.

    Args:
        tensor: any CPU tensor.
        device: an npu device.

    Raises:
        NotImplementedError: it is quantized or sparse.
    """
    _require_simulated(tensor)
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    count = tensor.numel()
    if count:
        if not tensor.is_contiguous():
            count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        ctypes.memmove(made.data_ptr(), tensor.data_ptr(), count * tensor.itemsize)
    return made


def require_no_partial_overlap(written: Tensor | Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """The rule of torch's CPU operators: what is written is what is read, or lies apart from it.

    As there, tensors with gaps are not looked at.

    Raises:
        RuntimeError: a written tensor shares some of its elements with a read one, or all of them in another order.
    """
    for one in [written] if isinstance(written, Tensor) else written:
        for other in read:
            if one is not other and _overlap_in_part(one, other):
                raise RuntimeError(
                    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a "
                    "single memory location. Please clone() the tensor before performing the operation."
                )


def _overlap_in_part(one: Tensor, other: Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if one.numel() == 0 or other.numel() == 0:
        return False
    if not (_is_dense(one) and _is_dense(other)):
        return False
    start, other_start = one.data_ptr(), other.data_ptr()
    if start == other_start and one.nbytes == other.nbytes:
        return one.stride() != other.stride()
    return start < other_start + other.nbytes and other_start < start + one.nbytes


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each at a place of its own."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
