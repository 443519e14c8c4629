"""References of the gated and approximated activations.

Sources: the op-plugin pages of npu_swiglu, npu_silu and npu_fast_gelu and the pages of aclnnSwiGlu, aclnnSwiGluGrad.
"""

import torch

from npu_prompt_cache.sim.ops.checks import (
    FLOATS,
    require_contiguous,
    require_dtype,
    require_not_empty,
    require_rank,
    require_same_dtype,
    require_shape,
)
from npu_prompt_cache.sim.ops.registry import reference, require

_FAST_GELU_SLOPE = 1.702
_SILU_DTYPES = (torch.float16, torch.float32)


@reference("npu_swiglu")
def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(a) * b`` of the two halves of ``input``.

    Args:
        input: 1 to 8 dimensions, float16, bfloat16 or float32, contiguous and not empty, even along ``dim``.
        dim: the dimension to halve.

    Returns:
        The result, half as long along ``dim``, of ``input``'s dtype.
    """
    op = "npu_swiglu"
    require_contiguous(op, input=input)
    require_not_empty(op, input=input)
    a, b = _halves(op, input, dim)
    return (torch.nn.functional.silu(a) * b).to(input.dtype)


@reference("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: torch.Tensor, input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The gradient of :func:`npu_swiglu`, like ``input``; ``grad_output`` has the result's shape and dtype."""
    op = "npu_swiglu_backward"
    a, b = _halves(op, input, dim)
    require_same_dtype(op, grad_output=grad_output, input=input)
    require_shape(op, "grad_output", grad_output, a.shape, "[input's dimensions, half along dim]")
    grad = grad_output.float()
    sigmoid = torch.sigmoid(a)
    da = grad * b * sigmoid * (1 + a * (1 - sigmoid))
    return torch.cat((da, grad * a * sigmoid), dim=dim).to(input.dtype)


@reference("npu_fast_gelu")
def npu_fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(1.702 * x)``, the formula of A2/A3; up to 8 dimensions, float16, bfloat16 or float32."""
    x = _fast_gelu_input("npu_fast_gelu", input)
    return (x * torch.sigmoid(_FAST_GELU_SLOPE * x)).to(input.dtype)


@reference("fast_gelu")
def fast_gelu(input: torch.Tensor) -> torch.Tensor:
    """:func:`npu_fast_gelu` by its older name."""
    return npu_fast_gelu(input)


@reference("npu_fast_gelu_backward")
def npu_fast_gelu_backward(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`npu_fast_gelu`, like ``input``; ``grad`` has its shape and dtype."""
    op = "npu_fast_gelu_backward"
    x = _fast_gelu_input(op, input)
    require_same_dtype(op, grad=grad, input=input)
    require_shape(op, "grad", grad, input.shape, "input.shape")
    s = torch.sigmoid(_FAST_GELU_SLOPE * x)
    return (grad.float() * (s + _FAST_GELU_SLOPE * x * s * (1 - s))).to(input.dtype)


@reference("npu_silu")
def npu_silu(input: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)`` of a float16 or float32 tensor."""
    require_dtype("npu_silu", "input", input, _SILU_DTYPES)
    return torch.nn.functional.silu(input.float()).to(input.dtype)


@reference("npu_silu_")
def npu_silu_(input: torch.Tensor) -> torch.Tensor:
    """:func:`npu_silu` in place; returns ``input``."""
    require_dtype("npu_silu_", "input", input, _SILU_DTYPES)
    return input.copy_(torch.nn.functional.silu(input.float()))


@reference("npu_silu_backward")
def npu_silu_backward(grad_output: torch.Tensor, x0: torch.Tensor, x1: torch.Tensor) -> torch.Tensor:
    """The gradient of :func:`npu_silu`, like ``grad_output``; ``x0`` is its input, ``x1`` its result."""
    op = "npu_silu_backward"
    require_dtype(op, "x0", x0, _SILU_DTYPES)
    require_same_dtype(op, grad_output=grad_output, x0=x0, x1=x1)
    require_shape(op, "grad_output", grad_output, x0.shape, "x0.shape")
    x = x0.float()
    s = torch.sigmoid(x)
    return (grad_output.float() * (s + x * s * (1 - s))).to(x0.dtype)


def _fast_gelu_input(op: str, x: torch.Tensor) -> torch.Tensor:
    require_dtype(op, "input", x, FLOATS)
    require_rank(op, "input", x, 0, 8)
    return x.float()


def _halves(op: str, x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two halves along a dimension, float32."""
    require_dtype(op, "input", x, FLOATS)
    require_rank(op, "input", x, 1, 8)
    require(-x.dim() <= dim < x.dim(), op, f"dim is in [-{x.dim()}, {x.dim()})", dim)
    rule = "the size of input along dim is even"
    require(x.shape[dim] % 2 == 0, op, rule, f"{x.shape[dim]} of {tuple(x.shape)} along {dim}")
    a, b = x.float().chunk(2, dim=dim)
    return a, b
