"""Reference of the expert choice against loops, and every documented rule broken once."""

import math
from typing import Any

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops.moe import npu_moe_gating_top_k_softmax


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7)])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_of_softmax(dtype: torch.dtype, shape: tuple[int, ...], k: int) -> None:
    x = torch.randn(shape).to(dtype)
    finished = torch.rand(shape[:-1]) < 0.3
    y, experts, rows = npu_moe_gating_top_k_softmax(x, finished, k)
    assert (y.dtype, experts.dtype, rows.dtype) == (dtype, torch.int32, torch.int32)
    flat = x.double().reshape(-1, 7)
    count = len(flat)
    for r in range(count):
        e = [math.exp(v) for v in flat[r].tolist()]
        order = sorted(range(7), key=lambda i, e=e: (-e[i], i))[:k]
        done = bool(finished.flatten()[r])
        assert experts.reshape(count, k)[r].tolist() == ([7] * k if done else order)
        got = y.reshape(count, k)[r].double()
        torch.testing.assert_close(got, torch.tensor([e[i] / sum(e) for i in order]).double(), rtol=2**-7, atol=1e-6)
        assert rows.reshape(count, k)[r].tolist() == [r + j * count for j in range(k)]


def test_of_equal_experts_the_first_is_chosen() -> None:
    _, experts, _ = npu_moe_gating_top_k_softmax(torch.zeros(1, 40), None, 5)
    assert experts.tolist() == [[0, 1, 2, 3, 4]]


def call(*shape: int, **changes: Any) -> dict[str, Any]:
    return {"x": torch.zeros(shape or (4, 6)), "k": 2} | changes


RULES = {
    "1 dimension": (call(6), "x has 2 to 3 dimensions"),
    "dtype": (call(x=torch.zeros(4, 6).int()), "x is float16 or bfloat16 or float32"),
    "k 0": (call(k=0), "k is in [1, x's last dimension = 6] and at most 1024; found 0"),
    "k too high": (call(k=7), "found 7"),
    "k over 1024": (call(2, 2000, k=1025), "at most 1024; found 1025"),
    "finished's dtype": (call(finished=torch.zeros(4)), "finished is bool"),
    "finished's shape": (call(finished=torch.zeros(4, 6).bool()), "finished has shape x.shape[:-1] = (4,)"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    violates(npu_moe_gating_top_k_softmax, *RULES[rule])
