"""Rules that many operators share: dtypes, shapes, contiguity. Each names the argument, the rule and what was given."""

from collections.abc import Iterable, Sequence

import torch

from npu_prompt_cache.sim.ops.registry import require

__all__ = [
    "FLOATS",
    "require_contiguous",
    "require_dtype",
    "require_not_empty",
    "require_rank",
    "require_same_dtype",
    "require_shape",
    "require_unique",
]

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
"""What almost every compute operator of A2/A3 takes."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_dtype(op: str, name: str, tensor: torch.Tensor, allowed: Iterable[torch.dtype]) -> None:
    """Raises unless the tensor's dtype is one of those allowed."""
    allowed = tuple(allowed)
    require(tensor.dtype in allowed, op, f"{name} is {' or '.join(map(_name, allowed))}", _name(tensor.dtype))


def require_same_dtype(op: str, **tensors: torch.Tensor) -> None:
    """Raises unless all the tensors have one dtype."""
    found = ", ".join(f"{name} {_name(tensor.dtype)}" for name, tensor in tensors.items())
    require(len({t.dtype for t in tensors.values()}) <= 1, op, f"{', '.join(tensors)} have one dtype", found)


def require_rank(op: str, name: str, tensor: torch.Tensor, low: int, high: int | None = None) -> None:
    """Raises unless the tensor has ``low`` (to ``high``, inclusive) dimensions."""
    high = low if high is None else high
    dimensions = f"{low}" if low == high else f"{low} to {high}"
    require(low <= tensor.dim() <= high, op, f"{name} has {dimensions} dimensions", f"shape {tuple(tensor.shape)}")


def require_shape(op: str, name: str, tensor: torch.Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raises unless the tensor's shape is as expected; ``meaning`` says it in the page's letters, ``[batch, 1]``."""
    rule = f"{name} has shape {meaning} = {tuple(expected)}"
    require(tuple(tensor.shape) == tuple(expected), op, rule, f"{tuple(tensor.shape)}")


def require_contiguous(op: str, **tensors: torch.Tensor) -> None:
    """Raises unless every tensor is contiguous."""
    for name, tensor in tensors.items():
        found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
        require(tensor.is_contiguous(), op, f"{name} is contiguous", found)


def require_not_empty(op: str, **tensors: torch.Tensor) -> None:
    """Raises if a tensor has no elements."""
    for name, tensor in tensors.items():
        require(tensor.numel() > 0, op, f"{name} is not empty", f"shape {tuple(tensor.shape)}")


def require_unique(op: str, rule: str, values: torch.Tensor) -> None:
    """Raises if a value stands twice in a 1-D tensor."""
    ordered = values.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    require(len(repeated) == 0, op, rule, f"{int(repeated[0])} twice" if len(repeated) else "none")
