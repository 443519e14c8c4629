"""References of ``npu_fused_infer_attention_score`` and its ``_v2``: prefill and decode in one operator.

Sources: op-plugin's pages of the two, its host code, and the wheel's kernels for the meta device (output shapes). Left
out are the quantised variants, left padding and the tree mask (``sparse_mode`` 9).
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import Call, Flavour, refuse
from npu_prompt_cache.sim.ops.attention_infer import empty_outputs, infer
from npu_prompt_cache.sim.ops.registry import reference, require

__all__ = ["npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"]

_FIRST = Flavour("npu_fused_infer_attention_score")
_SECOND = Flavour(
    "npu_fused_infer_attention_score_v2",
    heads="num_query_heads",
    query_lengths="actual_seq_qlen",
    kv_lengths="actual_seq_kvlen",
    lse="return_softmax_lse",
    second=True,
)
_TREE_MASK = 9


@reference("npu_fused_infer_attention_score")
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None,
    value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None,
    value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: Sequence[int] | None = None,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    key_rope_antiquant_scale: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """``softmax(scale * query @ key^T + mask) @ value`` and the LSE; more at ``attention_infer.infer``."""
    refuse(
        _FIRST.op,
        dequant_scale1=dequant_scale1,
        quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        key_antiquant_scale=key_antiquant_scale,
        key_antiquant_offset=key_antiquant_offset,
        value_antiquant_scale=value_antiquant_scale,
        value_antiquant_offset=value_antiquant_offset,
        query_padding_size=query_padding_size,
        kv_padding_size=kv_padding_size,
        key_rope_antiquant_scale=key_rope_antiquant_scale,
    )
    return infer(
        Call(
            _FIRST,
            query,
            key,
            value,
            input_layout,
            num_heads,
            num_key_value_heads,
            scale,
            query_lengths=actual_seq_lengths,
            kv_lengths=actual_seq_lengths_kv,
            atten_mask=atten_mask,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            pse_shift=pse_shift,
            block_table=block_table,
            block_size=block_size,
            query_rope=query_rope,
            key_rope=key_rope,
            key_prefix=key_shared_prefix,
            value_prefix=value_shared_prefix,
            prefix_lengths=actual_shared_prefix_len,
            inner_precise=inner_precise,
            lse=softmax_lse_flag,
        )
    )


@reference("npu_fused_infer_attention_score_v2")
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None,
    dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None,
    dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None,
    dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None,
    quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    query_quant_mode: int = 0,
    key_quant_mode: int = 0,
    value_quant_mode: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    query_dtype: object = None,
    key_dtype: object = None,
    value_dtype: object = None,
    query_rope_dtype: object = None,
    key_rope_dtype: object = None,
    key_shared_prefix_dtype: object = None,
    value_shared_prefix_dtype: object = None,
    dequant_scale_query_dtype: object = None,
    dequant_scale_key_dtype: object = None,
    dequant_scale_value_dtype: object = None,
    dequant_scale_key_rope_dtype: object = None,
    out_dtype: object = None,
) -> tuple[Tensor, Tensor]:
    """As the first, with a learnable sink and without shared prefix and left padding."""
    refuse(
        _SECOND.op,
        dequant_scale_query=dequant_scale_query,
        dequant_scale_key=dequant_scale_key,
        dequant_offset_key=dequant_offset_key,
        dequant_scale_value=dequant_scale_value,
        dequant_offset_value=dequant_offset_value,
        dequant_scale_key_rope=dequant_scale_key_rope,
        quant_scale_out=quant_scale_out,
        quant_offset_out=quant_offset_out,
        quant_scale_p=quant_scale_p,
        query_dtype=query_dtype,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        query_rope_dtype=query_rope_dtype,
        key_rope_dtype=key_rope_dtype,
        key_shared_prefix_dtype=key_shared_prefix_dtype,
        value_shared_prefix_dtype=value_shared_prefix_dtype,
        dequant_scale_query_dtype=dequant_scale_query_dtype,
        dequant_scale_key_dtype=dequant_scale_key_dtype,
        dequant_scale_value_dtype=dequant_scale_value_dtype,
        dequant_scale_key_rope_dtype=dequant_scale_key_rope_dtype,
        out_dtype=out_dtype,
    )
    if sparse_mode == _TREE_MASK:
        refuse(_SECOND.op, **{"sparse_mode 9 (tree mask)": sparse_mode})
    return infer(
        Call(
            _SECOND,
            query,
            key,
            value,
            input_layout,
            num_query_heads,
            num_key_value_heads,
            softmax_scale,
            query_lengths=actual_seq_qlen,
            kv_lengths=actual_seq_kvlen,
            atten_mask=atten_mask,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            pse_shift=pse_shift,
            block_table=block_table,
            block_size=block_size,
            query_rope=query_rope,
            key_rope=key_rope,
            sink=learnable_sink,
            inner_precise=inner_precise,
            lse=return_softmax_lse,
        )
    )


@reference("npu_fused_infer_attention_score.out")
def _first_out(*, workspace: Tensor | None = None, out: Sequence[Tensor], **arguments: Any) -> tuple[Tensor, Tensor]:
    wanted = arguments.get("softmax_lse_flag", False)
    return _write(_FIRST.op, npu_fused_infer_attention_score(**arguments), out, wanted)


@reference("npu_fused_infer_attention_score_v2.out")
def _second_out(*, workspace: Tensor | None = None, out: Sequence[Tensor], **arguments: Any) -> tuple[Tensor, Tensor]:
    wanted = arguments.get("return_softmax_lse", False)
    return _write(_SECOND.op, npu_fused_infer_attention_score_v2(**arguments), out, wanted)


def _write(op: str, results: tuple[Tensor, Tensor], out: Sequence[Tensor], lse: bool) -> tuple[Tensor, Tensor]:
    """Writes into ``out``; an LSE not asked for leaves its tensor as it was (aclnn page, softmaxLse)."""
    require(len(out) == 2, op, "out is a tensor for the attention and one for the LSE", f"{len(out)} tensors")
    for name, result, into in zip(("attention_out", "softmax_lse"), results, out, strict=True):
        if name == "softmax_lse" and not lse:
            continue
        require(
            into.shape == result.shape and into.dtype == result.dtype,
            op,
            f"{name} has the dtype and shape of the result, {result.dtype} {tuple(result.shape)}",
            f"{into.dtype} {tuple(into.shape)}",
        )
        into.copy_(result)
    return out[0], out[1]


@reference("_npu_fused_infer_attention_score_get_max_workspace")
@reference("_npu_fused_infer_attention_score_v2_get_max_workspace")
def _workspace(*, query: Tensor, **arguments: Any) -> Tensor:
    """The simulator needs no workspace; the device's is never empty, so neither is this."""
    return query.new_zeros(1)


