"""What one token's K/V look like: the geometry of the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Asynchronous copies on the device want both ends at a multiple of this (Ascend runtime, memory chapter).
BLOCK_ALIGN_BYTES = 64
#: An operator on the NPU takes tensors of fewer elements than this.
MAX_PLANE_ELEMENTS = 2**31

_DLPACK_CODE = {torch.float16: 2, torch.bfloat16: 4, torch.float32: 2}
#: What K/V may be stored as.
SUPPORTED_DTYPES = tuple(_DLPACK_CODE)


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the K/V of one token, and of the blocks they are kept in.

    The pool has ``2 * num_layers`` planes, K and V of each layer, each a contiguous tensor of shape
    ``[blocks, block_size, num_kv_heads, head_dim]``.

    Args:
        num_layers: decoder layers.
        num_kv_heads: key/value heads of a layer (before any repetition for grouped queries).
        head_dim: elements of one head.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        block_size: tokens of a block; a multiple of 16. Attention on the NPU wants a multiple of 128, at most 512.

    Raises:
        ValueError, TypeError: naming the value and what it may be.

    Example:
        >>> layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.float32)
        >>> layout.block_bytes
        5898240
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int = 128

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}: an integer is needed")
            if value < 1:
                raise ValueError(f"{name}={value}: at least 1 is needed")
        if self.block_size % 16:
            raise ValueError(f"block_size={self.block_size} is not a multiple of 16")
        if self.dtype not in _DLPACK_CODE:
            known = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
            raise ValueError(f"dtype={self.dtype!r} is not one of {known}")
        if self.plane_block_bytes % BLOCK_ALIGN_BYTES:
            raise ValueError(
                f"a block of one plane has {self.plane_block_bytes} bytes (block_size * num_kv_heads * head_dim * "
                f"item size), which is not a multiple of {BLOCK_ALIGN_BYTES}; choose a larger block_size"
            )

    @property
    def num_planes(self) -> int:
        """Planes of the pool: K and V of each layer."""
        return 2 * self.num_layers

    @property
    def plane_block_bytes(self) -> int:
        """Bytes of one block in one plane."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all planes together."""
        return self.num_planes * self.plane_block_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V in all planes together."""
        return self.block_bytes // self.block_size

    @property
    def dlpack_code(self) -> int:
        """DLPack type code of `dtype` (2: IEEE float, 4: bfloat)."""
        return _DLPACK_CODE[self.dtype]
