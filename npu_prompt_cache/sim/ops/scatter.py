"""Reference of npu_scatter_nd_update: rows of a tensor replaced by index."""

import math

import torch

from npu_prompt_cache.sim.ops.checks import require_dtype, require_rank, require_same_dtype, require_shape
from npu_prompt_cache.sim.ops.registry import reference, require

_DTYPES = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)


@reference("npu_scatter_nd_update")
def npu_scatter_nd_update(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """A copy of ``input`` after :func:`npu_scatter_nd_update_`."""
    output = input.clone()
    _update("npu_scatter_nd_update", output, indices, updates)
    return output


@reference("npu_scatter_nd_update_")
def npu_scatter_nd_update_(input: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> torch.Tensor:
    """``input[indices[i]] = updates[i]`` for every i, one after the other: of a repeated index the last one stands.

    Args:
        input: 1 to 8 dimensions, float32, float16, bfloat16, bool, int64 or int8 as on A2/A3; written.
        indices: ``[…, a]``, int32 or int64, at least 2 dimensions; its last one indexes the first ``a`` dimensions
            of ``input`` (at most 7), each index in ``[0, input.shape[k])``.
        updates: ``[indices' shape but for the last dimension, input's shape but for the first a]``.

    Returns:
        ``input``.
    """
    _update("npu_scatter_nd_update_", input, indices, updates)
    return input


def _update(op: str, target: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> None:
    require_rank(op, "input", target, 1, 8)
    require_dtype(op, "input (on A2/A3)", target, _DTYPES)
    require_same_dtype(op, input=target, updates=updates)
    require_dtype(op, "indices", indices, (torch.int32, torch.int64))
    require(indices.dim() >= 2, op, "indices has at least 2 dimensions", f"shape {tuple(indices.shape)}")
    depth = indices.shape[-1]
    limit = min(7, target.dim())
    rule = f"the last dimension of indices is 1 to {limit}: at most input's dimensions, and at most 7"
    require(1 <= depth <= limit, op, rule, depth)
    expected = (*indices.shape[:-1], *target.shape[depth:])
    require_shape(op, "updates", updates, expected, "indices.shape[:-1] + input.shape[indices.shape[-1]:]")
    rows = _rows(op, indices.reshape(-1, depth).long(), target.shape[:depth])
    last = _last_occurrences(rows)
    values = updates.reshape(len(rows), *target.shape[depth:])
    # index_put_ rather than a flat view: the target may have any strides.
    target[indices.reshape(-1, depth).long()[last].unbind(1)] = values[last]


def _rows(op: str, indices: torch.Tensor, sizes: torch.Size) -> torch.Tensor:
    """One number for each index, equal where the indices are; checks their range on the way."""
    inside = (indices >= 0) & (indices < torch.tensor(sizes))
    wrong = indices[(~inside).any(1)]
    rule = f"indices are in [0, {tuple(sizes)}) in each dimension"
    require(bool(inside.all()), op, rule, wrong[0].tolist() if len(wrong) else "none")
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    return (indices * torch.tensor(strides)).sum(1)


def _last_occurrences(rows: torch.Tensor) -> torch.Tensor:
    """The positions of the last of every value, so that a repeated index does not depend on the order of writes."""
    order = rows.argsort(stable=True)
    ordered = rows[order]
    is_last = torch.ones(len(rows), dtype=torch.bool)
    is_last[:-1] = ordered[1:] != ordered[:-1]
    return order[is_last]
