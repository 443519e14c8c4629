"""Random numbers of the simulated device: seeds, states, threads, and who may not draw from whose sequence."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from npu_prompt_cache.sim import ops
from npu_prompt_cache.sim.ops import aten
from npu_prompt_cache.sim.ops.overrides import DRAWING

DRAWS: list[Callable[[str, Any], Tensor]] = [
    lambda device, g: torch.rand(5, generator=g, device=device),
    lambda device, g: torch.randn(5, generator=g, device=device),
    lambda device, g: torch.randint(0, 99, (5,), generator=g, device=device),
    lambda device, g: torch.randperm(9, generator=g, device=device),
    lambda device, g: torch.normal(1.0, 2.0, (4,), generator=g, device=device),
    lambda device, g: torch.empty(4, device=device).normal_(generator=g),
    lambda device, g: torch.multinomial(torch.ones(3, 20, device=device), 5, generator=g),
    lambda device, g: torch.empty(4, device=device).exponential_(generator=g),
    lambda device, g: torch.full((9,), 0.5, device=device).bernoulli(generator=g),
]
# They take no generator.
DROPS: list[Callable[[Tensor], Tensor]] = [
    torch.rand_like,
    torch.randn_like,
    lambda x: torch.randint_like(x, 99),
    lambda x: torch.randperm(9, device=x.device),
    lambda x: torch.randperm(9, device=x.device, out=torch.empty(9, dtype=torch.int64, device=x.device)),
    lambda x: torch.native_dropout(x, 0.3, True)[0],
    lambda x: torch.native_dropout(x, 0.3, True)[1],
    lambda x: F.dropout(x, 0.5),
    lambda x: F.feature_alpha_dropout(x, 0.5, training=True),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
]
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.is_npu
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.cpu(), expected)


def generator() -> torch.Generator:
    torch.npu.init()
    return torch.Generator("npu").manual_seed(4)


def python(program: str) -> str:
    """What a program prints in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


# ---- seeds ----


def test_after_seeding_the_first_numbers_are_those_of_the_cpu() -> None:
    mine, theirs = generator(), torch.Generator()
    for draw in DRAWS:
        assert_same(draw("npu", mine.manual_seed(9)), draw("cpu", theirs.manual_seed(9)))
        torch.manual_seed(5)
        expected = draw("cpu", None)
        assert_same(draw("npu", None), expected)
    for drop in DROPS:
        torch.manual_seed(5)
        expected = drop(X)
        assert_same(drop(X.npu()), expected)


def test_every_call_draws_other_numbers_and_a_seed_repeats_them() -> None:
    mine = generator()
    drawn = [torch.rand(50, generator=mine, device="npu").tolist() for _ in range(300)]
    assert len({number for numbers in drawn for number in numbers}) > 14_900  # of 15,000 with 24 bits
    mine.manual_seed(4)
    assert [torch.rand(50, generator=mine, device="npu").tolist() for _ in range(300)] == drawn
    assert 0.49 < torch.tensor(drawn).mean() < 0.51
    normal = torch.cat([torch.randn(50, generator=mine, device="npu") for _ in range(300)]).cpu()
    assert abs(normal.mean()) < 0.03
    assert abs(normal.std() - 1) < 0.03


def test_drawing_nothing_leaves_the_state() -> None:
    x = X.npu()
    state = torch.npu.get_rng_state()
    F.scaled_dot_product_attention(x[None], x[None], x[None])
    F.dropout(x, 0.5, training=False)
    torch.rand(0, device="npu")
    assert torch.equal(torch.npu.get_rng_state(), state)
    F.dropout(x, 0.5)
    assert not torch.equal(torch.npu.get_rng_state(), state)


def test_a_generator_of_the_wrong_device_is_named() -> None:
    mine = generator()
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: torch.rand(3, generator=mine), "aten::uniform_"),
        (lambda: torch.normal(0.0, 1.0, (3,), generator=mine), "aten::normal"),
        (lambda: torch.randperm(5, generator=mine, device="cpu"), "aten::randperm"),
        (lambda: torch.multinomial(torch.ones(3), 1, generator=mine), "aten::multinomial"),
    ]
    for call, operator in wrong:
        with pytest.raises(
            RuntimeError, match=f"Expected a 'cpu' device type for generator but found 'npu'.*{operator}"
        ):
            call()
    with pytest.raises(RuntimeError, match=r"Expected a 'npu' device type .* found 'cpu' .*aten::normal_"):
        torch.empty(3, device="npu").normal_(generator=torch.Generator())


# ---- states ----


def test_random_states_can_be_saved_and_restored() -> None:
    x = X.npu()
    torch.npu.manual_seed(11)
    torch.rand(3, device="npu")
    state = torch.npu.get_rng_state()
    first = [torch.rand(3, device="npu").tolist(), F.dropout(x).tolist()]
    torch.npu.set_rng_state(state)
    assert [torch.rand(3, device="npu").tolist(), F.dropout(x).tolist()] == first


