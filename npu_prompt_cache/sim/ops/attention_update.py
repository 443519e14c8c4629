"""Reference of ``npu_attention_update``: merges attention over parts of K/V by their LSE (op-plugin page of it)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.registry import reference, require

__all__ = ["npu_attention_update"]

_OP = "npu_attention_update"


@reference(_OP)
def npu_attention_update(
    lse: Sequence[Tensor], local_out: Sequence[Tensor], update_type: int
) -> tuple[Tensor, Tensor | None]:
    """Attention over all parts: ``sum_i local_out[i] * exp(lse[i] - log(sum_j exp(lse[j])))``.

    Args:
        lse: of each part ``[rows]``, float32; +inf marks a row without a result, which counts for nothing.
        local_out: of each part ``[rows, D]``, float32, float16 or bfloat16.
        update_type: 1: the merged LSE is wanted too.

    Returns:
        The merged output in ``local_out``'s dtype, and the merged LSE ``[rows]`` or None. A row without a result in
        any part is 0 with an LSE of +inf.
    """
    require(update_type in (0, 1), _OP, "update_type is 0 (the output) or 1 (the output and the LSE)", update_type)
    require(1 <= len(lse) <= 16, _OP, "there are 1 to 16 parts", len(lse))
    require(len(lse) == len(local_out), _OP, "lse and local_out are equally long", f"{len(lse)} and {len(local_out)}")
    rows, dtype = local_out[0].shape, local_out[0].dtype
    for part, (each_lse, out) in enumerate(zip(lse, local_out, strict=True)):
        _require_part(part, each_lse, out, rows, dtype)
    empty = torch.stack(list(lse)) == torch.inf
    logs = torch.stack(list(lse)).masked_fill(empty, -torch.inf)
    merged = logs.logsumexp(0)
    weights = torch.where(merged.isneginf(), 0, (logs - merged).exp())
    out = torch.zeros(rows)
    for part, part_out in enumerate(local_out):
        found = weights[part, :, None] * part_out.float()
        out += found.masked_fill(empty[part, :, None], 0)  # a row without a result may hold anything, NaN too
    lse_out = torch.where(merged.isneginf(), torch.inf, merged) if update_type == 1 else None
    return out.to(dtype), lse_out


def _require_part(part: int, lse: Tensor, out: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    require(lse.dtype == torch.float32, _OP, "lse is float32", f"{lse.dtype} in part {part}")
    require(
        out.dtype in (torch.float32, torch.float16, torch.bfloat16) and out.dtype == dtype,
        _OP,
        "local_out is float32, float16 or bfloat16, one of them in all parts",
        f"{out.dtype} in part {part}",
    )
    require(
        out.dim() == 2 and out.shape == shape and lse.shape == shape[:1],
        _OP,
        "in all parts local_out is [rows, D] and lse [rows], rows being B * S * N",
        f"{tuple(out.shape)} and {tuple(lse.shape)} in part {part}",
    )
    require(
        8 <= shape[1] <= 512 and shape[1] % 8 == 0,
        _OP,
        "D is 8 to 512 and a multiple of 8",
        shape[1],
    )
