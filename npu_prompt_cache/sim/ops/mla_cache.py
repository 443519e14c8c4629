"""Reference of npu_kv_rmsnorm_rope_cache: one step of multi-head latent attention from the projection to the cache.

Sources: its op-plugin page, and the page of aclnnKvRmsNormRopeCache for skipped indices, cos and sin that broadcast,
and the alignment of a block. RMSNorm runs on the first 512 of a token's 576 numbers, the rotation on the last 64,
taken apart into even and odd places; both in float32, rounded once.
"""

import torch

from npu_prompt_cache.sim.ops.checks import (
    require_contiguous,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_unique,
)
from npu_prompt_cache.sim.ops.registry import reference, require

_OP = "npu_kv_rmsnorm_rope_cache"
_RMS_SIZE, _ROPE_SIZE = 512, 64
_HALVES = (torch.float16, torch.bfloat16)


@reference(_OP)
def npu_kv_rmsnorm_rope_cache(
    kv: torch.Tensor,
    gamma: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    index: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    *,
    k_rope_scale: torch.Tensor | None = None,
    c_kv_scale: torch.Tensor | None = None,
    k_rope_offset: torch.Tensor | None = None,
    c_kv_offset: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    epsilon: float = 1e-5,
    cache_mode: str = "Norm",
    is_output_kv: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalises and rotates new tokens and writes them into both caches, in place.

    Args:
        kv: ``[batch, 1, seq_len, 576]``, float16 or bfloat16.
        gamma: ``[512]``, of ``kv``'s dtype.
        cos: ``[batch, 1, seq_len or 1, 64]``, of ``kv``'s dtype.
        sin: like ``cos``.
        index: int64, -1 to skip, none twice. Norm: ``[batch, seq_len]``, places in the request's own row. PA, PA_BNSD,
            PA_NZ: ``[batch * seq_len]``, slots. PA_BLK_BNSD, PA_BLK_NZ: ``[batch * ceil(seq_len / block_size)]``, the
            first slots of the blocks.
        k_cache: Norm: ``[batch, 1, cache_length, 64]``; else ``[block_num, block_size, 1, 64]``. Of ``kv``'s dtype, or
            int8 with scales. Written. The NZ modes lay a block out as ``[64 / c, block_size, c]``, c 16 or, in
            int8, 32.
        ckv_cache: the same with 512 for 64. Written.
        k_rope_scale: ``[64]`` float32: numbers are multiplied by it and rounded to int8.
        c_kv_scale: ``[512]`` float32.
        k_rope_offset: not supported by the operator.
        c_kv_offset: not supported by the operator.
        v: for models with 192 + 128 numbers a token: not on the page, not served.
        epsilon: added to the mean square.
        cache_mode: see ``index``.
        is_output_kv: whether the last two results hold the tokens; not for Norm.

    Returns:
        ``k_cache``; ``ckv_cache``; the rotated ``[batch, 1, seq_len, 64]`` and the normalised
        ``[batch, 1, seq_len, 512]`` before quantisation, of ``kv``'s dtype, all NaN unless ``is_output_kv``.
    """
    _require_served(k_rope_offset, c_kv_offset, v, cache_mode, is_output_kv)
    _require_inputs(kv, gamma, cos, sin)
    _require_caches(kv, k_cache, ckv_cache, k_rope_scale, c_kv_scale, cache_mode)
    slots = _slots(kv, index, k_cache, cache_mode)
    k_rope, c_kv = _rotated(kv, cos, sin), _normalised(kv, gamma, epsilon)
    for cache, tokens, scale in ((k_cache, k_rope, k_rope_scale), (ckv_cache, c_kv, c_kv_scale)):
        _write(cache, slots, _cached(tokens, scale, cache.dtype), cache_mode)
    if not is_output_kv:
        # The device leaves these two unwritten: nothing may depend on them.
        k_rope, c_kv = torch.full_like(k_rope, torch.nan), torch.full_like(c_kv, torch.nan)
    return k_cache, ckv_cache, k_rope.to(kv.dtype), c_kv.to(kv.dtype)


def _require_served(
    k_rope_offset: torch.Tensor | None,
    c_kv_offset: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_mode: str,
    is_output_kv: bool,
) -> None:
    modes = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
    require(cache_mode in modes, _OP, f"cache_mode is one of {', '.join(modes)}", repr(cache_mode))
    no_offsets = k_rope_offset is None and c_kv_offset is None
    require(
        no_offsets, _OP, "k_rope_offset and c_kv_offset are None (asymmetric quantisation is not supported)", "a tensor"
    )
    require(
        v is None, _OP, "v is None (the 192 + 128 layout is not on the operator's page and not simulated)", "a tensor"
    )
    require(not (is_output_kv and cache_mode == "Norm"), _OP, "is_output_kv is for the PA modes only", repr(cache_mode))


def _require_inputs(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    require_dtype(_OP, "kv", kv, _HALVES)
    require_same_dtype(_OP, kv=kv, gamma=gamma, cos=cos, sin=sin)
    require_rank(_OP, "kv", kv, 4)
    batch, _, seq_len, _ = kv.shape
    require_shape(_OP, "kv", kv, (batch, 1, seq_len, _RMS_SIZE + _ROPE_SIZE), "[batch, 1, seq_len, 576]")
    require_shape(_OP, "gamma", gamma, (_RMS_SIZE,), "[512]")
    require_rank(_OP, "cos", cos, 4)
    positions = 1 if cos.shape[2] == 1 else seq_len
    require_shape(_OP, "cos", cos, (batch, 1, positions, _ROPE_SIZE), "[batch, 1, seq_len or 1, 64]")
    require_shape(_OP, "sin", sin, cos.shape, "cos.shape")


def _require_caches(
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    ckv_cache: torch.Tensor,
    k_rope_scale: torch.Tensor | None,
    c_kv_scale: torch.Tensor | None,
    cache_mode: str,
) -> None:
    """Checks the shapes by mode and the dtypes by quantisation."""
    batch, _, seq_len, _ = kv.shape
    require_rank(_OP, "k_cache", k_cache, 4)
    if cache_mode == "Norm":
        leading, meaning = (batch, 1, k_cache.shape[2]), "[batch, 1, cache_length, "
        require(k_cache.shape[2] >= seq_len, _OP, "cache_length is at least seq_len", f"{k_cache.shape[2]} < {seq_len}")
    else:
        leading, meaning = (k_cache.shape[0], k_cache.shape[1], 1), "[block_num, block_size, 1, "
    require_shape(_OP, "k_cache", k_cache, (*leading, _ROPE_SIZE), meaning + "64]")
    require_shape(_OP, "ckv_cache", ckv_cache, (*leading, _RMS_SIZE), meaning + "512]")
    scales = (k_rope_scale, c_kv_scale)
    both = all(scale is None for scale in scales) or all(scale is not None for scale in scales)
    require(both, _OP, "k_rope_scale and c_kv_scale are given together", "one of them")
    dtype = kv.dtype if k_rope_scale is None else torch.int8
    reason = "without scales" if k_rope_scale is None else "with scales"
    for name, cache, scale in (("k_cache", k_cache, k_rope_scale), ("ckv_cache", ckv_cache, c_kv_scale)):
        require_dtype(_OP, f"{name} {reason}", cache, (dtype,))
        if scale is not None:
            require_dtype(_OP, f"the scale of {name}", scale, (torch.float32,))
            require_shape(_OP, f"the scale of {name}", scale, cache.shape[-1:], "[the cache's last dimension]")
    if cache_mode != "Norm":
        _require_blocks(k_cache, batch, seq_len)
    if cache_mode.endswith("NZ"):
        require_contiguous(_OP, k_cache=k_cache, ckv_cache=ckv_cache)


def _require_blocks(k_cache: torch.Tensor, batch: int, seq_len: int) -> None:
    """A block is a multiple of 32 bytes of single numbers, and there are enough of them."""
    block_count, block_size = k_cache.shape[:2]
    multiple = 32 // k_cache.element_size()
    rule = f"block_size is a multiple of {multiple} for a {k_cache.dtype} cache"
    require(block_size > 0 and block_size % multiple == 0, _OP, rule, block_size)
    needed = -(-seq_len // block_size) * batch
    require(
        block_count >= needed,
        _OP,
        "block_num is at least ceil(seq_len / block_size) * batch",
        f"{block_count} < {needed}",
    )


def _slots(kv: torch.Tensor, index: torch.Tensor, k_cache: torch.Tensor, cache_mode: str) -> torch.Tensor:
    """The slot of every token, ``[batch, seq_len]``, -1 to skip, counted through the whole cache."""
    batch, _, seq_len, _ = kv.shape
    require_dtype(_OP, "index", index, (torch.int64,))
    if cache_mode == "Norm":
        require_shape(_OP, "index", index, (batch, seq_len), "[batch, seq_len]")
        length = k_cache.shape[2]
        _require_index(index, length, "cache_length")
        for row in index:
            require_unique(_OP, "index holds no place of one request twice", row[row >= 0])
        return torch.where(index < 0, -1, index + torch.arange(batch)[:, None] * length)
    block_count, block_size = k_cache.shape[:2]
    per_request = -(-seq_len // block_size) if "BLK" in cache_mode else seq_len
    meaning = "[batch * ceil(seq_len / block_size)]" if "BLK" in cache_mode else "[batch * seq_len]"
    require_shape(_OP, "index", index, (batch * per_request,), meaning)
    _require_index(index, block_count * block_size, "block_num * block_size")
    require_unique(_OP, "index holds no value twice", index[index >= 0])
    index = index.view(batch, per_request)
    if "BLK" not in cache_mode:
        return index
    rule = f"index in {cache_mode} holds first slots of blocks, multiples of block_size {block_size}"
    wrong = index[(index >= 0) & (index % block_size != 0)]
    require(len(wrong) == 0, _OP, rule, wrong[:1].tolist())
    tokens = torch.arange(seq_len)
    first = index[:, tokens // block_size]
    return torch.where(first < 0, -1, first + tokens % block_size)


def _require_index(index: torch.Tensor, stop: int, meaning: str) -> None:
    wrong = index[(index < -1) | (index >= stop)]
    require(len(wrong) == 0, _OP, f"index is in [-1, {meaning} = {stop})", wrong[:1].tolist())


def _normalised(kv: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMSNorm of the first part, float32."""
    x = kv[..., :_RMS_SIZE].float()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * gamma.float()


def _rotated(kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The second part with its even places first, rotated by halves, float32."""
    x = kv[..., _RMS_SIZE:].float()
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((even, odd), dim=-1) * cos.float() + torch.cat((-odd, even), dim=-1) * sin.float()


def _cached(tokens: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The tokens as the cache holds them."""
    if scale is None:
        return tokens.to(dtype)
    return (tokens * scale).round().clamp(-128, 127).to(dtype)


def _write(cache: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor, cache_mode: str) -> None:
    """Copies ``[batch, 1, seq_len, size]`` into the slots that are not negative."""
    size = cache.shape[-1]
    kept = slots.flatten() >= 0
    slots, tokens = slots.flatten()[kept], tokens.reshape(-1, size)[kept]
    if not cache_mode.endswith("NZ"):
        rows = cache[:, 0] if cache_mode == "Norm" else cache[:, :, 0]  # [requests or blocks, slots of one, size]
        rows[slots // rows.shape[1], slots % rows.shape[1]] = tokens
        return
    block_count, block_size = cache.shape[:2]
    column = 32 // cache.element_size()
    blocks = cache.view(block_count, size // column, block_size, column)
    blocks[slots // block_size, :, slots % block_size] = tokens.view(-1, size // column, column)
