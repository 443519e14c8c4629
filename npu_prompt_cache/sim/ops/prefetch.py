"""Reference of npu_prefetch: a hint to the second-level cache, so nothing to compute."""

import torch

from npu_prompt_cache.sim.ops.registry import reference, require


@reference("npu_prefetch")
def npu_prefetch(input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0) -> None:
    """Checks a prefetch of up to ``max_size`` bytes of ``input``, from byte ``offset`` on; source: its op-plugin page.

    Args:
        input: the tensor to bring near; any dtype.
        dependency: what a graph would run first; without meaning in eager mode.
        max_size: bytes, above 0; past the tensor's end it stops there.
        offset: bytes, in ``[0, the tensor's bytes)``.
    """
    op = "npu_prefetch"
    size = input.numel() * input.element_size()
    # The host code's own words: op-plugin's tests of these rules look for them.
    require(max_size > 0, op, f"max_size should be greater than zero, but got {max_size}", max_size)
    require(offset >= 0, op, f"offset should not be smaller than zero, but got {offset}", offset)
    rule = f"offset out of range of tensor size, tensor size: {size}, offset: {offset}"
    require(offset < size, op, rule, f"shape {tuple(input.shape)}")
