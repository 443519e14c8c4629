"""Reference of ``npu_prompt_flash_attention``: prefill (op-plugin page of it)."""

from collections.abc import Sequence

from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import Call, Flavour, refuse
from npu_prompt_cache.sim.ops.attention_infer import infer
from npu_prompt_cache.sim.ops.registry import reference, require

__all__ = ["npu_prompt_flash_attention"]

_PROMPT = Flavour("npu_prompt_flash_attention", layouts=("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"), empty_rows=False)
_MOST_PER_TOKEN = 65535


@reference("npu_prompt_flash_attention")
def npu_prompt_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    pse_shift: Tensor | None = None,
    actual_seq_lengths: Sequence[int] | None = None,
    deq_scale1: Tensor | None = None,
    quant_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None,
    quant_offset2: Tensor | None = None,
    num_heads: int = 1,
    scale_value: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 0,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    actual_seq_lengths_kv: Sequence[int] | None = None,
    sparse_mode: int = 0,
) -> Tensor:
    """``softmax(scale_value * query @ key^T + mask) @ value``, in query's dtype; more at ``attention_infer.infer``."""
    refuse(
        _PROMPT.op,
        padding_mask=padding_mask,
        deq_scale1=deq_scale1,
        quant_scale1=quant_scale1,
        deq_scale2=deq_scale2,
        quant_scale2=quant_scale2,
        quant_offset2=quant_offset2,
    )
    together = {"BSH": query.shape[-1:].numel(), "BSND": query.shape[-2:].numel()}.get(input_layout, 0)
    require(together < _MOST_PER_TOKEN, _PROMPT.op, "with BSH and BSND N * D is less than 65535", together)
    return infer(
        Call(
            _PROMPT,
            query,
            key,
            value,
            input_layout,
            num_heads,
            num_key_value_heads,
            scale_value,
            query_lengths=actual_seq_lengths,
            kv_lengths=actual_seq_lengths_kv,
            atten_mask=atten_mask,
            sparse_mode=sparse_mode,
            pre_tokens=pre_tokens,
            next_tokens=next_tokens,
            pse_shift=pse_shift,
        )
    )[0]
