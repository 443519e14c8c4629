"""Tensors on the simulated device: views, copies, indexing, errors, autograd, threads, streams."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from npu_prompt_cache import sim
from npu_prompt_cache.sim import ops
from npu_prompt_cache.sim.ops.aliases import alias, view_of

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def x() -> Tensor:
    return X.npu()


def assert_same(got: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert got.is_npu
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert torch.equal(got.detach().cpu(), expected.detach())
    else:
        assert got == expected


def both(function: Callable[[Tensor], Any]) -> None:
    """What a function of one tensor returns is the same for the tensor on the device."""
    expected, got = function(X.clone()), function(X.npu())
    if not isinstance(expected, tuple):
        expected, got = (expected,), (got,)
    for mine, theirs in zip(got, expected, strict=True):
        assert_same(mine, theirs)


# ---- memory ----


def test_views_share_memory_and_know_their_base(x: Tensor) -> None:
    view = x.view(2, 12)[1].unsqueeze(0).transpose(0, 1)
    view.fill_(9)
    assert view._base is x
    assert x[2:].eq(9).all()
    assert x.contiguous() is x
    assert x.to("npu") is x
    assert x.reshape(6, 4).data_ptr() == x.data_ptr()
    with torch.inference_mode():
        assert x.contiguous() is x
        assert (x + 1).is_inference()
        assert torch.equal((x + 1).add_(1).cpu(), x.cpu() + 1 + 1)


def test_complex_views_keep_their_lazy_bits() -> None:
    value = torch.randn(3, 4, dtype=torch.complex64)
    for function in (
        torch.view_as_real,
        lambda v: v.conj() * 2,
        lambda v: v.real + v.imag,
        lambda v: v.conj().imag.clone(),
        lambda v: v.conj() @ v.t(),
        lambda v: torch.cat([v.conj(), v]),
        lambda v: torch.fft.ifft(torch.fft.fft(v)),
    ):
        assert_same(function(value.npu()), function(value))


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_convert_broadcast_and_keep_strides(x: Tensor, non_blocking: bool) -> None:
    options = {"non_blocking": non_blocking}
    for value in (X, X.pin_memory(), X.t(), X[:, ::2], X.expand(3, 4, 6), X[:0], X[1, 2]):
        assert_same(value.to("npu", **options), value)
        assert_same(value.to("npu", torch.float16, **options), value.half())
        arriving = value.npu().to("cpu", torch.float64, **options), x.t().to("cpu", **options)
        torch.npu.synchronize()
        assert torch.equal(arriving[0], value.double())
        assert torch.equal(arriving[1], X.t())
    target, expected = torch.zeros(8, 6, device="npu"), torch.zeros(8, 6)
    for to, source in ((target, X), (expected, X)):
        to[::2].copy_(source, **options)
        to[1::2].copy_(source.half(), **options)
        to[:, 0].copy_(source[0, 0], **options)
    assert_same(target, expected)
    back = torch.zeros(6, 8)
    back.t()[1::2].copy_(x, **options)
    torch.npu.synchronize()
    assert torch.equal(back.t()[1::2], X)


def test_copies_on_the_device_move_nothing_through_the_runtime(x: Tensor) -> None:
    other = torch.empty_like(x)
    sim.reset_counters()
    other.copy_(x)
    (x.clone() @ x.t()).softmax(-1)
    torch.zeros(3, device="npu")
    assert sum(sim.counters().copies.values()) == 0
    x.cpu()
    assert sim.counters().copy_bytes == {"H2H": 0, "H2D": 0, "D2H": X.nbytes, "D2D": 0}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's own use of it
def test_saving_copying_and_printing(x: Tensor) -> None:
    file = io.BytesIO()
    torch.save({"a": x, "b": [x[0]]}, file)
    for options, device in (({}, "npu"), ({"map_location": "cpu"}, "cpu"), ({"map_location": "npu:0"}, "npu")):
        file.seek(0)
        loaded = torch.load(file, **options)
        assert loaded["a"].device.type == device
        assert torch.equal(loaded["a"].cpu(), X)
        assert torch.equal(loaded["b"][0].cpu(), X[0])
    assert_same(pickle.loads(pickle.dumps(x)), X)
    assert_same(copy.deepcopy({"a": [x, x]})["a"][1], X)
    assert copy.deepcopy(x).data_ptr() != x.data_ptr()
    assert repr(x[:1, :2]).endswith("device='npu:0')")
    assert f"{x[0, 0]:.3f}" == f"{X[0, 0]:.3f}"
    assert x.tolist() == X.tolist()
    assert x[1, 2].item() == X[1, 2].item()
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        x.numpy()
    assert_same(torch.as_tensor(X.numpy(), device="npu"), X)


def test_storages_can_be_resized_shared_and_replaced(x: Tensor) -> None:
    parameter = torch.nn.Parameter(X.clone())
    parameter.data = parameter.data.npu()
    assert parameter.is_npu
    assert_same(torch.empty(0, device="npu").set_(x), X)
    assert_same(x.clone().resize_(2, 3), X.reshape(-1)[:6].view(2, 3))
    assert x.clone().resize_(5, 9)[0, :6].equal(x[0])
    shared = torch.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert shared.data_ptr() == x.data_ptr()
    assert_same(shared, X)


def test_small_dtypes_and_reinterpretation(x: Tensor) -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        both(lambda v, dtype=dtype: v.to(dtype).view(torch.uint8))
        both(lambda v, dtype=dtype: v.to(dtype).float())
    both(lambda v: v.view(torch.int32))
    both(lambda v: v.half().view(torch.int16))
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        assert torch.zeros(3, dtype=dtype, device="npu").tolist() == [0, 0, 0]


def test_what_begins_where_a_tensor_ends_is_no_view_of_it(x: Tensor) -> None:
    last, past = (alias(x).as_strided((1,), (1,), alias(x).storage_offset() + at) for at in (23, 24))
    assert view_of([x], last).data_ptr() == x[3, 5].data_ptr()
    assert view_of([x], past[:0]).shape == (0,)
    with pytest.raises(RuntimeError, match="none of its arguments"):
        view_of([x], past)


# ---- operators ----


def test_indexing() -> None:
    rows = torch.tensor([0, 2])

    def masked_write(v: Tensor) -> Tensor:
        v[v > 0] = 1
        v[v < 0] = v[v < 0] * 2
        return v

    def accumulated(v: Tensor) -> Tensor:
        index = torch.tensor([1, 1, 2], device=v.device)
        return torch.zeros(5, device=v.device).index_put_((index,), v[0, :3], accumulate=True)

    both(lambda v: v[v > 0])
    both(masked_write)
    both(accumulated)
    both(lambda v: v[rows])  # indices on the host
    both(lambda v: v[X > 0])
    both(lambda v: v.index_put((rows,), v.new_ones(())))
    both(lambda v: v[None, 1:3, ::2, None])
    both(lambda v: v[[0, 1], [2, 3]])
    both(lambda v: v[..., torch.tensor([1, 0], device=v.device)])
    both(lambda v: (v > 0).nonzero())


def test_a_number_of_python_is_not_a_tensor() -> None:
    both(lambda v: v + 0.1)
    both(lambda v: v.cpu().double().to(v.device) + 0.1)
    both(lambda v: (v > 0) | True)
    both(lambda v: torch.tensor(5, dtype=torch.int32, device=v.device) & 3)
    both(lambda v: torch.tensor(5, dtype=torch.int32, device=v.device).__ior__(8))
    both(lambda v: torch.where(v > 0, 1.5, v))
    both(lambda v: v.masked_fill(v > 0, torch.tensor(2.0)))
    both(lambda v: v * torch.tensor(2, dtype=torch.float64))


def test_operators_that_devices_have_and_the_cpu_has_not(x: Tensor) -> None:
    assert_same(torch.histc(torch.tensor([1, 2, 2, 5]).npu(), 4, 1, 5), torch.tensor([1, 2, 0, 1]))
    half = X.half()
    assert_same(torch.mm(half.npu(), half.t().npu(), out_dtype=torch.float32), half.float() @ half.float().t())
    with pytest.raises(RuntimeError, match="out_dtype must be float32"):
        torch.mm(x, x.t(), out_dtype=torch.float16)


def test_an_operator_that_is_not_served_names_itself_and_breaks_nothing(x: Tensor) -> None:
    assert ops.served()["npu::npu_ciou"] == "not served"
    with pytest.raises(
        NotImplementedError, match=r"npu::npu_ciou is not served.*torch\.library\.impl\('npu::npu_ciou'"
    ):
        torch.ops.npu.npu_ciou(x, x)
    assert_same(x + 1, X + 1)


def test_tensors_that_are_not_simulated_are_refused_by_the_operator_that_makes_them(x: Tensor) -> None:
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: x.to_sparse(), r"torch\.sparse_coo tensors are not simulated.*aten::_to_sparse"),
        (lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), r"torch\.qint8 .*aten::quantize_per_tensor"),
    ]
    for call, named in refused:
        with pytest.raises(NotImplementedError, match=named):
            call()


def test_tensors_on_two_kinds_of_device_are_refused(x: Tensor) -> None:
    refused: list[Callable[[], Any]] = [
        lambda: x + X,
        lambda: torch.mm(x, X.t()),
        lambda: torch.cat([x, X]),
        lambda: x.add_(X),
        lambda: X.clone().add_(x),
        lambda: torch.tensor(1.0).add_(x[0, 0]),
        lambda: torch.where(x > 0, x, X),
        lambda: F.embedding(torch.tensor([1]), x),
        lambda: x.index_select(0, torch.tensor([0])),
        lambda: x.index_put_((torch.tensor([0]),), torch.ones(1, 6)),
        lambda: F.linear(x, torch.ones(3, 6)),
        lambda: F.layer_norm(x, (6,), torch.ones(6)),
        lambda: F.scaled_dot_product_attention(x, X, X),
        lambda: torch.add(x, x, out=torch.empty(4, 6)),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="device"):
            call()
    assert_same(x, X)
    assert_same(x + torch.tensor(2.0), X + 2)


def test_out_arguments_are_resized_cast_and_may_be_read() -> None:
    def transposed_out(v: Tensor) -> Tensor:
        out = torch.empty(6, 4, device=v.device).t()
        assert torch.mul(v, 2, out=out) is out
        assert out.stride() == (1, 4)
        return out

    def aliased(v: Tensor) -> Tensor:
        return torch.add(v, v.flip(0), out=v)

    def resized(v: Tensor) -> Tensor:
        with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
            return torch.add(v, v, out=torch.ones(3, device=v.device))

    def pair(v: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = torch.empty(0, device=v.device), torch.empty(0, dtype=torch.int64, device=v.device)
        return tuple(torch.max(v, 1, out=(values, indices)))

    for function in (transposed_out, aliased, resized, pair):
        both(function)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(X.npu(), 1.5, out=torch.empty(4, 6, device="npu", dtype=torch.int64))


def test_an_out_argument_may_not_overlap_what_is_read_in_part(x: Tensor) -> None:
    line, square = x.clone().view(-1), torch.zeros(4, 4, device="npu")
    refused: list[Callable[[], Any]] = [
        lambda: torch.add(line[1:], 1, out=line[:-1]),
        lambda: torch.add(line[:-1], line[:-1], out=line[1:]),
        lambda: torch.mul(square, 2, out=square.t()),
        lambda: torch.max(line[:4], 0, out=(line[0], torch.empty((), dtype=torch.int64, device="npu"))),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            call()
    assert_same(line, X.view(-1))
    assert_same(torch.add(line, 1, out=line), X.view(-1) + 1)
    assert_same(torch.add(line[:12], 1, out=line[12:]), X.view(-1)[:12] + 1 + 1)
    assert_same(torch.add(line[:0], 1, out=line[5:5]), X.view(-1)[:0])
    with pytest.raises(RuntimeError, match="written-to tensor refers to a single memory location"):
        torch.add(line[:4], 1, out=line[:1].expand(4))


# ---- autograd ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "broadcast", "gqa"])
def test_attention_has_the_output_and_gradient_of_the_cpu(mask: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = 2 if mask == "gqa" else 4
    inputs = [torch.randn(2, count, 5, 8, dtype=dtype) for count in (4, heads, heads)]
    options: dict[str, Any] = {"is_causal": mask == "causal", "enable_gqa": mask == "gqa"}
    masks = {
        "bool": (torch.rand(2, 1, 5, 5) > 0.3) | torch.eye(5, dtype=torch.bool),
        "float": torch.randn(2, 4, 5, 5).to(dtype),
        "broadcast": torch.ones(5, 5, dtype=torch.bool).tril(),
    }
    found = []
    for device in ("cpu", "npu"):
        leaves = [value.detach().clone().to(device).requires_grad_() for value in inputs]
        attn_mask = masks[mask].to(device) if mask in masks else None
        output = F.scaled_dot_product_attention(*leaves, attn_mask=attn_mask, **options)
        output.square().sum().backward()
        with torch.no_grad():
            plain = F.scaled_dot_product_attention(*leaves, attn_mask=attn_mask, **options)
        found.append([output.detach().cpu(), plain.cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    for theirs, mine in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_layers_have_the_outputs_and_gradients_of_the_cpu() -> None:
    cases: list[tuple[Callable[[], torch.nn.Module], Tensor]] = [
        (lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)), X),
        (lambda: torch.nn.LayerNorm(6), X),
        (lambda: torch.nn.RMSNorm(6), X),
        (lambda: torch.nn.BatchNorm1d(6), X),
        (lambda: torch.nn.GroupNorm(2, 6), X),
        (lambda: torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 8)),
        (lambda: torch.nn.Conv1d(3, 6, 3, groups=3), torch.randn(2, 3, 8)),
    ]
    for make, value in cases:
        found = []
        for device in ("cpu", "npu"):
            torch.manual_seed(0)
            layer = make().to(device)
            leaf = value.to(device).detach().clone().requires_grad_()
            output = layer(leaf)
            output.square().sum().backward()
            tensors = [output.detach(), leaf.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
            found.append([tensor.cpu() for tensor in tensors])
        for theirs, mine in zip(*found, strict=True):
            assert torch.equal(mine, theirs), make()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it, for jvp
def test_second_derivatives_and_function_transforms() -> None:
    def second(v: Tensor) -> Tensor:
        leaf = v.clone().requires_grad_()
        (first,) = torch.autograd.grad(F.silu(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)[0]

    both(second)
    both(lambda v: torch.vmap(lambda row: row.softmax(0))(v))
    both(lambda v: torch.func.jacrev(lambda t: t @ t.t())(v))
    both(lambda v: torch.func.jvp(lambda t: (t @ t.t()).softmax(-1), (v,), (v.flip(0),)))


def test_in_place_operators_count_versions(x: Tensor) -> None:
    mask = torch.ones(3, dtype=torch.bool, device="npu")
    before = (x._version, mask._version)
    x.add_(1)
    x[0].mul_(2)
    with torch.no_grad():
        x.copy_(X)
        x.fill_diagonal_(0)
        mask |= False
    assert (x._version, mask._version) == (before[0] + 4, before[1] + 1)
    output = torch.randn(3, device="npu", requires_grad=True).exp()
    output.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_no_graph_is_made_where_none_is_asked_for(x: Tensor) -> None:
    parameter = torch.nn.Parameter(x)
    with torch.no_grad():
        assert not (parameter @ parameter.t()).requires_grad
    assert (parameter @ parameter.t()).requires_grad
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        parameter.add_(1)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_step_as_on_the_cpu(options: dict[str, bool]) -> None:
    found = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(X.to(device)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    for theirs, mine in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_gradient_scaling(x: Tensor) -> None:
    model = torch.nn.Linear(6, 3).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=8.0)
    before = model.weight.detach().clone()
    with torch.autocast("npu", dtype=torch.float16):
        loss = model(x).float().square().sum()
    scaler.scale(loss).backward()
    assert model.weight.grad.isfinite().all()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 8.0
    assert not torch.equal(model.weight, before)


# ---- programs around it ----


def test_operators_of_users(x: Tensor) -> None:
    @torch.library.custom_op("npu_prompt_cache_test::twice", mutates_args=())
    def twice(value: Tensor) -> Tensor:
        return value * 2

    @torch.library.custom_op("npu_prompt_cache_test::increase", mutates_args=("value",), device_types="npu")
    def increase(value: Tensor) -> None:
        value.add_(1)

    assert_same(twice(x), X * 2)
    increase(x)
    assert_same(x, X + 1)


def test_modes_see_the_tensors_of_the_program(x: Tensor) -> None:
    seen: list[tuple[str, bool]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((function.name(), all(arg.is_npu for arg in args if isinstance(arg, Tensor))))
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        (x @ x.t()).softmax(-1)
    assert [on_npu for _, on_npu in seen] == [True] * len(seen)
    assert "aten::matmul" in dict(seen)


def test_default_devices() -> None:
    with torch.device("npu"):
        assert torch.nn.Linear(3, 4).weight.is_npu
        assert (torch.ones(3) + torch.arange(3)).tolist() == [1, 2, 3]
        assert torch.zeros_like(torch.ones(2), device="cpu").is_cpu


def test_loaders_pin_memory() -> None:
    batches = [batch.npu(non_blocking=True) for (batch,) in DataLoader(TensorDataset(X), batch_size=2, pin_memory=True)]
    assert_same(torch.cat(batches), X)


def test_threads_compute_at_the_same_time() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(100):
                a, b = torch.randn(5, 7, generator=generator), torch.randn(7, 3, generator=generator)
                assert_same(a.npu() @ b.npu(), a @ b)
                assert_same((a.npu() > 0).sum(), (a > 0).sum())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# ---- streams ----


@pytest.mark.parametrize("seed", range(20))
def test_operators_read_what_late_copies_bring(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    side = torch.npu.Stream()
    with sim.late_streams(seed, within_calls=50):
        for _ in range(5):
            host = torch.randn(8, 8, generator=generator).pin_memory()
            found, late = torch.empty(8, 8).pin_memory(), torch.empty(8, 8).pin_memory()
            value = torch.empty(8, 8, device="npu")
            value.copy_(host, non_blocking=True)
            product = value @ value  # behind the copy in its stream
            found.copy_(product, non_blocking=True)
            product.zero_()  # behind that one
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                late.copy_(value * 3, non_blocking=True)
            torch.npu.synchronize()
            assert torch.equal(found, host @ host)
            assert torch.equal(late, host * 3)


def test_only_what_waits_on_a_device_counts_as_a_synchronisation(x: Tensor) -> None:
    mask = x > 0
    ids = torch.zeros(3, dtype=torch.int64, device="npu")

    def waits(call: Callable[[], Any]) -> int:
        torch.npu.synchronize()
        sim.reset_counters()
        call()
        return sum(count for name, count in sim.counters().calls.items() if "Synchronize" in name)

    free = [
        lambda: x @ x.t(),
        lambda: x.softmax(-1),
        lambda: x[ids],
        lambda: x.index_put_((ids,), x[:3].clone()),
        lambda: torch.multinomial(x.softmax(-1), 1),
        lambda: torch.randn(3, device="npu"),
        lambda: F.one_hot(ids, 4),
        lambda: x.repeat_interleave(2, 0),
        lambda: x.topk(2),
    ]
    waiting = [
        lambda: x[0, 0].item(),
        lambda: mask.nonzero(),
        lambda: x[mask],
        lambda: x.unique(),
        lambda: torch.equal(x, x),
        lambda: F.one_hot(ids),
        lambda: bool(mask.any()),
    ]
    assert [waits(call) for call in free] == [0] * len(free)
    assert [waits(call) for call in waiting] == [1] * len(waiting)


def test_two_devices() -> None:
    program = """
        import torch
        assert torch.ops.aten.ones([2], device=torch.device("npu:1")).tolist() == [1, 1]  # the first call of all
        assert torch.npu.current_device() == 0
        X = torch.randn(4, 6)
        zero, one = X.to("npu:0"), X.to("npu:1")
        assert (one + 1).device.index == 1 and torch.npu.current_device() == 0
        for call in (
            lambda: one + zero,
            lambda: one.add_(zero),
            lambda: torch.cat([one, zero]),
            lambda: torch.add(one, one, out=torch.empty(4, 6, device="npu:0")),
        ):
            try:
                call()
            except RuntimeError as error:
                assert "device" in str(error)
            else:
                raise AssertionError("two devices in one operator")
        assert torch.equal((zero.to("npu:1") + one).cpu(), X + X)
        assert torch.equal(zero.t().to("npu:1").cpu(), X.t())
        assert torch.equal(zero[1:3].to("npu:1").cpu(), X[1:3])
        assert torch.equal(zero.half().to("npu:1", torch.float32).cpu(), X.half().float())
        target = torch.zeros(9, 6, device="npu:1")
        target[1:9:2].copy_(zero)
        assert torch.equal(target[1::2].cpu(), X) and not target[::2].any()
        for made in (torch.zeros(3, device="npu:1"), torch.zeros_like(zero, device="npu:1"), one.new_ones(2)):
            assert made.device.index == 1
        with torch.npu.device(1):
            assert torch.zeros(3, device="npu").device.index == 1
            assert (zero + 1).device.index == 0
        leaf = one.clone().requires_grad_()
        (leaf @ leaf.t()).softmax(-1).log().sum().backward()
        assert leaf.grad.device.index == 1 and torch.npu.current_device() == 0
        torch.manual_seed(3)
        drawn = torch.randn(4, device="npu:1")
        torch.manual_seed(3)
        assert torch.equal(drawn.cpu(), torch.randn(4))
        print("all is well")
    """
    run = [sys.executable, "-m", "npu_prompt_cache.sim", "run", "--devices", "2", "--", sys.executable, "-c"]
    done = subprocess.run([*run, textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "all is well\n", done.stderr