def test_a_state_outlives_any_number_of_calls() -> None:
    mine, other = generator(), generator()
    torch.rand(3, generator=mine, device="npu")
    state = mine.get_state()
    expected = torch.rand(3, generator=mine, device="npu")
    for _ in range(5000):
        torch.rand(1, generator=other, device="npu")
    after = torch.rand(3, generator=mine, device="npu")
    mine.set_state(state)
    assert torch.equal(torch.rand(3, generator=mine, device="npu"), expected)
    assert torch.equal(torch.rand(3, generator=mine, device="npu"), after)


def test_a_state_goes_on_in_another_process() -> None:
    mine = generator()
    torch.rand(3, generator=mine, device="npu")
    state = mine.get_state().tolist()
    program = f"""if True:
        import torch
        torch.npu.set_rng_state(torch.tensor({state}, dtype=torch.uint8))
        print([torch.rand(3, device="npu").tolist() for _ in range(2)])
    """
    expected = [torch.rand(3, generator=mine, device="npu").tolist() for _ in range(2)]
    assert python(program) == f"{expected}\n"


def test_recomputing_draws_the_same_numbers() -> None:
    def block(value: Tensor) -> Tensor:
        return F.dropout(value) * value

    gradients = []
    for run in (block, lambda value: checkpoint(block, value, use_reentrant=False)):
        leaf = X.npu().requires_grad_()
        torch.manual_seed(1)
        run(leaf).sum().backward()
        gradients.append(leaf.grad.tolist())
    assert gradients[0] == gradients[1]


# ---- whose sequence ----


def test_the_device_never_draws_from_the_cpus_sequence() -> None:
    x, state = X.npu(), torch.get_rng_state()
    for draw in DRAWS:
        draw("npu", None)
    for drop in DROPS:
        drop(x)
        drop(x.clone().requires_grad_())
        with torch.inference_mode():
            drop(x)
    for layer in (torch.nn.LSTM, torch.nn.GRU):
        module = layer(6, 6, 2, dropout=0.5)
        state = torch.get_rng_state()  # making a layer draws
        module = module.npu()
        outputs = [module(x)[0] for _ in range(2)]
        with torch.no_grad():
            outputs += [module(x)[0] for _ in range(2)]
            sequence = torch.nn.utils.rnn.pack_sequence([x, x[:2]])
            outputs += [module(sequence)[0].data for _ in range(2)]
        assert all(not torch.equal(one, other) for one, other in zip(outputs[::2], outputs[1::2], strict=True))
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropping_out_of_attention_drops_and_scales() -> None:
    query, value = torch.zeros(1, 1, 64, 8, device="npu"), torch.ones(1, 1, 64, 8, device="npu")
    output = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    assert output[..., 0].unique().numel() > 5
    assert 0.9 < output.mean() < 1.1
    with torch.no_grad():
        assert not torch.equal(F.scaled_dot_product_attention(query, query, value, dropout_p=0.5), output)


def test_whatever_draws_is_served_with_a_generator() -> None:
    draws_nothing = {"aten::_fused_sdp_choice", "aten::_scaled_dot_product_flash_attention_for_cpu"}
    unserved = {"reference", "not served"}  # no reference draws
    found = set()
    for name, kind in ops.served().items():
        operator, _, overload = name.partition(".")
        tags = torch._C._get_operation_overload(operator, overload)[2]
        takes_one = any(a.name == "generator" for a in torch._C._get_schema(operator, overload).arguments)
        if torch.Tag.nondeterministic_seeded in tags and not takes_one and kind not in unserved:
            found.add(name)
    assert found - draws_nothing == set(DRAWING) | set(aten._DROPPING)


def test_threads_draw_on_both_devices_at_once() -> None:
    """The CPU's numbers are those of its seed, and a generator's those of its seed, whoever draws besides."""
    mine, count = generator(), 2000
    on_cpu = torch.Generator().manual_seed(3)
    expected = [torch.rand(100, generator=on_cpu).tolist() for _ in range(count)]
    mine_expected = [torch.rand(9, generator=mine, device="npu").tolist() for _ in range(count)]
    started, done, x = threading.Event(), threading.Event(), torch.ones(200_000, device="npu")
    mine_found: list[list[float]] = []

    def drop() -> None:
        while not done.is_set():
            torch.native_dropout(x, 0.5, True)
            started.set()

    def draw() -> None:
        mine.manual_seed(4)
        mine_found.extend(torch.rand(9, generator=mine, device="npu").tolist() for _ in range(count))

    threads = [threading.Thread(target=drop), threading.Thread(target=draw)]
    threads[0].start()
    started.wait()
    torch.default_generator.manual_seed(3)
    threads[1].start()
    found = [torch.rand(100).tolist() for _ in range(count)]
    threads[1].join()
    done.set()
    threads[0].join()
    assert found == expected
    assert mine_found == mine_expected
