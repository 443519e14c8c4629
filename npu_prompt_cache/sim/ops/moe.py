"""Reference of the choice of experts. Source: the op-plugin page of npu_moe_gating_top_k_softmax."""

import torch

from npu_prompt_cache.sim.ops.checks import FLOATS, require_dtype, require_rank, require_shape
from npu_prompt_cache.sim.ops.registry import reference, require

_K_MAX = 1024


@reference("npu_moe_gating_top_k_softmax")
def npu_moe_gating_top_k_softmax(
    x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The k largest of softmax(x), row by row; of equal ones the first.

    Args:
        x: ``[rows, experts]`` or ``[batch, rows, experts]``, float16, bfloat16 or float32.
        finished: ``x``'s shape without the last dimension, bool: rows that take no part get the expert ``experts``.
        k: 1 to ``experts``, at most 1024.

    Returns:
        The probabilities, ``[…, k]`` of ``x``'s dtype; the experts, int32; and for each the place of its row if the
        choices of all rows stood one rank after the other: ``row + rank * rows``, int32.
    """
    op = "npu_moe_gating_top_k_softmax"
    require_rank(op, "x", x, 2, 3)
    require_dtype(op, "x", x, FLOATS)
    experts = x.shape[-1]
    require(0 < k <= min(experts, _K_MAX), op, f"k is in [1, x's last dimension = {experts}] and at most {_K_MAX}", k)
    if finished is not None:
        require_dtype(op, "finished", finished, (torch.bool,))
        require_shape(op, "finished", finished, x.shape[:-1], "x.shape[:-1]")
    probabilities = x.float().softmax(-1)
    if x.dtype == torch.float16:  # bfloat16 is ranked in float32 and rounded last, float16 is rounded first
        probabilities = probabilities.half()
    y, expert_index = probabilities.sort(dim=-1, descending=True, stable=True)
    y, expert_index = y[..., :k], expert_index[..., :k]
    if finished is not None:
        expert_index = torch.where(finished[..., None], experts, expert_index)
    rows = x.shape[:-1].numel()
    row_index = torch.arange(rows * k, dtype=torch.int32).view(k, rows).t()
    return y.to(x.dtype), expert_index.int(), row_index.reshape(y.shape)
