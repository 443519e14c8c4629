"""References of ``npu_fusion_attention`` and ``npu_fusion_attention_grad``: attention for training.

torch_npu's own autograd formula of the first calls the second, with the row statistics and the output of the first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_prompt_cache.sim.ops.attention_call import refuse
from npu_prompt_cache.sim.ops.attention_kernel import Attended, attend, attend_backward, with_sink
from npu_prompt_cache.sim.ops.attention_layout import from_heads_first, heads_first
from npu_prompt_cache.sim.ops.attention_training import Training, training
from npu_prompt_cache.sim.ops.registry import reference, require

__all__ = ["npu_fusion_attention", "npu_fusion_attention_grad"]

_FORWARD = "npu_fusion_attention"
_BACKWARD = "npu_fusion_attention_grad"
# The device repeats each statistic to fill a 32-byte block.
_REPEATS = 8


@reference(_FORWARD)
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """``softmax(scale * (query @ key^T + pse), masked) @ value``.

    Returns:
        The output in query's layout and dtype; the greatest score and the sum of ``exp(score - greatest)`` of each
        row, float32, 8 times each, ``[B, N, S, 8]`` or with TND ``[T, N, 8]`` (its elements in the order of
        ``[N, S, 8]`` within each request, unless ``softmax_layout`` is TND); an empty tensor; ``seed``, ``offset``
        and the number of scores, which only dropout uses.
    """
    refuse(_FORWARD, dropout_mask=dropout_mask)
    call = training(
        _FORWARD,
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=pse,
        padding_mask=padding_mask,
        atten_mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )
    out = call.query.new_zeros(*call.query.shape[:-1], call.value.shape[-1])
    maximum, total = (call.query.new_zeros(call.query.shape[:-1], dtype=torch.float32) for _ in range(2))
    scores = 0
    for request, (rows, columns) in enumerate(call.spans):
        attended = attend(
            call.part(call.query, request, rows),
            call.part(call.key, request, columns),
            call.part(call.value, request, columns),
            scale,
            hidden=call.hidden(request),
            bias=call.bias(request),
        )
        attended = attended if sink is None else with_sink(attended, sink)
        for into, part in zip((out, maximum, total), attended, strict=True):
            call.part(into, request, rows).copy_(part)
        scores += head_num * (rows.stop - rows.start) * (columns.stop - columns.start)
    stats = [_repeated(call, each, softmax_layout) for each in (maximum, total)]
    return from_heads_first(out, call.layout), stats[0], stats[1], query.new_empty(0), seed, offset, scores


@reference(_BACKWARD)
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Gradients of query, key, value, pse (None without one) and sink (empty without one), given ``dy`` of the output.

    ``softmax_max``, ``softmax_sum`` and ``attention_in`` are what the forward operator returned.
    """
    call = training(
        _BACKWARD,
        query,
        key,
        value,
        head_num,
        input_layout,
        pse=pse,
        padding_mask=padding_mask,
        atten_mask=atten_mask,
        scale=scale_value,
        keep_prob=keep_prob,
        pre_tockens=pre_tockens,
        next_tockens=next_tockens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
        softmax_layout=softmax_layout,
        sink=sink,
    )
    grad, whole = _of_forward(call, head_num, dy, attention_in, softmax_max, softmax_sum, softmax_layout)
    gradients = [each.new_zeros(each.shape, dtype=torch.float32) for each in (call.query, call.key, call.value)]
    of_pse = None if pse is None else pse.new_zeros(pse.shape, dtype=torch.float32)
    of_sink = query.new_zeros(0 if sink is None else head_num, dtype=torch.float32)
    for request, (rows, columns) in enumerate(call.spans):
        found = attend_backward(
            call.part(call.query, request, rows),
            call.part(call.key, request, columns),
            call.part(call.value, request, columns),
            scale_value,
            Attended(
                call.part(whole.out, request, rows),
                call.part(whole.maximum, request, rows),
                call.part(whole.total, request, rows),
            ),
            call.part(grad, request, rows),
            hidden=call.hidden(request),
            bias=call.bias(request),
            sink=sink,
        )
        for into, part, span in zip(gradients, found[:3], (rows, columns, columns), strict=True):
            call.part(into, request, span).add_(part)
        if of_pse is not None:
            into = of_pse[min(request, of_pse.shape[0] - 1)]
            into += scale_value * (found.scores.sum(1, keepdim=True) if into.shape[1] == 1 else found.scores)
        if sink is not None:
            of_sink += found.sink
    results = [from_heads_first(each, call.layout).to(query.dtype) for each in gradients]
    return results[0], results[1], results[2], None if of_pse is None else of_pse.to(query.dtype), of_sink


