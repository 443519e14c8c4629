"""The attention operators called through the real torch_npu: what tests/ops cannot see of them without it."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from npu_prompt_cache.sim.ops.attention_fused import npu_fused_infer_attention_score, npu_fused_infer_attention_score_v2
from npu_prompt_cache.sim.ops.registry import RuleViolation

COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.fixture
def paged() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "query": torch.randn(6, 4, 128).half(),
        "key": torch.randn(5, 128, 256).half(),
        "value": torch.randn(5, 128, 256).half(),
        "atten_mask": COMPRESSED,
        "block_table": torch.tensor([[4, 1], [2, 0]], dtype=torch.int32),
    }


NAMES = {
    1: ("num_heads", "scale", "actual_seq_lengths", "actual_seq_lengths_kv", "softmax_lse_flag"),
    2: ("num_query_heads", "softmax_scale", "actual_seq_qlen", "actual_seq_kvlen", "return_softmax_lse"),
}


def options(version: int, kv_lengths: list[int]) -> dict[str, object]:
    named = dict(zip(NAMES[version], (4, 0.1, [5, 6], kv_lengths, True), strict=True))
    return {"num_key_value_heads": 2, "input_layout": "TND", "block_size": 128, "sparse_mode": 3, **named}


@pytest.mark.parametrize("version", [1, 2])
def test_paged_attention_on_npu_is_the_reference(paged: dict[str, torch.Tensor], version: int) -> None:
    operator = (
        torch_npu.npu_fused_infer_attention_score if version == 1 else torch_npu.npu_fused_infer_attention_score_v2
    )
    ours = npu_fused_infer_attention_score if version == 1 else npu_fused_infer_attention_score_v2
    on_npu = {name: tensor.npu() for name, tensor in paged.items()}
    expected = ours(**paged, **options(version, [200, 129]))
    found = operator(**on_npu, **options(version, [200, 129]))
    assert all(tensor.is_npu for tensor in found)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    out = [torch.zeros_like(tensor) for tensor in found]
    operator.out(**on_npu, **options(version, [200, 129]), out=out)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize("version", [1, 2])
def test_a_broken_rule_is_an_error_of_the_call(paged: dict[str, torch.Tensor], version: int) -> None:
    operator = (
        torch_npu.npu_fused_infer_attention_score if version == 1 else torch_npu.npu_fused_infer_attention_score_v2
    )
    on_npu = {name: tensor.npu() for name, tensor in paged.items()}
    with pytest.raises(RuleViolation, match="block_table has a column for each block"):
        operator(**on_npu, **options(version, [200, 329]))  # a running sum where lengths are wanted


def test_training_attention_has_gradients() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, rows, 16) for heads, rows in ((4, 5), (2, 7), (2, 7))]
    ours, theirs = [[tensor.to(device).requires_grad_() for tensor in tensors] for device in ("npu", "cpu")]
    out = torch_npu.npu_fusion_attention(*ours, head_num=4, input_layout="BNSD", scale=0.25)[0]
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, enable_gqa=True)
    torch.testing.assert_close(out.cpu(), expected)
    grad = torch.randn_like(expected)
    out.backward(grad.npu())
    expected.backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-5, atol=1e-5)
