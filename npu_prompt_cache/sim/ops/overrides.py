"""Operators of torch that the generic kernel cannot serve by the CPU kernel of the same name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.recurrent import CELLS

__all__ = ["COMPUTE", "DRAWING", "filling_out"]


def filling_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``.out`` form of a function that returns one tensor, or a tuple of them."""

    def fill(*args: Any, **kwargs: Any) -> Any:
        outs = kwargs.pop("out")
        found = function(*args, **kwargs)
        pairs = [(outs, found)] if isinstance(outs, Tensor) else list(zip(outs, found, strict=True))
        for out, value in pairs:
            out.resize_(value.shape).copy_(value)
        return outs

    return fill


def _histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """The CPU has no kernel for integers, which devices have."""
    if self.is_floating_point():
        return torch.histc(self, bins, min, max)
    return torch.histc(self.double(), bins, min, max).to(self.dtype)


def _widened(out_dtype: torch.dtype, *operands: Tensor) -> list[Tensor]:
    dtype = operands[-1].dtype
    if out_dtype != dtype and not (out_dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16)):
        raise RuntimeError(f"out_dtype must be float32 or the dtype of the operands, {dtype}; found {out_dtype}")
    return [operand.to(out_dtype) for operand in operands]


def _mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.mm(*_widened(out_dtype, self, mat2))


def _bmm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(*_widened(out_dtype, self, mat2))


def _addmm(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, **scales: Any) -> Tensor:
    return torch.addmm(*_widened(out_dtype, self, mat1, mat2), **scales)


def _baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, out_dtype: torch.dtype, **scales: Any) -> Tensor:
    return torch.baddbmm(*_widened(out_dtype, self, batch1, batch2), **scales)


def _convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    bias_sizes = [grad_output.shape[1]]
    found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        grad_output, input, weight, bias_sizes, *geometry, output_mask
    )
    return found


def _addbmm_(self: Tensor, batch1: Tensor, batch2: Tensor, **scales: Any) -> Tensor:
    """The CPU's resizes a tensor that is to be broadcast, and so writes past its memory."""
    found = torch.addbmm(self, batch1, batch2, **scales)
    if found.shape != self.shape:
        raise RuntimeError(f"output with shape {list(self.shape)} doesn't match the shape {list(found.shape)}")
    return self.copy_(found)


def _native_dropout(
    input: Tensor, p: float, train: bool | None, *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """As the CPU's, which draws from the default generator."""
    if train is False or input.numel() == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return (input * mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


COMPUTE: dict[str, Callable[..., Any]] = {
    **CELLS,
    "aten::addbmm_": _addbmm_,
    "aten::histc": _histc,
    "aten::histc.out": filling_out(_histc),
    "aten::mm.dtype": _mm,
    "aten::mm.dtype_out": filling_out(_mm),
    "aten::bmm.dtype": _bmm,
    "aten::bmm.dtype_out": filling_out(_bmm),
    "aten::addmm.dtype": _addmm,
    "aten::addmm.dtype_out": filling_out(_addmm),
    "aten::baddbmm.dtype": _baddbmm,
    "aten::baddbmm.dtype_out": filling_out(_baddbmm),
    "aten::_lazy_clone": torch.clone,  # a lazy copy would make the alias's storage, all memory, copy on write
    "aten::convolution_overrideable": torch.convolution,
    "aten::convolution_backward_overrideable": _convolution_backward,
}
"""What computes an operator instead of the CPU kernel of its name, with the operator's parameters."""

DRAWING: dict[str, Callable[..., Any]] = {
    "aten::native_dropout": _native_dropout,
    "aten::randperm": torch.randperm,
    "aten::randperm.out": torch.randperm,
}
"""The same for operators that draw random numbers and take no generator: these functions take one by that name."""
