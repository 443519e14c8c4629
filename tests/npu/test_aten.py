"""torch's own operators on the simulated device, against torch's OpInfo database: bit for bit what the CPU computes."""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from npu_prompt_cache.sim import ops
from npu_prompt_cache.sim.ops import aten, registry

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Recorded with a TorchDispatchMode around the twelve decoders of test_models.py, on the CPU and on the device, with
# eager and sdpa attention: forward with and without a mask; generate greedy, sampled (top-k, top-p, min-p, typical,
# epsilon, eta, repetition penalty, n-gram and bad-word processors) and by beam search; reorder, crop, repeat and select
# of the cache; loss, backward, gradient clipping and AdamW. These OpInfos are those that are named like one of the 157
# recorded operators or call one, and relatives that other decoders use. Operators of backward come with the gradients
# that are compared; those without an OpInfo (``_foreach_*``, ``_grouped_mm``) run in test_models.py.
NAMES = """
    _softmax_backward_data abs add addcdiv addcmul addmm all amax any arange argmax as_strided as_strided.partial_views
    baddbmm bernoulli bitwise_and bitwise_not bitwise_or bmm cat chunk clamp clamp_max clamp_min clone constant_pad_nd
    contiguous cos cumsum div.floor_rounding div.no_rounding_mode div.trunc_rounding empty_like eq exp expand fill flip
    floor_divide full full_like gather ge gt histc index_add index_copy index_fill index_put index_select isin item le
    lerp linalg.vector_norm linspace log log_softmax log_softmax.with_dtype logical_and logical_not logical_or logsumexp
    lt masked_fill masked_scatter masked_select matmul max.binary max.reduction_no_dim max.reduction_with_dim maximum
    mean min.binary min.reduction_no_dim min.reduction_with_dim minimum mm movedim mul multinomial nansum narrow
    native_dropout_backward native_layer_norm ne neg new_empty new_empty_strided new_full new_ones new_zeros
    nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding nn.functional.gelu
    nn.functional.layer_norm nn.functional.linear nn.functional.mse_loss nn.functional.nll_loss nn.functional.one_hot
    nn.functional.pad.constant nn.functional.relu nn.functional.rms_norm nn.functional.scaled_dot_product_attention
    nn.functional.silu nn.functional.softplus nn.functional.unfold nonzero normal ones ones_like outer permute pow prod
    rand_like randint randn reciprocal remainder repeat repeat_interleave reshape roll rsqrt rsub scalar_tensor scatter
    scatter_add scatter_reduce.sum select sigmoid sign sin slice softmax softmax.with_dtype sort split split.list_args
    split_with_sizes sqrt square squeeze squeeze.multiple stack std sub sum t tanh topk transpose tril triu
    unbind unflatten unfold unique unsqueeze var view where zeros zeros_like __getitem__
""".split()  # noqa: SIM905 (a list of literals is ten times as long)
# Their elements are whatever lay in memory.
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OTHER_DTYPES = (torch.int64, torch.bool)  # for an operator that takes none of the others
REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
SAMPLES = 7  # at most, of one operator and dtype

_compared: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def _report_count(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    total = sum(_compared.values())
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{total} results compared with the CPU's: {dict(_compared)}")


def infos(name: str) -> OpInfo:
    found = [info for info in op_db if info.full_name == name]
    assert len(found) == 1, name
    return found[0]


def rebuilt(value: Tensor, device: str) -> Tensor:
    """A tensor with the same storage, offset, strides and bits."""
    storage = value.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).to(device, copy=True)
    made = torch.empty(0, dtype=value.dtype, device=device)
    made.set_(raw.untyped_storage(), value.storage_offset(), value.shape, value.stride())
    return made.requires_grad_(value.requires_grad)


def on_npu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return rebuilt(value, "npu")
    return "npu" if value == "cpu" or value == torch.device("cpu") else value


def arguments(sample: SampleInput, convert: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = _pytree.tree_map(convert, ([sample.input, *sample.args], dict(sample.kwargs)))
    return args, kwargs


def cloned(value: Any) -> Any:
    return rebuilt(value, "cpu") if isinstance(value, Tensor) else value


def seeded(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def raw_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8) if flat.numel() else flat


def assert_same(got: Any, expected: Any, what: str, values: bool = True) -> None:
    """Equal structure, dtype, shape, strides and bits; where both are NaN, its payload does not matter."""
    got_leaves, got_tree = _pytree.tree_flatten(got)
    leaves, tree = _pytree.tree_flatten(expected)
    assert got_tree == tree, what
    for mine, theirs in zip(got_leaves, leaves, strict=True):
        if not isinstance(theirs, Tensor):
            assert mine == theirs or (mine != mine and theirs != theirs), what
            continue
        assert mine.device == torch.device("npu", 0), what
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), what
        assert mine.stride() == theirs.stride() or theirs.numel() == 0, what
        if values:
            assert_same_bits(mine.detach().cpu(), theirs.detach(), what)


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    if torch.equal(raw_bytes(got), raw_bytes(expected)):
        return
    assert torch.equal(got.isnan(), expected.isnan()), what
    finite = ~expected.isnan()
    assert torch.equal(raw_bytes(got[finite]), raw_bytes(expected[finite])), what


def shared_storage(result: Any, args: Any) -> list[bool]:
    """For each tensor of the result, whether it lies in the memory of an argument."""
    addresses = {leaf.untyped_storage().data_ptr() for leaf in _pytree.tree_leaves(args) if isinstance(leaf, Tensor)}
    leaves = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.numel()]
    return [leaf.untyped_storage().data_ptr() in addresses for leaf in leaves]


