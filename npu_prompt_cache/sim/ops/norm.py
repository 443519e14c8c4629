"""References of RMSNorm and its fusions.

Sources: the op-plugin pages of npu_rms_norm and npu_add_rms_norm and, for what those leave out, the pages of the
operators they call (aclnnRmsNorm, aclnnRmsNormGrad, aclnnAddRmsNorm, aclnnInplaceAddRmsNorm, aclnnGemmaRmsNorm).
RMSNorm rounds once; AddRmsNorm rounds the sum, the normalised sum and the product, each to the input's dtype.
"""

import torch

from npu_prompt_cache.sim.ops.checks import FLOATS, require_dtype, require_rank, require_same_dtype, require_shape
from npu_prompt_cache.sim.ops.registry import reference, require


@reference("npu_rms_norm")
def npu_rms_norm(input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """``input / sqrt(mean(input²) + epsilon) * gamma`` over the dimensions of ``gamma``.

    Args:
        input: 1 to 8 dimensions, float16, bfloat16 or float32.
        gamma: the last dimensions of ``input``; its dtype, or float32.
        epsilon: added to the mean square.

    Returns:
        The result, like ``input``; and the reciprocal root mean square, float32, of ``input``'s shape with 1 for
        each dimension of ``gamma``.
    """
    _require_gamma("npu_rms_norm", "input", input, gamma, mixed=True)
    y, rstd = _normalised(input.float(), gamma, epsilon)
    return (y * gamma.float()).to(input.dtype), rstd


@reference("npu_rms_norm_backward")
def npu_rms_norm_backward(
    dy: torch.Tensor, input: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of :func:`npu_rms_norm`.

    Args:
        dy: the gradient of the result, like ``input``.
        input: as given forward, 2 to 8 dimensions.
        gamma: as given forward.
        rstd: as returned forward, float32.

    Returns:
        The gradients of ``input``, like it, and of ``gamma``, of its shape and float32.
    """
    op = "npu_rms_norm_backward"
    require_rank(op, "input", input, 2, 8)
    _require_gamma(op, "input", input, gamma, mixed=True)
    require_shape(op, "dy", dy, input.shape, "input.shape")
    require_same_dtype(op, dy=dy, input=input)
    require_dtype(op, "rstd", rstd, (torch.float32,))
    leading = input.dim() - gamma.dim()
    require_shape(op, "rstd", rstd, (*input.shape[:leading], *[1] * gamma.dim()), "[input's dimensions or 1]")
    x = input.float() * rstd
    g = dy.float() * gamma.float()
    mean = (g * x).mean(dim=_reduced(gamma), keepdim=True)
    dgamma = (dy.float() * x).reshape(-1, *gamma.shape).sum(0)
    return ((g - x * mean) * rstd).to(input.dtype), dgamma


@reference("npu_gemma_rms_norm")
def npu_gemma_rms_norm(
    input: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`npu_rms_norm` with ``1 + gamma`` for ``gamma``, which has ``input``'s dtype."""
    _require_gamma("npu_gemma_rms_norm", "input", input, gamma, mixed=False)
    y, rstd = _normalised(input.float(), gamma, epsilon)
    return (y * (1 + gamma.float())).to(input.dtype), rstd


@reference("npu_add_rms_norm")
def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """RMSNorm of ``x1 + x2``.

    Args:
        x1: 1 to 8 dimensions, float16, bfloat16 or float32.
        x2: like ``x1``.
        gamma: the last dimensions of ``x1``, of its dtype.
        epsilon: added to the mean square, not negative.

    Returns:
        The result, like ``x1``; the reciprocal root mean square, float32, with 1 for each dimension of ``gamma``;
        and the sum, like ``x1``.
    """
    return _add_rms_norm("npu_add_rms_norm", x1, x2, gamma, epsilon)


@reference("npu_add_rms_norm_v2")
def npu_add_rms_norm_v2(x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> torch.Tensor:
    """:func:`npu_add_rms_norm` in place: the result goes into ``x1``, the sum into ``x2``; returns the rstd."""
    y, rstd, x = _add_rms_norm("npu_add_rms_norm_v2", x1, x2, gamma, epsilon)
    x1.copy_(y)
    x2.copy_(x)
    return rstd


@reference("npu_add_rms_norm_v2_functional")
def npu_add_rms_norm_v2_functional(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`npu_add_rms_norm` as (rstd, result, sum)."""
    y, rstd, x = _add_rms_norm("npu_add_rms_norm_v2_functional", x1, x2, gamma, epsilon)
    return rstd, y, x


def _add_rms_norm(
    op: str, x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _require_gamma(op, "x1", x1, gamma, mixed=False)
    require_shape(op, "x2", x2, x1.shape, "x1.shape")
    require_same_dtype(op, x1=x1, x2=x2, gamma=gamma)
    require(epsilon >= 0, op, "epsilon is not negative", epsilon)
    x = (x1.float() + x2.float()).to(x1.dtype)
    y, rstd = _normalised(x.float(), gamma, epsilon)
    return (y.to(x1.dtype).float() * gamma.float()).to(x1.dtype), rstd, x


def _require_gamma(op: str, name: str, x: torch.Tensor, gamma: torch.Tensor, *, mixed: bool) -> None:
    """Checks the input and its weight; ``mixed``: whether the weight may be float32 for a smaller input."""
    require_rank(op, name, x, 1, 8)
    require_dtype(op, name, x, FLOATS)
    rule = f"gamma has {name}'s dtype" + (" or float32" if mixed else "")
    allowed = (x.dtype, torch.float32) if mixed else (x.dtype,)
    require(gamma.dtype in allowed, op, rule, f"{gamma.dtype} for {x.dtype}")
    fits = 1 <= gamma.dim() <= x.dim() and x.shape[x.dim() - gamma.dim() :] == gamma.shape
    require(fits, op, f"gamma has the last dimensions of {name}", f"{tuple(gamma.shape)} for {tuple(x.shape)}")


def _reduced(gamma: torch.Tensor) -> list[int]:
    return list(range(-gamma.dim(), 0))


def _normalised(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * rstd`` and the rstd, of a float32 input."""
    rstd = (x.square().mean(dim=_reduced(gamma), keepdim=True) + epsilon).rsqrt()
    return x * rstd, rstd