@reference("_npu_fused_infer_attention_score_infer_output")
def _first_outputs(
    query: Tensor,
    value: Tensor,
    *,
    input_layout: str = "BSH",
    quant_scale2: Tensor | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_lse_flag: bool = False,
    query_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    refuse("_npu_fused_infer_attention_score_infer_output", quant_scale2=quant_scale2)
    value_dim = _value_dim(value, input_layout, block_table is not None, num_key_value_heads or num_heads)
    return empty_outputs(query, input_layout, num_heads, value_dim, softmax_lse_flag)


@reference("_npu_fused_infer_attention_score_v2_infer_output")
def _second_outputs(
    query: Tensor,
    value: Tensor,
    *,
    query_dtype: object = None,
    value_dtype: object = None,
    input_layout: str = "BSH",
    quant_scale_out: Tensor | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
    query_rope: Tensor | None = None,
    out_dtype: object = None,
) -> tuple[Tensor, Tensor]:
    op = "_npu_fused_infer_attention_score_v2_infer_output"
    refuse(op, query_dtype=query_dtype, value_dtype=value_dtype, quant_scale_out=quant_scale_out, out_dtype=out_dtype)
    value_dim = _value_dim(value, input_layout, block_table is not None, num_key_value_heads or num_query_heads)
    return empty_outputs(query, input_layout, num_query_heads, value_dim, return_softmax_lse)


def _value_dim(value: Tensor, input_layout: str, paged: bool, kv_heads: int) -> int:
    """Size of value's heads: of ``[blocks, block_size, KV_N * D]`` and of ``BSH`` all heads lie in the last axis."""
    together = value.dim() == 3 if paged else input_layout.startswith("BSH")
    return value.shape[-1] // (kv_heads if together else 1)
