"""npu_prefetch computes nothing; its rules."""

import pytest
import torch
from violations import violates

from npu_prompt_cache.sim.ops.prefetch import npu_prefetch


@pytest.mark.parametrize(("max_size", "offset"), [(1, 0), (128, 0), (10**9, 127)])
def test_a_prefetch_changes_nothing(max_size: int, offset: int) -> None:
    x = torch.randn(8, 8).half()
    before = x.clone()
    assert npu_prefetch(x, None, max_size, offset) is None
    assert npu_prefetch(x, x, max_size, offset) is None
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("max_size", "offset", "text"),
    [
        (0, 0, "max_size should be greater than zero, but got 0"),
        (-1, 0, "max_size should be greater than zero, but got -1"),
        (8, -1, "offset should not be smaller than zero, but got -1"),
        (8, 128, "offset out of range of tensor size, tensor size: 128, offset: 128"),
    ],
)
def test_prefetch_rules(max_size: int, offset: int, text: str) -> None:
    arguments = {"input": torch.zeros(8, 8).half(), "dependency": None, "max_size": max_size, "offset": offset}
    violates(npu_prefetch, arguments, text)
