"""References of the rotary position embeddings.

Sources: the op-plugin pages of npu_rotary_mul and npu_apply_rotary_pos_emb and, for what those leave out, the pages
of the operators they call (aclnnRotaryPositionEmbedding and its Grad, aclnnApplyRotaryPosEmbV2).

The page of npu_rotary_mul says that cos and sin lie in [-1, 1]. That is not enforced: the operator only multiplies,
and scaled embeddings (YaRN) leave that range rightly.
"""

from typing import NamedTuple

import torch

from npu_prompt_cache.sim.ops.checks import (
    FLOATS,
    require_dtype,
    require_not_empty,
    require_rank,
    require_same_dtype,
    require_shape,
)
from npu_prompt_cache.sim.ops.registry import reference, require

_UNIFIED_BUFFER_BYTES = 192 * 1024  # of one vector core of Ascend910B


class _Layout(NamedTuple):
    """Where a layout has the batch and the heads, and which dimensions of cos and sin are 1 when they broadcast."""

    name: str
    batch: int | None
    heads: int
    half: tuple[tuple[int, ...], ...]
    interleave: tuple[tuple[int, ...], ...]


_LAYOUTS = (
    _Layout("BNSD", 0, 1, half=((0, 1), (1,), ()), interleave=((0, 1),)),
    _Layout("BSND", 0, 2, half=((0, 2), (2,), ()), interleave=((0, 2),)),
    _Layout("SBND", 1, 2, half=((1, 2), (2,), ()), interleave=((1, 2),)),
    _Layout("TND", None, 1, half=((1,), ()), interleave=((1,),)),
)


@reference("npu_rotary_mul")
def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``input * r1 + rotated(input) * r2``.

    Args:
        input: BNSD, BSND, SBND or TND; float16, bfloat16 or float32; D even and below 896, B and N below 1000
            (B·N, if interleaved).
        r1: the cosines, 1 where they broadcast: 11SD, B1SD or BNSD for BNSD; 1S1D, BS1D or BSND for BSND; S11D, SB1D
            or SBND for SBND; T1D or TND for TND. Interleaved: the first of each. Cast to ``input``'s dtype.
        r2: the sines, like ``r1``.
        rotary_mode: 'half' rotates by ``(-x2, x1)`` of the two halves of D, 'interleave' of its even and odd places.
        rotate: ``[D, D]``: the rotation is ``input @ rotate`` instead. Has no backward.

    Returns:
        The result, like ``input``.
    """
    op = "npu_rotary_mul"
    _require_rotary_mode(op, rotary_mode)
    _require_rotary(op, input, r1, r2, rotary_mode)
    x = input.float()
    if rotate is not None:
        require_dtype(op, "rotate", rotate, FLOATS)
        require_shape(op, "rotate", rotate, (input.shape[-1],) * 2, "[D, D]")
        rotated = x @ rotate.float()
    else:
        rotated = _rotated(x, rotary_mode)
    return (x * r1.to(input.dtype).float() + rotated * r2.to(input.dtype).float()).to(input.dtype)


@reference("npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: torch.Tensor, input: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of :func:`npu_rotary_mul` without ``rotate``.

    Args:
        grad: the gradient of the result, of ``input``'s shape; cast to its dtype.
        input: as given forward.
        r1: as given forward.
        r2: as given forward.
        rotary_mode: as given forward.

    Returns:
        The gradients of ``input``, ``r1`` and ``r2``, of their shapes and ``input``'s dtype.
    """
    op = "npu_rotary_mul_backward"
    _require_rotary_mode(op, rotary_mode)
    require_shape(op, "grad", grad, input.shape, "input.shape")
    _require_rotary(op, input, r1, r2, rotary_mode)
    dtype = input.dtype
    dy, x = grad.to(dtype).float(), input.float()
    dx = dy * r1.to(dtype).float() - _rotated(dy * r2.to(dtype).float(), rotary_mode)
    dr1 = (dy * x).sum_to_size(r1.shape)
    dr2 = (dy * _rotated(x, rotary_mode)).sum_to_size(r2.shape)
    return dx.to(dtype), dr1.to(dtype), dr2.to(dtype)