def _of_forward(
    call: Training,
    heads: int,
    dy: Tensor,
    attention_in: Tensor | None,
    softmax_max: Tensor | None,
    softmax_sum: Tensor | None,
    softmax_layout: str,
) -> tuple[Tensor, Attended]:
    """``dy`` and what the forward operator returned, heads first."""
    given = {"attention_in": attention_in, "softmax_max": softmax_max, "softmax_sum": softmax_sum}
    require(
        attention_in is not None and softmax_max is not None and softmax_sum is not None,
        _BACKWARD,
        "attention_in, softmax_max and softmax_sum are what the forward operator returned",
        f"no {', '.join(name for name, tensor in given.items() if tensor is None)}",
    )
    assert attention_in is not None
    assert softmax_max is not None
    assert softmax_sum is not None
    expected = from_heads_first(call.query.new_empty(*call.query.shape[:-1], call.value.shape[-1]), call.layout).shape
    for name, tensor in (("dy", dy), ("attention_in", attention_in)):
        require(tensor.shape == expected, _BACKWARD, f"{name} has the output's shape {tuple(expected)}", tensor.shape)
    out, grad = (heads_first(tensor, call.layout, heads) for tensor in (attention_in, dy))
    maximum, total = (
        _unrepeated(call, name, tensor, softmax_layout)
        for name, tensor in (("softmax_max", softmax_max), ("softmax_sum", softmax_sum))
    )
    return grad, Attended(out, maximum, total)


def _repeated(call: Training, stat: Tensor, softmax_layout: str) -> Tensor:
    """``[B, N, S]`` as ``[B, N, S, 8]``, or ``[N, T]`` as ``[T, N, 8]`` in the order that ``softmax_layout`` says."""
    if not call.packed:
        return stat[..., None].repeat(1, 1, 1, _REPEATS)
    if softmax_layout == "TND":
        return stat.T[..., None].repeat(1, 1, _REPEATS)
    heads, tokens = stat.shape
    ordered = stat.new_zeros(heads * tokens)
    for rows, _ in call.spans:
        ordered[heads * rows.start : heads * rows.stop] = stat[:, rows].flatten()
    return ordered.view(tokens, heads, 1).repeat(1, 1, _REPEATS)


def _unrepeated(call: Training, name: str, stat: Tensor, softmax_layout: str) -> Tensor:
    """The inverse of :func:`_repeated`."""
    shape = call.query.shape[:-1]
    expected = (shape[1], shape[0], _REPEATS) if call.packed else (*shape, _REPEATS)
    require(
        tuple(stat.shape) == tuple(expected) and stat.dtype == torch.float32,
        _BACKWARD,
        f"{name} is float32 {tuple(expected)}, as the forward operator returned it",
        f"{stat.dtype} {tuple(stat.shape)}",
    )
    first = stat[..., 0]
    if not call.packed:
        return first
    if softmax_layout == "TND":
        return first.T
    heads = shape[0]
    flat, ordered = first.flatten(), stat.new_zeros(shape)
    for rows, _ in call.spans:
        ordered[:, rows] = flat[heads * rows.start : heads * rows.stop].view(heads, -1)
    return ordered
