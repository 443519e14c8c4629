"""One call of an inference attention operator in words common to all of them, and the rules on its tensors.

The rules are those of op-plugin's pages for Atlas A2 and A3 with float16 or bfloat16 (of
``npu_fused_infer_attention_score``, its ``_v2``, ``npu_prompt_flash_attention``, ``npu_incre_flash_attention``), and
where a page is silent those the host code of CANN's operators checks (hicann/ops-transformer). Quantised attention is
not served.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.attention_layout import INFERENCE_LAYOUTS, Layout
from npu_prompt_cache.sim.ops.registry import require

__all__ = ["Call", "Flavour", "Shape", "refuse", "shape_of"]

_FLOATS = (torch.float16, torch.bfloat16)
_ROPE_DIM = 64
_LATENT_DIM = 512
_LATENT_LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_NBSD", "BSND_NBSD", "BSH_NBSD", "TND", "TND_NTD")
_ROPE_LAYOUTS = ("BSH", "BSND", "TND", "BNSD", "NTD", "BSH_BNSD", "BSND_BNSD", "BNSD_BSND", "NTD_TND")
_NEED_ROPE = ("BSH_BNSD", "BSND_BNSD")


@dataclass(frozen=True)
class Flavour:
    """What an operator calls its parameters, and where the pages differ."""

    op: str
    heads: str = "num_heads"
    query_lengths: str = "actual_seq_lengths"
    kv_lengths: str = "actual_seq_lengths_kv"
    lse: str = "softmax_lse_flag"
    layouts: tuple[str, ...] = tuple(INFERENCE_LAYOUTS)
    second: bool = False
    """Whether the page of ``_v2`` holds: packed heads of 64, no LSE limit with latent K/V, narrower packed MHA."""
    contiguous: bool = True
    """Whether query, key and value have to be."""
    aligned: int = 16
    """What the size of a head is a multiple of."""
    empty_rows: bool = True
    """Whether a mask of mode 0 or 1 may hide all of a row."""


@dataclass(frozen=True)
class Call:
    """Arguments of one call; names as in ``npu_fused_infer_attention_score`` where they are obvious."""

    flavour: Flavour
    query: Tensor
    key: Tensor
    value: Tensor
    input_layout: str
    num_heads: int
    num_kv_heads: int
    """0: as many as query's."""
    scale: float
    query_lengths: Sequence[int] | None = None
    kv_lengths: Sequence[int] | None = None
    atten_mask: Tensor | None = None
    sparse_mode: int = 0
    pre_tokens: int = 2**31 - 1
    next_tokens: int = 2**31 - 1
    pse_shift: Tensor | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    key_prefix: Tensor | None = None
    value_prefix: Tensor | None = None
    prefix_lengths: Sequence[int] | None = None
    sink: Tensor | None = None
    inner_precise: int = 0
    lse: bool = False

    @property
    def op(self) -> str:
        """The operator's name."""
        return self.flavour.op

    @property
    def paged(self) -> bool:
        """Whether K/V are in blocks."""
        return self.block_table is not None

    @property
    def layout(self) -> Layout:
        """Of query and output."""
        return INFERENCE_LAYOUTS[self.input_layout]


@dataclass(frozen=True)
class Shape:
    """Sizes of a call that keeps the rules on its tensors."""

    requests: int
    """``B``; 0 in packed layouts, where the lengths tell."""
    tokens: int
    """``S`` of query, ``T`` in packed layouts."""
    kv_tokens: int
    """The same of key and value; 0 if they are in blocks."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    roped: bool
    """Whether rope tensors are given (MLA)."""

    @property
    def latent(self) -> bool:
        """Whether K/V are MLA's latent vectors."""
        return self.roped and self.head_dim == _LATENT_DIM


def refuse(op: str, **given: object) -> None:
    """Raises ``NotImplementedError`` if one of the arguments is given: what the simulator does not serve."""
    named = [name for name, value in given.items() if value is not None]
    if named:
        raise NotImplementedError(f"{op}: the simulator does not serve {' and '.join(named)}; leave it out")