@reference("npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str = "BSND",
    rotary_mode: str = "half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates ``query`` and ``key`` in place, by the halves of D.

    Args:
        query: BSND or TND as ``layout`` says; float16, bfloat16 or float32; D 64 or 128; written.
        key: like ``query`` but for its own N; written.
        cos: ``query``'s shape with N = 1, and its dtype.
        sin: like ``cos``.
        layout: 'BSND' or 'TND': A2/A3 have no other.
        rotary_mode: 'half': A2/A3 have no other.

    Returns:
        ``query`` and ``key``.
    """
    op = "npu_apply_rotary_pos_emb"
    require(layout in ("BSND", "TND"), op, "layout is 'BSND' or 'TND' on A2/A3", repr(layout))
    require(rotary_mode == "half", op, "rotary_mode is 'half' on A2/A3", repr(rotary_mode))
    require_dtype(op, "query", query, FLOATS)
    require_same_dtype(op, query=query, key=key, cos=cos, sin=sin)
    require_not_empty(op, query=query, key=key, cos=cos, sin=sin)
    require_rank(op, f"query in layout {layout}", query, len(layout))
    require(query.shape[-1] in (64, 128), op, "the last dimension (D) of query is 64 or 128", query.shape[-1])
    leading = query.shape[:-2]
    meaning = f"[query's {', '.join(layout[:-2])}, key's N, query's D]"
    require_rank(op, f"key in layout {layout}", key, len(layout))
    require_shape(op, "key", key, (*leading, key.shape[-2], query.shape[-1]), meaning)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_shape(op, name, tensor, (*leading, 1, query.shape[-1]), f"[query's {', '.join(layout[:-2])}, 1, D]")
    _require_buffer(op, query, key)
    c, s = cos.float(), sin.float()
    for tensor in (query, key):
        x = tensor.float()
        tensor.copy_(x * c + _rotated(x, "half") * s)
    return query, key


def _require_rotary_mode(op: str, rotary_mode: str) -> None:
    # The host code's own words: op-plugin's test of this rule looks for them.
    rule = f"The rotary_mode of {op} should be half or interleave, but got {rotary_mode}"
    require(rotary_mode in ("half", "interleave"), op, rule, repr(rotary_mode))


def _require_rotary(op: str, x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str) -> None:
    """Checks x against its cosines and sines."""
    require_rank(op, "input", x, 3, 4)
    for name, tensor in (("input", x), ("r1", r1), ("r2", r2)):
        require_dtype(op, name, tensor, FLOATS)
    size = x.shape[-1]
    require(size < 896 and size % 2 == 0, op, "the last dimension (D) of input is even and below 896", size)
    require_shape(op, "r2", r2, r1.shape, "r1.shape")
    layouts = [layout for layout in _LAYOUTS if len(layout.name) == x.dim()]
    fitting = [layout for layout in layouts if _broadcasts(layout, x, r1, rotary_mode)]
    known = "; ".join(f"{', '.join(_spellings(layout, rotary_mode))} for {layout.name}" for layout in layouts)
    found = f"{tuple(r1.shape)} for {tuple(x.shape)}"
    require(bool(fitting), op, f"r1 and r2 in mode {rotary_mode!r} are {known}", found)
    limit = "B < 1000 and N < 1000" if rotary_mode == "half" else "B * N < 1000"
    within = any(_is_within(layout, x, rotary_mode) for layout in fitting)
    names = ", ".join(layout.name for layout in fitting)
    require(within, op, f"input in mode {rotary_mode!r} has {limit}", f"{tuple(x.shape)} as {names}")


def _broadcast_dimensions(layout: _Layout, rotary_mode: str) -> tuple[tuple[int, ...], ...]:
    return layout.half if rotary_mode == "half" else layout.interleave


def _broadcasts(layout: _Layout, x: torch.Tensor, r: torch.Tensor, rotary_mode: str) -> bool:
    """Whether r has one of the shapes that the layout allows for x."""
    allowed = _broadcast_dimensions(layout, rotary_mode)
    return any(r.shape == tuple(1 if d in ones else n for d, n in enumerate(x.shape)) for ones in allowed)


def _spellings(layout: _Layout, rotary_mode: str) -> list[str]:
    """The allowed shapes in the page's letters: 11SD."""
    allowed = _broadcast_dimensions(layout, rotary_mode)
    return ["".join("1" if d in ones else letter for d, letter in enumerate(layout.name)) for ones in allowed]


def _is_within(layout: _Layout, x: torch.Tensor, rotary_mode: str) -> bool:
    """Whether batch and heads are few enough."""
    batch = 1 if layout.batch is None else x.shape[layout.batch]
    heads = x.shape[layout.heads]
    return batch * heads < 1000 if rotary_mode == "interleave" else batch < 1000 and heads < 1000


def _require_buffer(op: str, query: torch.Tensor, key: torch.Tensor) -> None:
    """The heads of one token fit the vector core's buffer, by the formula of aclnnApplyRotaryPosEmbV2's page."""
    size = query.shape[-1]
    element = query.element_size()
    is_cast = query.dtype == torch.bfloat16
    row = (query.shape[-2] + key.shape[-2]) * size * (4 if is_cast else element)
    needed = 5 * row + 4 * size * element + (8 * size if is_cast else 0)
    rule = f"the heads of one token of query and key need at most {_UNIFIED_BUFFER_BYTES} bytes of the unified buffer"
    require(needed <= _UNIFIED_BUFFER_BYTES, op, rule, needed)


def _rotated(x: torch.Tensor, rotary_mode: str) -> torch.Tensor:
    """``(-x2, x1)``; its transpose, which backward needs, is its negative."""
    if rotary_mode == "half":
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((-x2, x1), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
