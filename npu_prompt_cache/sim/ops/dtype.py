"""References of the dtype casts. Source: the op-plugin page of npu_dtype_cast; which dtypes: aclnnCast on A2/A3.

A cast between torch's own dtypes is torch's. torch_npu's further ones (float8 and float4 as numbers above 255) do not
exist on A2/A3.
"""

import torch

from npu_prompt_cache.sim.ops.registry import reference, require

# By the numbers of torch's scalar types, as torch_npu passes them.
_DTYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    15: torch.bfloat16,
}


@reference("npu_dtype_cast")
def npu_dtype_cast(input: torch.Tensor, dtype: int, input_dtype: int | None = None) -> torch.Tensor:
    """A copy of ``input`` in another dtype.

    Args:
        input: any of the dtypes of A2/A3.
        dtype: the number of the dtype wanted.
        input_dtype: the number of ``input``'s own dtype; another one would read its bytes as something else.
    """
    op = "npu_dtype_cast"
    known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES.values())
    require(dtype in _DTYPES, op, f"dtype is one of {known} on A2/A3", dtype)
    if input_dtype is not None:
        own = _DTYPES.get(input_dtype) == input.dtype
        require(own, op, "input_dtype is input's own dtype on A2/A3", f"{input_dtype} for {input.dtype}")
    return input.to(_DTYPES[dtype], copy=True)


@reference("_npu_dtype_cast")
def _npu_dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of ``input`` in ``dtype``."""
    return input.to(dtype, copy=True)


@reference("npu_dtype_cast_")
def npu_dtype_cast_(input: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """Writes ``src`` in ``input``'s dtype into ``input``, unless the dtypes are one; returns ``input``."""
    return input if input.dtype == src.dtype else input.copy_(src)


@reference("npu_dtype_cast_backward")
def npu_dtype_cast_backward(
    grad: torch.Tensor, dtype: torch.dtype, grad_dtype: int | None = None, input_dtype: int | None = None
) -> torch.Tensor:
    """The gradient of :func:`npu_dtype_cast`: ``grad`` in the dtype of its input."""
    return grad.to(dtype, copy=True)


@reference("_npu_dtype_cast_backward")
def _npu_dtype_cast_backward(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of :func:`_npu_dtype_cast`."""
    return grad.to(dtype, copy=True)
