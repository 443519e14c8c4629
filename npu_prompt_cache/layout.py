"""What one token's K/V look like: the geometry of the pool."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

#: Asynchronous copies on the device want both ends at a multiple of this (Ascend runtime, memory chapter).
BLOCK_ALIGN_BYTES = 64
#: An operator on the NPU takes tensors of fewer elements than this.
MAX_PLANE_ELEMENTS = 2**31

_DLPACK_CODE = {torch.float16: 2, torch.bfloat16: 4, torch.float32: 2}
#: What K/V may be stored as.
SUPPORTED_DTYPES = tuple(_DLPACK_CODE)


#: An integer for all layers, or one for each.
PerLayer: TypeAlias = int | tuple[int, ...]


class LayerShape(NamedTuple):
    """Of the K/V of one layer."""

    dtype: torch.dtype
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class KVLayout:
    """Geometry of the K/V of one token, and of the blocks they are kept in.

    The pool has ``2 * num_layers`` planes, K and V of each layer, each a contiguous tensor of shape
    ``[blocks, block_size, heads, head_dim]``. Layers may differ; block ids mean the same tokens in all planes.

    Two layouts of the same planes are equal: what is the same in all layers is kept as an integer, and
    `value_head_dim` as None where V is as K.

    Args:
        num_layers: layers that keep K/V.
        num_kv_heads: key/value heads of a layer (before any repetition for grouped queries); one integer, or one for
            each layer.
        head_dim: elements of one head of K; one integer, or one for each layer.
        dtype: ``torch.float16``, ``torch.bfloat16`` or ``torch.float32``.
        block_size: tokens of a block; a multiple of 16. Attention on the NPU wants a multiple of 128, at most 512.
        value_head_dim: elements of one head of V; as `head_dim`, which it is where it is None.

    Raises:
        ValueError, TypeError: naming the value and what it may be.

    Example:
        >>> layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype=torch.float32)
        >>> layout.block_bytes
        5898240
        >>> latents = KVLayout(num_layers=27, num_kv_heads=1, head_dim=512, value_head_dim=64, dtype=torch.float16)
        >>> latents.plane_shape(0), latents.plane_shape(1)
        ((128, 1, 512), (128, 1, 64))
    """

    num_layers: int
    num_kv_heads: PerLayer
    head_dim: PerLayer
    dtype: torch.dtype
    block_size: int = 128
    value_head_dim: PerLayer | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "block_size"):
            _check_positive(name, getattr(self, name))
        if self.block_size % 16:
            raise ValueError(f"block_size={self.block_size} is not a multiple of 16")
        if self.dtype not in _DLPACK_CODE:
            known = ", ".join(str(dtype) for dtype in SUPPORTED_DTYPES)
            raise ValueError(f"dtype={self.dtype!r} is not one of {known}")
        for name in ("num_kv_heads", "head_dim", "value_head_dim"):
            if name != "value_head_dim" or self.value_head_dim is not None:
                object.__setattr__(self, name, _shortest(name, getattr(self, name), self.num_layers))
        if self.value_head_dim == self.head_dim:
            object.__setattr__(self, "value_head_dim", None)
        for plane, block_bytes in enumerate(self.plane_block_bytes):
            if block_bytes % BLOCK_ALIGN_BYTES:
                raise ValueError(
                    f"a block of {'KV'[plane % 2]} of layer {plane // 2} has {block_bytes} bytes (block_size * heads * "
                    f"head_dim * item size), which is not a multiple of {BLOCK_ALIGN_BYTES}; choose a larger block_size"
                )

    @functools.cached_property
    def layer_shapes(self) -> frozenset[LayerShape]:
        """Those that there are."""
        shapes = {(self.plane_shape(plane), self.plane_shape(plane + 1)) for plane in range(0, self.num_planes, 2)}
        return frozenset(LayerShape(self.dtype, *k, v[2]) for k, v in shapes)

    @property
    def num_planes(self) -> int:
        """Planes of the pool: K and V of layer 0, of layer 1, ..."""
        return 2 * self.num_layers

    def plane_shape(self, plane: int) -> tuple[int, int, int]:
        """One block of a plane: ``(block_size, heads, head_dim)``."""
        if not 0 <= plane < self.num_planes:
            raise ValueError(f"plane={plane} is not in [0, {self.num_planes})")
        layer, value = divmod(plane, 2)
        width = self.value_head_dim if value and self.value_head_dim is not None else self.head_dim
        return self.block_size, _of_layer(self.num_kv_heads, layer), _of_layer(width, layer)

    @functools.cached_property
    def plane_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block in each plane."""
        return tuple(math.prod(self.plane_shape(plane)) * self.dtype.itemsize for plane in range(self.num_planes))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all planes together."""
        return sum(self.plane_block_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K/V in all planes together."""
        return self.block_bytes // self.block_size

    @property
    def dlpack_code(self) -> int:
        """DLPack type code of `dtype` (2: IEEE float, 4: bfloat)."""
        return _DLPACK_CODE[self.dtype]


def _of_layer(value: PerLayer, layer: int) -> int:
    return value if isinstance(value, int) else value[layer]


def _shortest(name: str, value: object, num_layers: int) -> PerLayer:
    """The checked value; one integer where all layers have the same."""
    if not isinstance(value, (list, tuple)):
        _check_positive(name, value)
        return value  # type: ignore[return-value]
    if len(value) != num_layers:
        raise ValueError(f"{name} has {len(value)} values for {num_layers} layers: one integer, or one for each layer")
    for layer, of_layer in enumerate(value):
        _check_positive(f"{name}[{layer}]", of_layer)
    return value[0] if len(set(value)) == 1 else tuple(value)


def _check_positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: an integer is needed")
    if value < 1:
        raise ValueError(f"{name}={value}: at least 1 is needed")