def compare(name: str, kind: str, function: Callable[..., Any], sample: SampleInput) -> Any:
    """Runs a sample on both; returns the device's result and its arguments, or None where the CPU refuses too."""
    args, kwargs = arguments(sample, cloned)  # samples share tensors
    npu_args, npu_kwargs = arguments(sample, on_npu)
    what = f"{name}, {kind}: {sample.summary()}"
    try:
        expected = seeded(function, args, kwargs)
    except REFUSALS:
        with pytest.raises(REFUSALS):
            seeded(function, npu_args, npu_kwargs)
        return None
    got = seeded(function, npu_args, npu_kwargs)
    assert_same(got, expected, what, values=name not in UNDEFINED)
    assert shared_storage(got, npu_args) == shared_storage(expected, args), what
    _compared[kind] += 1
    return got, expected, npu_args, args


def empty_batch(sample: SampleInput) -> SampleInput | None:
    """The sample with its first dimension, wherever it appears, cut to nothing."""
    if not isinstance(sample.input, Tensor) or sample.input.dim() == 0 or sample.input.shape[0] == 0:
        return None
    size = sample.input.shape[0]

    def cut(value: Any) -> Any:
        return value[:0] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value

    return sample.transform(cut)


def compare_out(info: OpInfo, sample: SampleInput) -> None:
    """``out=``: tensors of the right shape, and empty ones that are to be resized."""
    args, kwargs = arguments(sample, lambda value: value)
    try:
        shapes = seeded(info.op, args, kwargs)
    except REFUSALS:
        return
    tensors = [shapes] if isinstance(shapes, Tensor) else list(shapes)
    for make in (torch.empty_like, lambda like: torch.empty(0, dtype=like.dtype)):
        outs = [make(tensor) for tensor in tensors]
        npu_outs = [on_npu(out) for out in outs]
        out = outs[0] if isinstance(shapes, Tensor) else tuple(outs)
        npu_out = npu_outs[0] if isinstance(shapes, Tensor) else tuple(npu_outs)
        npu_args, npu_kwargs = arguments(sample, on_npu)
        try:
            expected = seeded(info.op, args, {**kwargs, "out": out})
        except TypeError:  # this call has no such form
            return
        got = seeded(info.op, npu_args, {**npu_kwargs, "out": npu_out})
        assert_same(
            npu_outs, outs, f"{info.full_name}, out: {sample.summary()}", values=info.full_name not in UNDEFINED
        )
        got_tensors = [got] if isinstance(got, Tensor) else list(got)
        assert all(mine is given for mine, given in zip(got_tensors, npu_outs, strict=True))
        assert isinstance(expected, Tensor) == isinstance(got, Tensor)
        _compared["out"] += 1


def compare_gradients(info: OpInfo, sample: SampleInput) -> None:
    ran = compare(info.full_name, "with gradient", info.op, sample)
    if ran is None:
        return
    got, expected, npu_args, args = ran
    losses = []
    for result in (got, expected):
        leaves = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
        losses.append(sum((leaf * leaf).sum() for leaf in leaves))
    assert isinstance(losses[0], Tensor) == isinstance(losses[1], Tensor), info.full_name
    if not isinstance(losses[0], Tensor):
        return
    for loss in losses:
        seeded(loss.backward, [], {})
    pairs = zip(_pytree.tree_leaves(npu_args), _pytree.tree_leaves(args), strict=True)
    gradients = [
        (mine.grad, theirs.grad) for mine, theirs in pairs if isinstance(theirs, Tensor) and theirs.requires_grad
    ]
    for mine, theirs in gradients:
        assert (mine is None) == (theirs is None), info.full_name
        if theirs is not None:
            assert_same_bits(mine.cpu(), theirs, f"{info.full_name}, gradient: {sample.summary()}")
    _compared["gradient"] += len(gradients)


def samples_of(info: OpInfo, dtype: torch.dtype, requires_grad: bool = False) -> list[SampleInput]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        found = list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    random.Random(0).shuffle(found)
    return found[:SAMPLES]


@pytest.mark.parametrize("name", NAMES)
def test_operator_computes_what_the_cpu_computes(name: str) -> None:
    info = infos(name)
    supported = info.supported_dtypes("cpu")
    dtypes = [dtype for dtype in DTYPES if dtype in supported] or [d for d in OTHER_DTYPES if d in supported]
    assert dtypes
    before = sum(_compared.values())
    for dtype in dtypes:
        for number, sample in enumerate(samples_of(info, dtype)):
            compare(name, "as sampled", info.op, sample)
            compare(name, "not contiguous", info.op, sample.noncontiguous())
            empty = empty_batch(sample)
            if empty is not None:
                compare(name, "empty", info.op, empty)
            if info.inplace_variant is not None:
                compare(name, "in place", info.inplace_variant, sample)
            if info.supports_out and number < 3:
                compare_out(info, sample)
        if info.supports_autograd and dtype in info.supported_backward_dtypes("cpu"):
            for sample in samples_of(info, dtype, requires_grad=True)[:3]:
                compare_gradients(info, sample)
    assert sum(_compared.values()) > before


def test_every_operator_of_torch_npu_is_of_a_known_kind() -> None:
    served = ops.served()
    kinds = Counter(served.values())
    assert set(kinds) == {"aten kernel", "kept", "not served", "reference"}
    assert kinds["aten kernel"] > 1000
    assert {name for name, kind in served.items() if kind == "kept"} == aten.KEPT | set(registry.guards())
    assert set(registry.references()) <= {name for name, kind in served.items() if kind == "reference"}


def test_references_take_the_parameters_of_their_operators() -> None:
    for name, function in registry.references().items():
        operator, _, overload = name.partition(".")
        names = [argument.name for argument in torch._C._get_schema(operator, overload).arguments]
        inspect.signature(function).bind(**dict.fromkeys(names))  # or it raises