def shape_of(call: Call) -> Shape:
    """The sizes of a call.

    Raises:
        RuleViolation: a rule on dtypes, shapes or their combination is broken.
        NotImplementedError: the call is quantised.
    """
    _require_layout(call)
    _require_dtypes(call)
    shape = _sizes(call)
    _require_heads(call, shape)
    _require_size_limits(call, shape)
    if call.layout.packed and not shape.latent:
        _require_packed_dims(call, shape)
    _require_rope(call, shape)
    _require_prefix(call, shape)
    _require_sink(call, shape)
    return shape


def _require_layout(call: Call) -> None:
    flavour = call.flavour
    require(
        call.input_layout in flavour.layouts,
        call.op,
        f"input_layout is one of {', '.join(flavour.layouts)}",
        repr(call.input_layout),
    )
    axes = call.layout.axes
    require(
        call.query.dim() == len(axes),
        call.op,
        f"query has the axes of input_layout, which are {axes}",
        f"{call.input_layout} with {tuple(call.query.shape)}",
    )
    require(call.num_heads > 0, call.op, f"{flavour.heads} is at least 1", call.num_heads)
    require(call.num_kv_heads >= 0, call.op, "num_key_value_heads is at least 0", call.num_kv_heads)


def _require_dtypes(call: Call) -> None:
    query, key, value = call.query, call.key, call.value
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype in (torch.int8, torch.int32):
            raise NotImplementedError(f"{call.op}: the simulator does not serve {tensor.dtype} {name} (quantised)")
    if call.paged and 5 in (key.dim(), value.dim()):
        raise NotImplementedError(f"{call.op}: the simulator does not serve K/V in the format NZ {tuple(key.shape)}")
    require(query.dtype in _FLOATS, call.op, "query is float16 or bfloat16", query.dtype)
    require(
        key.dtype == value.dtype == query.dtype,
        call.op,
        "without quantisation key and value have query's dtype",
        f"{query.dtype}, {key.dtype} and {value.dtype}",
    )
    if call.flavour.contiguous:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require(
                tensor.is_contiguous(),
                call.op,
                "query, key and value are contiguous",
                f"{name} {tuple(tensor.shape)} with strides {tensor.stride()}",
            )


def _sizes(call: Call) -> Shape:
    axes = call.layout.axes
    heads = call.num_heads
    kv_heads = call.num_kv_heads or heads
    query = _by_axis(call, "query", call.query, axes, heads)
    if call.paged:
        key_dim, value_dim = (
            cache.shape[-1] // (kv_heads if cache.dim() == 3 else 1) for cache in (call.key, call.value)
        )
        kv_tokens = 0
    else:
        key = _by_axis(call, "key", call.key, axes, kv_heads)
        value = _by_axis(call, "value", call.value, axes, kv_heads)
        require(
            {**key, "D": 0} == {**value, "D": 0},
            call.op,
            "key and value have the same shape (but for their D, where packed)",
            f"{tuple(call.key.shape)} and {tuple(call.value.shape)}",
        )
        require(
            "B" not in axes or key["B"] == query["B"],
            call.op,
            "key and value have as many requests B as query",
            f"query {tuple(call.query.shape)}, key {tuple(call.key.shape)}",
        )
        key_dim, value_dim, kv_tokens = key["D"], value["D"], key.get("S", key.get("T", 0))
    require(
        key_dim == query["D"],
        call.op,
        "query and key have heads of one size D",
        f"{query['D']} and {key_dim}",
    )
    tokens = query.get("S", query.get("T", 0))
    roped = call.query_rope is not None or call.key_rope is not None
    return Shape(query.get("B", 0), tokens, kv_tokens, heads, kv_heads, query["D"], value_dim, roped)


