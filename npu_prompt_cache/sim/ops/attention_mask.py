"""Which pairs of query and key the sparse modes of torch_npu's attention operators leave out.

Masks are true (1) where a pair takes no part. Modes, by the op-plugin pages: 0 the mask given, between ``pre_tokens``
and ``next_tokens`` counted from the first row and column; 1 the mask given; 2 causal from the first row and column; 3
causal up to the last row and column (the mask of a chunk after its prefix); 4 a band counted from the last row and
column. Modes 2 to 4 take a compressed mask of 2048 x 2048 with ones above the diagonal, whatever the lengths are.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.registry import require

__all__ = ["COMPRESSED", "SparseMask", "outside_band", "require_compressed", "require_mask_values"]

COMPRESSED = 2048
"""Rows and columns of the compressed mask."""


@dataclass(frozen=True)
class SparseMask:
    """The mask of one call."""

    mode: int
    """0 to 4."""
    before: int
    """``pre_tokens``."""
    after: int
    """``next_tokens``."""
    given: Tensor | None = None
    """``[1 or B, 1, >= S1, >= S2]``, of modes 0 and 1."""

    def hidden(self, request: int, rows: int, columns: int) -> Tensor | None:
        """``[rows, columns]``, true where a pair of this request takes no part; None where all do."""
        offset = columns - rows
        if self.mode == 2:
            return outside_band(rows, columns, rows, 0)
        if self.mode == 3:
            return outside_band(rows, columns, rows + columns, offset)
        if self.mode == 4:
            return outside_band(rows, columns, self.before - offset, self.after + offset)
        if self.given is None:
            return None
        hidden = self.given[min(request, self.given.shape[0] - 1), 0, :rows, :columns].bool()
        band = outside_band(rows, columns, self.before, self.after) if self.mode == 0 else None
        return hidden if band is None else hidden | band


def outside_band(rows: int, columns: int, before: int, after: int) -> Tensor | None:
    """``[rows, columns]``: true but from ``before`` left of the diagonal to ``after`` right of it; None if nowhere."""
    if before >= rows - 1 and after >= columns - 1:
        return None
    far = rows + columns
    ones = torch.ones(rows, columns, dtype=torch.bool)
    right = ones.triu(max(-far, min(after, far)) + 1)
    return right if before >= rows - 1 else right.logical_or_(ones.tril(-max(-far, min(before, far)) - 1))


def require_mask_values(op: str, mask: Tensor) -> None:
    """Raises unless an int8 or uint8 mask holds nothing but 0 and 1, and any mask is contiguous."""
    _require_contiguous(op, mask)
    if mask.dtype != torch.bool and mask.numel():
        greatest = int(mask.view(torch.uint8).max())
        require(greatest <= 1, op, "an int8 or uint8 atten_mask holds only 0 and 1", f"a byte of {greatest}")


def require_compressed(op: str, mask: Tensor | None, mode: int) -> None:
    """Raises unless ``mask`` is the compressed mask that ``sparse_mode`` 2, 3 or 4 needs."""
    rule = (
        "sparse_mode 2, 3 and 4 need atten_mask in the compressed form (2048, 2048), (1, 2048, 2048) or "
        "(1, 1, 2048, 2048)"
    )
    found = f"sparse_mode {mode} with {None if mask is None else tuple(mask.shape)}"
    square = (COMPRESSED, COMPRESSED)
    shapes = (square, (1, *square), (1, 1, *square))
    require(mask is not None and tuple(mask.shape) in shapes, op, rule, found)
    assert mask is not None
    _require_contiguous(op, mask)
    require(
        torch.equal(_words(mask), _upper_triangle()),
        op,
        "the compressed atten_mask has ones above the diagonal and zeros on and below it",
        f"another {mask.dtype} mask of {tuple(mask.shape)}",
    )


def _require_contiguous(op: str, mask: Tensor) -> None:
    require(mask.is_contiguous(), op, "atten_mask is contiguous", f"strides {mask.stride()} of {tuple(mask.shape)}")


@functools.cache
def _upper_triangle() -> Tensor:
    return _words(torch.ones(COMPRESSED, COMPRESSED, dtype=torch.uint8).triu_(1))


def _words(mask: Tensor) -> Tensor:
    """A mask of bytes in words of 8 of them: comparing these takes a seventh of the time."""
    flat = mask.view(torch.uint8).flatten()
    return (flat.clone() if flat.storage_offset() % 8 else flat).view(torch.int64)
