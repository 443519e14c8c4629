"""The orders of axes that torch_npu's attention operators take and give.

A letter is an axis: ``B`` requests, ``S`` tokens of a request, ``T`` tokens of all requests one after the other, ``N``
heads, ``D`` the size of a head, ``H`` = ``N * D``. Inside the simulator everything is heads first: ``[B, N, S, D]``, or
``[N, T, D]`` for the packed orders with a ``T``.
"""

from typing import NamedTuple

from torch import Tensor

__all__ = ["INFERENCE_LAYOUTS", "Layout", "from_heads_first", "heads_first"]


class Layout(NamedTuple):
    """What an ``input_layout`` means."""

    axes: str
    """Of query, and of key and value where they are not in blocks."""
    out: str
    """Of the attention's output."""

    @property
    def packed(self) -> bool:
        """Whether requests lie one after the other along ``T``."""
        return "T" in self.axes


INFERENCE_LAYOUTS = {
    name: Layout(name.partition("_")[0], name.partition("_")[2] or name)
    for name in (
        *("BSH", "BSND", "BNSD", "TND", "NTD", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD"),
        *("BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD", "NTD_TND"),
    )
}
"""What the fused inference attention serves (op-plugin page of npu_fused_infer_attention_score)."""


def heads_first(tensor: Tensor, axes: str, heads: int) -> Tensor:
    """A view of ``tensor``: ``[B, N, S, D]``, or ``[N, T, D]`` of the packed orders."""
    if "H" in axes:
        tensor = tensor.view(*tensor.shape[:-1], heads, tensor.shape[-1] // heads)
        axes = axes.replace("H", "ND")
    return tensor.permute(*(axes.index(axis) for axis in ("NTD" if "T" in axes else "BNSD")))


def from_heads_first(tensor: Tensor, axes: str) -> Tensor:
    """The inverse of :func:`heads_first`, contiguous."""
    ours = "NTD" if "T" in axes else "BNSD"
    tensor = tensor.permute(*(ours.index(axis) for axis in axes.replace("H", "ND")))
    return (tensor.flatten(-2) if "H" in axes else tensor).contiguous()
