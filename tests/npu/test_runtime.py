"""torch_npu's own runtime layer on the simulator: devices, memory, copies, streams, events."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from npu_prompt_cache import sim

MIB = 1 << 20
GIB = 1 << 30
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


@pytest.fixture(autouse=True)
def _on_device_0() -> Iterator[None]:
    torch.npu.set_device(0)
    yield
    torch.npu.set_device(0)
    torch.npu.synchronize()


@pytest.fixture
def late() -> Iterator[None]:
    """Asynchronous work runs long after it was submitted, unless something waits for it."""
    torch.npu.synchronize()
    with sim.late_streams(seed=5, within_calls=1 << 30):
        yield


def pattern(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.tensor(shape).prod())
    return (torch.arange(count) % 251).reshape(shape).to(dtype)


# Devices


def test_the_device_is_there() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == sim.configuration().device_count >= 2
    assert torch.npu.current_device() == 0
    assert torch.accelerator.current_accelerator() == torch.device("npu")


def test_devices_have_names_and_properties() -> None:
    for device in range(2):
        assert torch.npu.get_device_name(device) == "Ascend910B1"
        properties = torch.npu.get_device_properties(device)
        assert properties.name == "Ascend910B1"
        assert properties.total_memory == sim.configuration().hbm_bytes
        assert (properties.cube_core_num, properties.vector_core_num) == (24, 48)


def test_devices_are_set_and_left_again() -> None:
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1
        assert torch.empty(1, device="npu").device == torch.device("npu:1")
    assert torch.npu.current_device() == 0
    with pytest.raises(RuntimeError, match="device"):
        torch.npu.set_device(torch.npu.device_count())


def test_devices_reach_each_other() -> None:
    assert torch.npu.can_device_access_peer(0, 1)
    assert torch.npu.can_device_access_peer(1, 0)


# Memory


def test_memory_is_accounted() -> None:
    torch.npu.empty_cache()
    allocated, reserved = torch.npu.memory_allocated(), torch.npu.memory_reserved()
    free, total = torch.npu.mem_get_info()
    assert total == sim.configuration().hbm_bytes
    assert free == total - sim.memory(0).live_bytes
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="npu")
    assert 64 * MIB <= torch.npu.memory_allocated() - allocated <= 64 * MIB + 1024
    grown = torch.npu.memory_reserved() - reserved
    assert grown >= 64 * MIB
    assert torch.npu.mem_get_info()[0] == free - grown
    del kept
    assert torch.npu.memory_allocated() == allocated
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info() == (free, total)


def test_the_peak_is_kept() -> None:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.max_memory_allocated()
    torch.empty(32 * MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.max_memory_allocated() >= before + 32 * MIB


def test_out_of_memory_is_torchs_error_and_can_be_recovered_from() -> None:
    torch.npu.empty_cache()
    free, _ = torch.npu.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate"):
        torch.empty(free + MIB, dtype=torch.uint8, device="npu")
    assert torch.npu.mem_get_info()[0] == free
    torch.empty(GIB, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()


def test_the_cache_is_given_back_before_memory_is_out() -> None:
    torch.npu.empty_cache()
    free, _ = torch.npu.mem_get_info()
    kept = torch.empty(free // 2, dtype=torch.uint8, device="npu")
    del kept
    torch.empty(free // 4 * 3, dtype=torch.uint8, device="npu")
    torch.npu.empty_cache()


def test_new_memory_is_poisoned() -> None:
    torch.npu.empty_cache()
    assert torch.empty(40 * MIB, dtype=torch.float16, device="npu")[:100].cpu().isnan().all()


# Copies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_to_the_device_and_back_are_exact(dtype: torch.dtype) -> None:
    source = pattern(33, 7, dtype=dtype)
    there = source.to("npu")
    assert (there.device.type, there.dtype, there.shape) == ("npu", dtype, source.shape)
    assert torch.equal(there.cpu(), source)


def test_copies_are_what_they_are_counted_as() -> None:
    source = pattern(1000)
    there, other = torch.empty(1000, device="npu"), torch.empty(1000, device="npu")
    torch.npu.synchronize()
    sim.reset_counters()
    there.copy_(source)
    assert sim.counters().copy_bytes == {"H2H": 0, "H2D": 4000, "D2H": 0, "D2D": 0}
    assert torch.equal(there.cpu(), source)
    assert sim.counters().copy_bytes == {"H2H": 0, "H2D": 4000, "D2H": 4000, "D2D": 0}
    other.copy_(there)
    assert torch.equal(other.cpu(), source)
    assert sim.counters().copy_bytes["H2D"] == 4000


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_tensors_of_no_or_one_element_can_be_copied(shape: tuple[int, ...]) -> None:
    source = torch.full(shape, 3.0)
    assert torch.equal(source.npu().cpu(), source)


def test_views_can_be_copied() -> None:
    source, base = pattern(6, 8), pattern(6, 8).npu()
    for view in (lambda x: x.t(), lambda x: x[1::2, 3:], lambda x: x[:, -1], lambda x: x[2].expand(4, 8)):
        assert torch.equal(view(base).cpu(), view(source))
    base[1:3].copy_(torch.zeros(2, 8))
    source[1:3] = 0
    assert torch.equal(base.cpu(), source)


def test_pinned_memory_is_copied_without_waiting() -> None:
    source = pattern(256, 256).pin_memory()
    assert source.is_pinned()
    there, back = torch.empty(256, 256, device="npu"), torch.zeros(256, 256).pin_memory()
    torch.npu.synchronize()
    sim.reset_counters()
    there.copy_(source, non_blocking=True)
    back.copy_(there, non_blocking=True)
    assert sim.counters().synchronizations == 0
    torch.npu.synchronize()
    assert torch.equal(back, source)


def test_a_copy_that_blocks_waits() -> None:
    there = pattern(16).npu()
    sim.reset_counters()
    there.cpu()
    assert sim.counters().synchronizations >= 1


def test_devices_copy_to_each_other() -> None:
    source = pattern(300)
    first = source.to("npu:0")
    second = first.to("npu:1")
    assert second.device == torch.device("npu:1")
    third = torch.empty(300, device="npu:0")
    third.copy_(second)
    assert torch.equal(second.cpu(), source)
    assert torch.equal(third.cpu(), source)


def test_one_thread_is_not_anothers_device() -> None:
    found: list[int] = []

    def work() -> None:
        torch.npu.set_device(1)
        found.append(pattern(8).to("npu").device.index)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [1]
    assert torch.npu.current_device() == 0


# Streams and events


def test_streams_are_made_and_are_current_where_they_are_entered() -> None:
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    assert main == torch.npu.default_stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side
    assert torch.npu.current_stream() == main
    assert side.npu_stream != main.npu_stream


def test_work_on_a_stream_is_seen_after_waiting_for_it(late: None) -> None:
    side = torch.npu.Stream()
    source, there, back = pattern(64).pin_memory(), torch.empty(64, device="npu"), torch.zeros(64).pin_memory()
    with torch.npu.stream(side):
        there.copy_(source, non_blocking=True)
    torch.npu.current_stream().wait_stream(side)
    back.copy_(there, non_blocking=True)
    assert not torch.equal(back, source)
    torch.npu.current_stream().synchronize()
    assert torch.equal(back, source)


def test_streams_are_asked_whether_they_are_done(late: None) -> None:
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        torch.empty(64, device="npu").copy_(pattern(64).pin_memory(), non_blocking=True)
    assert not side.query()
    side.synchronize()
    assert side.query()


def test_an_event_is_done_when_its_stream_has_come_to_it(late: None) -> None:
    side, done = torch.npu.Stream(), torch.npu.Event()
    there, back = torch.empty(64, device="npu"), torch.zeros(64).pin_memory()
    source = pattern(64).pin_memory()
    assert done.query()  # not recorded yet
    with torch.npu.stream(side):
        there.copy_(source, non_blocking=True)
        back.copy_(there, non_blocking=True)
        done.record()
    assert not done.query()
    assert not torch.equal(back, source)
    done.synchronize()
    assert done.query()
    assert torch.equal(back, source)


def test_a_stream_waits_for_an_event(late: None) -> None:
    side, done = torch.npu.Stream(), torch.npu.Event()
    source, there = pattern(64).pin_memory(), torch.empty(64, device="npu")
    with torch.npu.stream(side):
        there.copy_(source, non_blocking=True)
        done.record()
    torch.npu.current_stream().wait_event(done)
    assert torch.equal(there.cpu(), source)
    assert done.query()


def test_time_passes_between_two_events() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    torch.empty(MIB, device="npu").copy_(torch.zeros(MIB))
    end.record()
    torch.npu.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000


def test_memory_that_a_stream_uses_is_not_handed_out_again(late: None) -> None:
    side = torch.npu.Stream()
    source, back = torch.ones(MIB).pin_memory(), torch.zeros(MIB).pin_memory()
    there = torch.empty(MIB, device="npu")
    side.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(side):
        there.copy_(source, non_blocking=True)
        back.copy_(there, non_blocking=True)
    there.record_stream(side)
    address = there.data_ptr()
    del there
    assert torch.empty(MIB, device="npu").data_ptr() != address
    side.synchronize()
    assert torch.equal(back, source)


def relay(ordered: bool) -> bool:
    """Hands data on from stream to stream, through pinned memory; whether it arrives."""
    main, sides = torch.npu.current_stream(), [torch.npu.Stream() for _ in range(3)]
    source = pattern(64)
    here, there = source.pin_memory(), torch.zeros(64, device="npu")
    kept = []
    for turn in range(6):
        side = sides[turn % 3]
        if ordered:
            side.wait_stream(main)
        with torch.npu.stream(side):
            there.copy_(here, non_blocking=True)
            here = torch.zeros(64).pin_memory()
            here.copy_(there, non_blocking=True)
        kept.append((here, there))
        there = torch.zeros(64, device="npu")
        if ordered:
            main.wait_stream(side)
    torch.npu.synchronize()
    return torch.equal(here, source)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_in_order_is_right_however_late_streams_run(seed: int) -> None:
    with sim.late_streams(seed):
        assert relay(ordered=True)


def test_what_is_in_no_order_is_wrong_with_some_seed() -> None:
    arrived = []
    for seed in range(20):
        with sim.late_streams(seed):
            arrived.append(relay(ordered=False))
    assert not all(arrived)


# Against the simulator's faults, and torch_npu's other allocator


def test_a_fault_of_the_runtime_is_torch_npus_error() -> None:
    source = pattern(16)
    there = torch.empty(16, device="npu")
    torch.npu.synchronize()
    with (
        sim.failing("aclrtMemcpy", times=None),
        sim.failing("aclrtMemcpyAsync", times=None),
        pytest.raises(RuntimeError),
    ):
        there.copy_(source)
        there.cpu()
    assert torch.equal(there.copy_(source).cpu(), source)


EXPANDABLE = """
import torch
from npu_prompt_cache import sim
parts = [torch.full((5 << 20,), float(i), device="npu") for i in range(8)]
whole = torch.zeros(40 << 20, device="npu")  # lies across the segment's handles
whole.copy_(torch.cat(parts))
assert [whole[i * (5 << 20)].item() for i in range(8)] == [float(i) for i in range(8)]
assert sim.counters().calls["aclrtMapMem"] > 8
assert sim.counters().calls["aclrtMallocAlign32"] == 0
reserved = torch.npu.memory_reserved()
del parts, whole
torch.npu.empty_cache()
assert torch.npu.memory_reserved() < reserved
assert sim.violations() == []
try:
    torch.empty(20 << 30, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError:
    print("out of memory")
print(torch.ones(1 << 20, device="npu").cpu().sum().item())
"""


def test_expandable_segments_work() -> None:
    env = {**os.environ, "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "out of memory\n1048576.0\n"), done.stderr


def test_nothing_is_left_behind() -> None:
    gc.collect()
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before = sim.memory(0)
    for _ in range(3):
        torch.empty(30 * MIB, dtype=torch.uint8, device="npu")
        torch.npu.empty_cache()
    assert sim.memory(0).live_allocations == before.live_allocations
    assert sim.memory(0).live_bytes == before.live_bytes