def _by_axis(call: Call, name: str, tensor: Tensor, axes: str, heads: int) -> dict[str, int]:
    """Sizes by axis, ``H`` taken apart."""
    require(
        tensor.dim() == len(axes),
        call.op,
        f"key and value that are not in blocks have query's axes, which are {axes}",
        f"{name} {tuple(tensor.shape)}",
    )
    sizes = dict(zip(axes, tensor.shape, strict=True))
    if "H" in sizes:
        hidden = sizes.pop("H")
        require(
            hidden % heads == 0,
            call.op,
            f"H is the number of heads times D ({call.flavour.heads}, num_key_value_heads)",
            f"{name} {tuple(tensor.shape)} for {heads} heads",
        )
        sizes |= {"N": heads, "D": hidden // heads}
    require(
        sizes["N"] == heads,
        call.op,
        f"{call.flavour.heads} and num_key_value_heads are the N of query and of key and value",
        f"{name} {tuple(tensor.shape)} for {heads} heads",
    )
    return sizes


def _require_heads(call: Call, shape: Shape) -> None:
    op, heads = call.op, call.flavour.heads
    found = f"{shape.heads} and {shape.kv_heads}"
    require(max(shape.heads, shape.kv_heads) <= 256, op, "N is at most 256", found)
    require(shape.heads % shape.kv_heads == 0, op, f"{heads} is a multiple of num_key_value_heads", found)
    require(
        shape.latent or shape.heads // shape.kv_heads <= 64,
        op,
        f"{heads} is at most 64 times num_key_value_heads",
        found,
    )


def _require_size_limits(call: Call, shape: Shape) -> None:
    op, head_dim = call.op, shape.head_dim
    require(head_dim <= 512, op, "D is at most 512", head_dim)
    require(
        head_dim % call.flavour.aligned == 0,
        op,
        f"D is a multiple of {call.flavour.aligned} (float16, bfloat16)",
        head_dim,
    )
    require(shape.requests <= 65536, op, "B is at most 65536", shape.requests)
    longest = 20971520 if shape.tokens > 1 else 262144
    require(
        shape.tokens <= 20971520 and shape.kv_tokens <= longest,
        op,
        "S is at most 20971520, and of key and value at most 262144 where query's is 1",
        f"{shape.tokens} of query, {shape.kv_tokens} of key and value",
    )
    name = call.input_layout
    require(name != "BNSD_BSND" or shape.tokens > 1, op, "BNSD_BSND is for a query with S > 1", shape.tokens)
    require(
        not name.endswith("_NBSD") or shape.roped or 1 < shape.tokens <= 16,
        op,
        "an output layout of NBSD is for a query with 1 < S <= 16",
        f"{name} with S = {shape.tokens}",
    )
    require(
        call.layout.packed or shape.value_dim == head_dim,
        op,
        "key and value have the same shape",
        f"D of {head_dim} and {shape.value_dim}",
    )


def _require_packed_dims(call: Call, shape: Shape) -> None:
    op, dims = call.op, (shape.head_dim, shape.value_dim)
    found = f"{call.input_layout}: D of {dims[0]}, of value {dims[1]}, {shape.heads} and {shape.kv_heads} heads"
    mha = shape.heads == shape.kv_heads
    if shape.roped:
        return
    small = call.flavour.second and mha
    allowed = ((128, 128), (192, 128), (192, 192), *(((64, 64),) if small else ()))
    require(
        dims in allowed,
        op,
        "packed layouts need D = 128, or 192 with a value D of 128 or 192"
        + (", or with as many K/V heads as query heads 64" if call.flavour.second else "")
        + " (512 only with query_rope and key_rope)",
        found,
    )
    require(
        dims[1] != 192 or call.layout.axes == "TND",
        op,
        "NTD and NTD_TND need a value D of 128",
        found,
    )
    require(
        dims[1] != 192 or not call.flavour.second or (mha and not call.paged),
        op,
        "a packed value D of 192 goes neither with fewer K/V heads than query heads nor with a block_table",
        found,
    )
    require(call.input_layout != "TND_NTD", op, "TND_NTD is for D = 512 with query_rope and key_rope", found)
    if call.flavour.second and mha:
        allowed_precise = (0, 1) if call.query.dtype == torch.float16 else (0,)
        require(
            call.inner_precise in allowed_precise,
            op,
            "packed, with as many K/V heads as query heads: inner_precise is 0 or 1 for float16, 0 for bfloat16",
            f"{call.inner_precise} with {call.query.dtype}",
        )
        require(
            not call.paged or call.key.dim() == 3,
            op,
            "packed, with as many K/V heads as query heads: a paged key or value is [blocks, block_size, KV_N * D]",
            f"key {tuple(call.key.shape)}",
        )


def _require_rope(call: Call, shape: Shape) -> None:
    op, query_rope, key_rope = call.op, call.query_rope, call.key_rope
    require(
        not (call.input_layout in _NEED_ROPE and not shape.roped),
        op,
        "BSH_BNSD and BSND_BNSD are for query_rope and key_rope",
        call.input_layout,
    )
    if not shape.roped:
        return
    require(
        query_rope is not None and key_rope is not None,
        op,
        "query_rope and key_rope are given both or neither",
        f"{'query_rope' if key_rope is None else 'key_rope'} alone",
    )
    assert query_rope is not None
    assert key_rope is not None
    require(shape.head_dim in (128, 512), op, "with query_rope D is 512 or 128", shape.head_dim)
    require(
        shape.value_dim == shape.head_dim, op, "with query_rope value has key's D", (shape.head_dim, shape.value_dim)
    )
    _require_rope_tensor(call, "query_rope", query_rope, call.query, shape.heads, shape.head_dim)
    _require_rope_tensor(call, "key_rope", key_rope, call.key, shape.kv_heads, shape.head_dim)
    layouts = _LATENT_LAYOUTS if shape.latent else _ROPE_LAYOUTS
    require(
        call.input_layout in layouts,
        op,
        f"with query_rope and D = {shape.head_dim} input_layout is one of {', '.join(layouts)}",
        call.input_layout,
    )
    for name, given in (("pse_shift", call.pse_shift), ("a shared prefix", call.key_prefix)):
        require(given is None, op, f"query_rope and key_rope go without {name}", f"both, D = {shape.head_dim}")
    if shape.latent:
        require(
            shape.heads in (1, 2, 4, 8, 16, 32, 64, 128) and shape.kv_heads == 1,
            op,
            "with query_rope and D = 512 there are 1, 2, 4, 8, 16, 32, 64 or 128 query heads and 1 K/V head",
            f"{shape.heads} and {shape.kv_heads}",
        )
        require(
            call.flavour.second or not call.lse,
            op,
            f"{call.flavour.lse} is not for query_rope with D = 512",
            call.lse,
        )


def _require_rope_tensor(call: Call, name: str, rope: Tensor, of: Tensor, heads: int, head_dim: int) -> None:
    expected = list(of.shape)
    expected[-1] = expected[-1] // head_dim * _ROPE_DIM
    require(
        list(rope.shape) == expected,
        call.op,
        "query_rope and key_rope have the shape of query and key, with a D of 64",
        f"{name} {tuple(rope.shape)} for {tuple(of.shape)} of {heads} heads",
    )
    require(
        rope.dtype == of.dtype and rope.is_contiguous(),
        call.op,
        "query_rope and key_rope have the dtype of query and key and are contiguous",
        f"{name} {rope.dtype} {tuple(rope.shape)} with strides {rope.stride()}",
    )


def _require_prefix(call: Call, shape: Shape) -> None:
    key, value = call.key_prefix, call.value_prefix
    require(
        (key is None) == (value is None),
        call.op,
        "key_shared_prefix and value_shared_prefix are given both or neither",
        "one of them",
    )
    if key is None or value is None:
        return
    require(not call.paged, call.op, "a shared prefix goes without a block_table", "both")
    require(not call.layout.packed, call.op, "a shared prefix goes without packed layouts", call.input_layout)
    for name, prefix, of in (("key_shared_prefix", key, call.key), ("value_shared_prefix", value, call.value)):
        axes = call.layout.axes
        expected = [1 if axis == "B" else size for axis, size in zip(axes, of.shape, strict=True)]
        require(
            prefix.dim() == of.dim()
            and all(axis == "S" or a == b for axis, a, b in zip(axes, prefix.shape, expected, strict=True))
            and key.shape == value.shape
            and prefix.dtype == of.dtype,
            call.op,
            "a shared prefix has B = 1, the N, D and dtype of key and value, and one S for both",
            f"{name} {prefix.dtype} {tuple(prefix.shape)} for {tuple(of.shape)}",
        )
        require(prefix.is_contiguous(), call.op, "a shared prefix is contiguous", f"{name} {prefix.stride()}")


def _require_sink(call: Call, shape: Shape) -> None:
    sink = call.sink
    if sink is None:
        return
    require(
        tuple(sink.shape) == (shape.heads,) and sink.dtype == torch.bfloat16,
        call.op,
        "learnable_sink is bfloat16, one element a query head",
        f"{sink.dtype} {tuple(sink.shape)} for {shape.heads} heads",
    )
    require(
        call.input_layout in ("TND", "NTD_TND") and shape.value_dim <= 128,
        call.op,
        "learnable_sink is for TND and NTD_TND with a value D of at most 128",
        f"{call.input_layout}, D = {shape.value_dim}",
    )
