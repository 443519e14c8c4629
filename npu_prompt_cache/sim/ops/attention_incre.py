"""Reference of ``npu_incre_flash_attention``: decode, one query token a request (op-plugin page of it)."""

from collections.abc import Sequence

from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import Call, Flavour, refuse
from npu_prompt_cache.sim.ops.attention_infer import infer
from npu_prompt_cache.sim.ops.registry import reference, require

__all__ = ["npu_incre_flash_attention"]

_INCRE = Flavour(
    "npu_incre_flash_attention",
    kv_lengths="actual_seq_lengths",
    layouts=("BSH", "BNSD", "BSND"),
    contiguous=False,
    aligned=1,
)


@reference("npu_incre_flash_attention")
def npu_incre_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None,
    dequant_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    block_size: int = 0,
    inner_precise: int = 1,
) -> Tensor:
    """``softmax(scale_value * query @ key^T + mask) @ value``, in query's dtype and shape.

    Here ``actual_seq_lengths`` are those of key and value.
    """
    refuse(
        _INCRE.op,
        padding_mask=padding_mask,
        antiquant_scale=antiquant_scale,
        antiquant_offset=antiquant_offset,
        dequant_scale1=dequant_scale1,
        quant_scale1=quant_scale1,
        dequant_scale2=dequant_scale2,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
        kv_padding_size=kv_padding_size,
    )
    tokens = query.shape[2 if input_layout == "BNSD" else 1]
    require(tokens == 1, _INCRE.op, "query has one token a request: its S is 1", tokens)
    return infer(
        Call(
            _INCRE,
            query,
            key,
            value,
            input_layout,
            num_heads,
            num_key_value_heads,
            scale_value,
            kv_lengths=actual_seq_lengths,
            atten_mask=atten_mask,
            pse_shift=pse_shift,
            block_table=block_table,
            block_size=block_size,
            inner_precise=inner_precise,
        )
    )[0]
