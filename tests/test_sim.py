"""The simulated Ascend runtime alone, through its C interface: see acl_calls.py.

What must start before aclInit, or ends the runtime, runs in a process of its own.
"""

import ctypes
import itertools
import threading
from ctypes import c_int, c_int32, c_size_t, c_uint32, c_void_p

import pytest
from acl_calls import (
    D2D,
    D2H,
    DEFAULT,
    DEVICE,
    H2D,
    H2H,
    HOST_BUF,
    HUGE_FIRST,
    HUGE_ONLY,
    INNER_D2D,
    INTER_D2D,
    INVALID_DEVICE,
    INVALID_PARAM,
    MIB,
    NO_CONTEXT,
    NO_EVENT,
    NORMAL_ONLY,
    OUT_OF_MEMORY,
    PARAM_INVALID,
    REPEAT_INIT,
    STREAM_CONTEXT,
    SYSTEM_DMA,
    UNALIGNED,
    acl,
    call,
    copy_async,
    do,
    event,
    fill_async,
    free_and_total,
    host,
    in_thread,
    is_complete,
    is_idle,
    machine,
    make,
    malloc,
    message,
    read,
    reset_device,
    run_python,
    stream,
    write,
)

from npu_prompt_cache import sim

__all__ = ["machine"]  # every test runs on a machine of its own

# Start and end of the runtime


def test_nothing_but_the_device_count_works_before_init():
    result = run_python(
        "for name in sim.functions():\n"
        "    if name not in ('aclInit', 'aclrtGetDeviceCount'):\n"
        "        code = getattr(acl, name)(*[ctypes.c_void_p()] * 6)\n"
        "        assert code == 100001, (name, code)\n"
        "count = ctypes.c_uint32()\n"
        "assert acl.aclrtGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 1\n"
    )
    assert result.returncode == 0, result.stderr


def test_second_init_is_a_repeat():
    assert call("aclInit", 0) == REPEAT_INIT


def test_finalize_releases_everything_and_can_be_done_once():
    result = run_python(
        "p = ctypes.c_void_p()\n"
        "assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0\n"
        "assert acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(64), 0) == 0\n"
        "assert acl.aclrtMallocHost(ctypes.byref(p), ctypes.c_size_t(64)) == 0\n"
        "assert acl.aclFinalize() == 0\n"
        "assert sim.memory().live_allocations == sim.memory().live_host_allocations == 0\n"
        "assert acl.aclFinalize() == 100037\n"
        "assert acl.aclrtSetDevice(0) == 100001\n"
        "assert acl.aclInit(None) == 0\n"
    )
    assert result.returncode == 0, result.stderr


def test_forked_child_is_refused_and_the_parent_goes_on():
    result = run_python(
        "assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    codes = {getattr(acl, name)(*[ctypes.c_void_p()] * 6) for name in sim.functions()}\n"
        "    try:\n"
        "        sim.memory()\n"
        "    except RuntimeError:\n"
        "        os._exit(0 if codes == {507899} else 1)\n"
        "    os._exit(2)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert acl.aclrtSynchronizeDevice() == 0\n"
    )
    assert result.returncode == 0, result.stderr


def test_child_forked_before_init_has_a_machine_of_its_own():
    result = run_python(
        "sim.configure(device_count=3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(acl.aclInit(None) or acl.aclrtSetDevice(2))\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "assert acl.aclrtSetDevice(2) == 100001\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_fork_in_the_middle_of_another_threads_call_does_not_hang_the_child():
    result = run_python(
        "import threading\n"
        "threading.Thread(target=lambda: [acl.aclrtFree(None) for _ in iter(int, 1)], daemon=True).start()\n"
        "for _ in range(40):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(20)\n"
        "        os._exit(acl.aclInit(None))\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0\n"
        "os._exit(0)\n"
    )
    assert result.returncode == 0, result.stderr


def test_soc_is_named():
    assert acl.aclrtGetSocName() == b"Ascend910B1"


# Devices and contexts


def test_set_device_makes_it_current():
    device = c_int32()
    do("aclrtGetDevice", ctypes.byref(device))
    assert device.value == DEVICE


@pytest.mark.parametrize("device", [-1, 2])
def test_unknown_device_is_refused(device):
    assert call("aclrtSetDevice", c_int32(device)) == INVALID_DEVICE
    assert "there are 2" in message()


def test_a_thread_without_context_is_refused():
    assert in_thread(lambda: call("aclrtSynchronizeDevice")) == NO_CONTEXT


def test_a_context_can_be_set_in_another_thread():
    context = make("aclrtGetCurrentContext")
    assert in_thread(lambda: (call("aclrtSetCurrentContext", context), call("aclrtSynchronizeDevice"))) == (
        0,
        0,
    )


def test_a_context_that_is_none_is_refused():
    assert call("aclrtSetCurrentContext", 0) == INVALID_PARAM
    assert call("aclrtSetCurrentContext", 4096) == PARAM_INVALID


def test_creating_a_context_makes_it_current():
    context = make("aclrtCreateContext", DEVICE)
    assert make("aclrtGetCurrentContext") == context


def test_a_destroyed_context_cannot_be_used():
    context = make("aclrtCreateContext", DEVICE)
    do("aclrtDestroyContext", context)
    assert call("aclrtSynchronizeDevice") == NO_CONTEXT
    assert "destroyed" in message()
    assert call("aclrtDestroyContext", context) == PARAM_INVALID


def test_a_default_context_cannot_be_destroyed():
    assert call("aclrtDestroyContext", make("aclrtGetCurrentContext")) == PARAM_INVALID


def test_a_device_is_reset_when_every_set_is_undone():
    do("aclrtSetDevice", DEVICE)
    address = malloc(64)
    do("aclrtResetDevice", DEVICE)
    assert sim.memory(DEVICE).live_allocations == 1
    do("aclrtResetDevice", DEVICE)
    assert sim.memory(DEVICE) == sim.Memory(0, 0, sim.memory(DEVICE).peak_bytes, 0, 0, 0)
    assert call("aclrtResetDevice", DEVICE) == PARAM_INVALID
    do("aclrtSetDevice", DEVICE)
    assert call("aclrtFree", address) == PARAM_INVALID


def test_messages_are_kept_per_thread():
    call("aclrtFree", 0)
    assert in_thread(message) == ""
    assert message() == "aclrtFree: the address is null (error 100000)"


# HBM


@pytest.mark.parametrize(
    ("function", "size", "policy", "taken"),
    [
        ("aclrtMalloc", 1, HUGE_FIRST, 4096),
        ("aclrtMalloc", 4096 - 32, HUGE_FIRST, 4096),
        ("aclrtMalloc", 4096 - 31, HUGE_FIRST, 8192),
        ("aclrtMalloc", MIB, HUGE_FIRST, MIB + 4096),
        ("aclrtMalloc", MIB + 1, HUGE_FIRST, 2 * MIB),
        ("aclrtMalloc", 2 * MIB, HUGE_FIRST, 4 * MIB),
        ("aclrtMalloc", 2 * MIB, NORMAL_ONLY, 2 * MIB + 4096),
        ("aclrtMalloc", 1, HUGE_ONLY, 2 * MIB),
        ("aclrtMalloc", 2 * MIB, HUGE_FIRST + 3, 4 * MIB),
        ("aclrtMalloc", 1, 6, 1024 * MIB),
        ("aclrtMallocAlign32", 4096, HUGE_FIRST, 4096),
        ("aclrtMallocAlign32", 2 * MIB, HUGE_FIRST, 2 * MIB),
    ],
)
def test_hbm_is_taken_in_pages(function, size, policy, taken):
    total = free_and_total()[1]
    address = make(function, size, policy)
    assert free_and_total() == (total - taken, total)
    assert sim.memory(DEVICE).live_bytes == taken
    do("aclrtFree", address)
    assert free_and_total() == (total, total)


@pytest.mark.parametrize("attr", [1, 4, 5])
def test_hbm_attributes_give_free_and_total(attr):
    assert free_and_total(attr) == (16 << 30, 16 << 30)


@pytest.mark.parametrize("attr", [0, 2, 99])
def test_other_attributes_give_zeros(attr):
    assert free_and_total(attr) == (0, 0)


def test_huge_first_falls_back_to_small_pages():
    sim.configure(hbm_bytes=3 * MIB)
    address = malloc(2 * MIB, HUGE_FIRST)
    assert sim.memory(DEVICE).live_bytes == 2 * MIB + 4096
    do("aclrtFree", address)
    assert call("aclrtMalloc", ctypes.byref(c_void_p()), 2 * MIB, HUGE_ONLY) == OUT_OF_MEMORY


@pytest.mark.parametrize("size", [8 * MIB, 1 << 62, (1 << 64) - 1])
def test_out_of_memory_says_what_was_asked_and_changes_nothing(size):
    sim.configure(hbm_bytes=8 * MIB)
    address = c_void_p(77)
    assert call("aclrtMalloc", ctypes.byref(address), c_size_t(size), HUGE_FIRST) == OUT_OF_MEMORY
    assert address.value == 77
    assert sim.memory(DEVICE).live_bytes == 0
    assert f"{size} bytes asked" in message()
    assert f"{8 * MIB} of {8 * MIB} bytes of HBM free" in message()


@pytest.mark.parametrize(("size", "alignment"), [(1, 64), (MIB, 64), (MIB + 1, 2 * MIB), (64 * MIB, 2 * MIB)])
def test_addresses_are_aligned(size, alignment):
    assert [malloc(size) % alignment for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("target", "size", "policy"), [(0, 64, 0), (1, 0, 0), (1, 64, 8), (1, 64, c_int(-1))])
def test_wrong_allocations_are_refused(target, size, policy):
    pointer = ctypes.byref(c_void_p()) if target else 0
    assert call("aclrtMalloc", pointer, size, policy) == INVALID_PARAM


@pytest.mark.parametrize("size", [100, 40 * MIB])
def test_new_memory_is_poisoned(size):
    assert read(malloc(size), size) == b"\xff" * size


def test_poison_can_be_switched_off():
    sim.configure(poison=False)
    assert read(malloc(4096), 4096) == bytes(4096)


def test_host_memory_is_poisoned_and_accessible():
    address = make("aclrtMallocHost", 100)
    assert ctypes.string_at(address, 100) == b"\xff" * 100
    assert sim.memory().live_host_allocations == 1
    do("aclrtFreeHost", address)
    assert sim.memory().live_host_allocations == 0


def test_a_large_poisoned_allocation_takes_little_real_memory():
    result = run_python(
        "import resource\n"
        "p = ctypes.c_void_p()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0\n"
        "assert acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(8 << 30), 0) == 0\n"
        "assert ctypes.string_at(p.value + (5 << 30), 2) == b'\\xff\\xff'\n"
        "assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("size", [64, 4 * MIB])
def test_a_host_access_to_freed_memory_faults(size):
    result = run_python(
        "p = ctypes.c_void_p()\n"
        "assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0\n"
        f"assert acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t({size}), 0) == 0\n"
        "assert ctypes.string_at(p, 1) == b'\\xff' and acl.aclrtFree(p) == 0\n"
        "print('freed', flush=True)\n"
        "ctypes.string_at(p, 1)\n"
    )
    assert result.stdout == "freed\n", result.stderr
    assert result.returncode != 0


def test_freed_addresses_are_not_reused():
    seen = set()
    for _ in range(50):
        address = malloc(4096)
        do("aclrtFree", address)
        seen.add(address)
    assert len(seen) == 50


def test_double_free_is_told_from_foreign_free():
    address = malloc(64)
    do("aclrtFree", address)
    assert call("aclrtFree", address) == PARAM_INVALID
    assert "double free" in message()
    assert call("aclrtFree", 4096) == PARAM_INVALID
    assert "foreign free" in message()


def test_wrong_frees_are_refused():
    device, pinned = malloc(128), make("aclrtMallocHost", 128)
    assert call("aclrtFree", 0) == call("aclrtFreeHost", 0) == INVALID_PARAM
    for function, address, words in [
        ("aclrtFree", device + 64, "not its start"),
        ("aclrtFree", pinned, "aclrtFreeHost frees it"),
        ("aclrtFreeHost", device, "aclrtFree frees it"),
    ]:
        assert call(function, address) == PARAM_INVALID
        assert words in message()
    do("aclrtFreeHost", pinned)


def test_peak_is_kept_by_device():
    first, second = malloc(4096), malloc(4096)
    do("aclrtFree", first)
    do("aclrtFree", second)
    assert sim.memory(DEVICE).peak_bytes == 4 * 4096
    sim.reset_counters()
    assert sim.memory(DEVICE).peak_bytes == 0


# Copies


def test_copies_move_bytes_and_are_counted_by_kind():
    first, second = malloc(256), malloc(256)
    source, source_address, _ = host(bytes(range(200)))
    target, target_address, _ = host(bytes(200))
    do("aclrtMemcpy", first, 256, source_address, 200, H2D)
    do("aclrtMemcpy", second, 256, first, 100, D2D)
    do("aclrtMemcpy", target_address, 200, second, 50, D2H)
    do("aclrtMemcpy", target_address + 100, 100, source_address, 25, H2H)
    assert target.raw[:50] == source.raw[:50]
    assert sim.counters().copies == {"H2H": 1, "H2D": 1, "D2H": 1, "D2D": 1}
    assert sim.counters().copy_bytes == {"H2H": 25, "H2D": 200, "D2H": 50, "D2D": 100}


def test_default_kind_is_inferred_from_the_addresses():
    first, second = malloc(64), malloc(64)
    _keep, address, _ = host(bytes(64))
    for dst, src in [
        (first, address),
        (second, first),
        (address, second),
        (make("aclrtMallocHost", 64), address),
    ]:
        do("aclrtMemcpy", dst, 64, src, 64, DEFAULT)
    assert sim.counters().copies == {"H2H": 1, "H2D": 1, "D2H": 1, "D2D": 1}


@pytest.mark.parametrize(
    ("kind", "dst", "src"),
    [
        (wrong, dst, src)
        for (dst, src), right in {("h", "h"): H2H, ("d", "h"): H2D, ("h", "d"): D2H, ("d", "d"): D2D}.items()
        for wrong in (H2H, H2D, D2H, D2D, INNER_D2D, INTER_D2D)
        if wrong != right and not (right == D2D and wrong == INNER_D2D)
    ],
)
def test_a_kind_that_does_not_fit_the_addresses_is_refused(kind, dst, src):
    pinned = [make("aclrtMallocHost", 64), make("aclrtMallocHost", 64)]
    ends = {"d": [malloc(64), malloc(64)], "h": pinned}
    assert call("aclrtMemcpy", ends[dst][0], 64, ends[src][1], 64, kind) == PARAM_INVALID
    assert sum(sim.counters().copies.values()) == 0
    for address in pinned:
        do("aclrtFreeHost", address)


def test_a_copy_through_a_buffer_reads_its_source_when_it_is_submitted():
    device, on = malloc(64), stream()
    source, address, _ = host(b"\1" * 64)
    sim.late_streams(2, FAR)
    assert copy_async(device, address, 64, on, HOST_BUF) == 0
    source.raw = b"\2" * 64
    do("aclrtSynchronizeStream", on)
    assert read(device, 64) == b"\1" * 64
    assert sim.counters().copies["H2D"] == 1


@pytest.mark.parametrize(("kind", "code"), [(8, INVALID_PARAM), (c_int(-1), INVALID_PARAM)])
def test_other_kinds_are_refused(kind, code):
    assert call("aclrtMemcpy", malloc(64), 64, malloc(64), 64, kind) == code


def test_devices_are_told_apart():
    here = malloc(64)
    context = make("aclrtCreateContext", 0)
    there = malloc(64)
    assert call("aclrtMemcpy", there, 64, here, 64, INNER_D2D) == PARAM_INVALID
    assert call("aclrtMemcpy", there, 64, here, 64, INTER_D2D) == 0
    assert sim.memory(DEVICE).live_allocations == 1
    do("aclrtFree", there)
    do("aclrtDestroyContext", context)


@pytest.mark.parametrize(
    ("offset", "size", "dst_bytes", "words"),
    [
        (0, 101, 200, "run past the end"),
        (100, 1, 200, "run past the end"),
        (4000, 1, 200, "run past the end"),
        (64, 37, 200, "run past the end"),
        (0, 100, 99, "said to hold 99"),
        (0, 0, 100, "size is 0"),
        (0, (1 << 64) - 1, (1 << 64) - 1, "run past the end"),
    ],
)
def test_a_copy_stays_inside_one_allocation(offset, size, dst_bytes, words):
    device, _other = malloc(100), malloc(100)
    _keep, address, _ = host(bytes(256))
    code = call("aclrtMemcpy", device + offset, c_size_t(dst_bytes), address, c_size_t(size), H2D)
    assert (code, words in message()) == (PARAM_INVALID, True), message()


def test_null_ends_are_refused():
    device = malloc(64)
    assert call("aclrtMemcpy", 0, 64, device, 64, D2H) == INVALID_PARAM
    assert call("aclrtMemcpy", device, 64, 0, 64, H2D) == INVALID_PARAM


def test_freed_memory_cannot_be_copied():
    device = malloc(64)
    do("aclrtFree", device)
    _keep, address, _ = host(bytes(64))
    assert call("aclrtMemcpy", address, 64, device, 64, D2H) == PARAM_INVALID
    assert "freed" in message()


def test_host_memory_that_is_not_there_is_refused():
    assert call("aclrtMemcpy", malloc(64), 64, 4096, 64, H2D) == PARAM_INVALID
    assert "neither device memory nor mapped host memory" in message()


def test_overlapping_copies_are_refused():
    device = malloc(256)
    assert call("aclrtMemcpy", device + 64, 128, device, 128, D2D) == PARAM_INVALID
    assert call("aclrtMemcpy", device, 128, device + 64, 128, D2D) == PARAM_INVALID
    assert "overlap" in message()
    assert call("aclrtMemcpy", device + 128, 128, device, 128, D2D) == 0


@pytest.mark.parametrize(("dst", "src"), [(32, 0), (0, 32)])
def test_async_device_copies_want_64_byte_alignment(dst, src):
    first, second, on = malloc(256), malloc(256), stream()
    assert copy_async(first + dst, second + src, 64, on) == UNALIGNED
    assert call("aclrtMemcpy", first + dst, 64, second + src, 64, D2D) == 0


def test_memset_fills():
    device = malloc(100)
    do("aclrtMemset", device, 100, 7, 50)
    assert read(device, 100) == b"\7" * 50 + b"\xff" * 50
    assert call("aclrtMemset", device, 100, 7, 101) == PARAM_INVALID
    assert call("aclrtMemset", device, 101, 7, 101) == PARAM_INVALID


# Streams and events, promptly


def test_promptly_an_operation_runs_in_its_call():
    device, on, done = malloc(64), stream(), event()
    fill_async(device, 5, 64, on)
    assert read(device, 64) == b"\5" * 64
    assert not is_complete(done)
    do("aclrtRecordEvent", done, on)
    assert is_complete(done)
    assert is_idle(on)


def test_null_is_the_default_stream_of_the_context():
    device, done = malloc(64), event()
    fill_async(device, 5, 64, 0)
    do("aclrtRecordEvent", done, 0)
    do("aclrtSynchronizeStream", 0)
    assert is_complete(done)
    assert sim.memory(DEVICE).live_streams == 0
    assert call("aclrtDestroyStream", 0) == INVALID_PARAM


def test_a_stream_belongs_to_its_context():
    on, done = stream(), event()
    make("aclrtCreateContext", DEVICE)
    for function, *args in [
        ("aclrtSynchronizeStream", on),
        ("aclrtStreamQuery", on, ctypes.byref(c_int())),
        ("aclrtRecordEvent", done, on),
        ("aclrtMemsetAsync", malloc(64), 64, 0, 64, on),
        ("aclrtDestroyStream", on),
    ]:
        assert call(function, *args) == STREAM_CONTEXT, function


def test_destroyed_streams_and_events_are_refused():
    on, done = stream(), event()
    do("aclrtRecordEvent", done, on)
    assert (sim.memory(DEVICE).live_streams, sim.memory(DEVICE).live_events) == (1, 1)
    do("aclrtDestroyEvent", done)
    do("aclrtDestroyStream", on)
    assert (sim.memory(DEVICE).live_streams, sim.memory(DEVICE).live_events) == (0, 0)
    for function, *args in [
        ("aclrtSynchronizeStream", on),
        ("aclrtDestroyStream", on),
        ("aclrtDestroyStreamForce", on),
        ("aclrtQueryEventStatus", done, ctypes.byref(c_int())),
        ("aclrtStreamWaitEvent", 0, done),
        ("aclrtRecordEvent", done, 0),
        ("aclrtDestroyEvent", done),
    ]:
        assert call(function, *args) == PARAM_INVALID, function
        assert "no live" in message()


def test_new_handles_differ_from_destroyed_ones():
    old = event()
    do("aclrtDestroyEvent", old)
    assert event() != old


def test_an_event_that_was_not_recorded_cannot_be_waited_for():
    done = event()
    assert call("aclrtStreamWaitEvent", stream(), done) == PARAM_INVALID
    assert call("aclrtSynchronizeEvent", done) == PARAM_INVALID
    assert "not recorded" in message()


def test_a_reset_event_is_not_recorded():
    on, done = stream(), event()
    do("aclrtRecordEvent", done, on)
    do("aclrtResetEvent", done, on)
    assert not is_complete(done)
    assert call("aclrtSynchronizeEvent", done) == PARAM_INVALID
    do("aclrtRecordEvent", done, on)
    assert is_complete(done)


def test_an_event_is_recorded_on_its_own_device():
    done = event()
    context = make("aclrtCreateContext", 0)
    assert call("aclrtRecordEvent", done, 0) == PARAM_INVALID
    do("aclrtDestroyContext", context)


@pytest.mark.parametrize("function", ["aclrtCreateEventWithFlag", "aclrtCreateEventExWithFlag"])
def test_unknown_event_flags_are_refused(function):
    assert make(function, 8)
    assert call(function, ctypes.byref(c_void_p()), 0) == INVALID_PARAM
    assert call(function, ctypes.byref(c_void_p()), c_uint32(1 << 20)) == INVALID_PARAM


def test_unknown_stream_flags_are_refused():
    assert make("aclrtCreateStreamWithConfig", 0, 3)
    assert call("aclrtCreateStreamWithConfig", ctypes.byref(c_void_p()), 0, 1 << 20) == INVALID_PARAM


def test_events_are_finite():
    sim.configure(max_events=3)
    events = [event() for _ in range(3)]
    assert call("aclrtCreateEvent", ctypes.byref(c_void_p())) == NO_EVENT
    assert "3 of 3 events" in message()
    do("aclrtDestroyEvent", events[0])
    assert make("aclrtCreateEvent")


def test_by_default_a_device_has_65535_events():
    for _ in range(65535):
        event()
    assert call("aclrtCreateEvent", ctypes.byref(c_void_p())) == NO_EVENT


# Streams that run late. The calls a test makes count: where it must not run by itself, the horizon is far.

FAR = 1 << 30


def test_late_work_runs_at_a_synchronise_and_is_counted_then():
    device, on = malloc(64), stream()
    _keep, address, _ = host(b"\5" * 64)
    sim.late_streams(1, FAR)
    assert copy_async(device, address, 64, on, H2D) == 0
    assert not is_idle(on)
    assert read(device, 64) == b"\xff" * 64
    assert sim.counters().copies["H2D"] == 0
    do("aclrtSynchronizeStream", on)
    assert read(device, 64) == b"\5" * 64
    assert sim.counters().copies["H2D"] == 1


def test_late_work_of_one_stream_runs_in_order():
    first, second, on = malloc(64), malloc(64), stream()
    with sim.late_streams(2, 6):
        for value in range(20):
            fill_async(first, value, 64, on)
            assert copy_async(second, first, 64, on) == 0
            seen = read(first, 1)[0], read(second, 1)[0]
            assert seen[1] in (seen[0], seen[0] - 1, 255)
    assert read(second, 64) == b"\x13" * 64


def polls_until_complete(seed, within_calls):
    on, done = stream(), event()
    with sim.late_streams(seed, within_calls):
        do("aclrtRecordEvent", done, on)
        return next(count for count in itertools.count(1) if is_complete(done))


def test_late_work_runs_within_the_calls_given():
    polls = [polls_until_complete(seed, 5) for seed in range(60)]
    assert set(polls) == {1, 2, 3, 4, 5}


def test_the_same_seed_runs_the_same_way():
    assert [polls_until_complete(seed, 1000) for seed in range(5)] == [
        polls_until_complete(seed, 1000) for seed in range(5)
    ]


def test_another_seed_runs_another_way():
    assert len({polls_until_complete(seed, 1000) for seed in range(10)}) > 5


def test_a_wait_holds_its_stream_back_until_the_record_has_run():
    for seed in range(40):
        device, result = malloc(64), malloc(64)
        writer, reader, written = stream(), stream(), event()
        with sim.late_streams(seed, 7):
            fill_async(device, 1, 64, writer)
            do("aclrtRecordEvent", written, writer)
            do("aclrtStreamWaitEvent", reader, written)
            assert copy_async(result, device, 64, reader) == 0
            while not is_idle(reader):
                pass
            assert read(result, 64) == b"\1" * 64


def test_without_a_wait_streams_race():
    outcomes = set()
    for seed in range(40):
        device, result, writer, reader = malloc(64), malloc(64), stream(), stream()
        with sim.late_streams(seed, 7):
            fill_async(device, 1, 64, writer)
            assert copy_async(result, device, 64, reader) == 0
            do("aclrtSynchronizeStream", reader)
            outcomes.add(read(result, 1))
    assert outcomes == {b"\1", b"\xff"}


def test_a_synchronise_runs_what_its_waits_need_and_no_more():
    first, second = malloc(64), malloc(64)
    writer, reader, written = stream(), stream(), event()
    sim.late_streams(3, FAR)
    fill_async(first, 1, 64, writer)
    do("aclrtRecordEvent", written, writer)
    fill_async(second, 1, 64, writer)
    do("aclrtStreamWaitEvent", reader, written)
    do("aclrtSynchronizeStream", reader)
    assert (read(first, 1), read(second, 1)) == (b"\1", b"\xff")


def test_a_wait_is_for_the_record_before_it():
    device = malloc(64)
    writer, reader, written = stream(), stream(), event()
    sim.late_streams(3, FAR)
    do("aclrtRecordEvent", written, writer)
    do("aclrtStreamWaitEvent", reader, written)
    fill_async(device, 1, 64, writer)
    do("aclrtRecordEvent", written, writer)
    do("aclrtSynchronizeStream", reader)
    assert read(device, 1) == b"\xff"
    assert not is_complete(written)


def test_a_wait_is_for_the_last_record_before_it():
    device = malloc(64)
    writer, reader, written = stream(), stream(), event()
    do("aclrtRecordEvent", written, writer)
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, writer)
    do("aclrtRecordEvent", written, writer)
    do("aclrtStreamWaitEvent", reader, written)
    do("aclrtSynchronizeStream", reader)
    assert read(device, 1) == b"\1"


def test_a_queued_wait_does_not_hurry_the_record():
    def polls(seed, wait_for_it):
        on, earlier, done = stream(), event(), event()
        do("aclrtRecordEvent", earlier, on)
        with sim.late_streams(seed, 50):
            do("aclrtRecordEvent", done, on)
            do("aclrtStreamWaitEvent", 0, done if wait_for_it else earlier)
            return next(count for count in itertools.count(1) if is_complete(done))

    assert [polls(seed, True) for seed in range(30)] == [polls(seed, False) for seed in range(30)]


def test_event_synchronise_runs_up_to_the_record():
    device, on, done = malloc(64), stream(), event()
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, on)
    do("aclrtRecordEvent", done, on)
    fill_async(device, 2, 64, on)
    do("aclrtSynchronizeEvent", done)
    assert read(device, 1) == b"\1"


def test_device_synchronise_runs_every_stream():
    device, on = malloc(128), [stream(), 0]
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, on[0])
    fill_async(device + 64, 2, 64, on[1])
    do("aclrtSynchronizeDevice")
    assert read(device, 128) == b"\1" * 64 + b"\2" * 64


def test_going_back_to_prompt_runs_what_is_queued():
    device, on = malloc(64), stream()
    with sim.late_streams(4, FAR):
        fill_async(device, 1, 64, on)
    assert is_idle(on)
    assert read(device, 64) == b"\1" * 64


def test_free_does_not_wait_and_the_copy_is_a_violation():
    first, second, on, done = malloc(64), malloc(64), stream(), event()
    sim.late_streams(5, FAR)
    assert copy_async(first, second, 64, on) == 0
    do("aclrtRecordEvent", done, on)
    do("aclrtFree", first)
    assert sim.violations() == []
    assert call("aclrtSynchronizeStream", on) == SYSTEM_DMA
    assert "freed" in message()
    assert [("queued copy" in text, "freed" in text) for text in sim.violations()] == [(True, True)]
    assert is_complete(done)
    assert call("aclrtSynchronizeStream", on) == 0
    sim.clear_violations()
    assert sim.violations() == []


def test_a_violation_that_shows_at_another_call_is_kept_for_the_synchronise():
    device, on = malloc(64), stream()
    with sim.late_streams(5, FAR):
        fill_async(device, 1, 64, on)
        do("aclrtFree", device)
    assert len(sim.violations()) == 1
    assert call("aclrtFree", 0) == INVALID_PARAM
    assert call("aclrtSynchronizeDevice") == SYSTEM_DMA
    assert call("aclrtSynchronizeDevice") == 0


def test_freed_host_memory_is_a_violation_too():
    device, pinned, on = malloc(64), make("aclrtMallocHost", 64), stream()
    sim.late_streams(5, FAR)
    assert copy_async(pinned, device, 64, on, D2H) == 0
    do("aclrtFreeHost", pinned)
    assert call("aclrtSynchronizeStream", on) == SYSTEM_DMA


@pytest.mark.parametrize("queue", ["aclrtRecordEvent", "aclrtStreamWaitEvent"])
def test_an_event_destroyed_while_queued_is_a_violation(queue):
    on, other, done = stream(), stream(), make("aclrtCreateEventWithFlag", 1)
    sim.late_streams(6, FAR)
    do("aclrtRecordEvent", done, other)
    do(queue, *((done, on) if queue == "aclrtRecordEvent" else (on, done)))
    do("aclrtDestroyEvent", done)
    assert call("aclrtSynchronizeStream", on) == PARAM_INVALID
    assert "destroyed meanwhile" in sim.violations()[0]


def test_an_event_made_to_outlive_its_destruction_does_what_was_queued():
    device, result, writer, reader, written = malloc(64), malloc(64), stream(), stream(), event()
    sim.late_streams(6, FAR)
    fill_async(device, 1, 64, writer)
    do("aclrtRecordEvent", written, writer)
    do("aclrtStreamWaitEvent", reader, written)
    assert copy_async(result, device, 64, reader) == 0
    do("aclrtDestroyEvent", written)
    assert call("aclrtDestroyEvent", written) == PARAM_INVALID
    assert call("aclrtRecordEvent", written, writer) == PARAM_INVALID
    assert sim.memory(DEVICE).live_events == 1
    do("aclrtSynchronizeStream", reader)
    assert read(result, 1) == b"\1"
    assert sim.memory(DEVICE).live_events == 0
    assert sim.violations() == []


def test_dropping_a_stream_ends_events_that_were_destroyed():
    on, done = stream(), event()
    sim.late_streams(6, FAR)
    do("aclrtRecordEvent", done, on)
    do("aclrtDestroyEvent", done)
    do("aclrtDestroyStreamForce", on)
    assert sim.memory(DEVICE).live_events == 0


def test_destroying_a_stream_with_queued_work_is_a_violation():
    device, on = malloc(64), stream()
    sim.late_streams(7, FAR)
    fill_async(device, 1, 64, on)
    do("aclrtDestroyStream", on)
    assert "1 operations queued" in sim.violations()[0]
    assert read(device, 1) == b"\1"


def test_destroying_a_stream_by_force_drops_its_work():
    device, on, waiting, done = malloc(64), stream(), stream(), event()
    sim.late_streams(7, FAR)
    fill_async(device, 1, 64, on)
    do("aclrtRecordEvent", done, on)
    do("aclrtStreamWaitEvent", waiting, done)
    do("aclrtDestroyStreamForce", on)
    do("aclrtSynchronizeStream", waiting)
    assert read(device, 1) == b"\xff"
    assert sim.violations() == []


def test_resetting_a_device_waits_for_its_work():
    pinned = make("aclrtMallocHost", 64)
    device, on = malloc(64), stream()
    sim.late_streams(8, FAR)
    fill_async(device, 1, 64, on)
    assert copy_async(pinned, device, 64, on, D2H) == 0
    reset_device()
    assert ctypes.string_at(pinned, 64) == b"\1" * 64
    assert sim.violations() == []
    do("aclrtSetDevice", DEVICE)
    do("aclrtFreeHost", pinned)


# Faults and counters


@pytest.mark.parametrize("function", sim.functions())
def test_every_function_can_be_made_to_fail_without_effect(function):
    before = sim.memory()
    sim.fail(function, error=123456)
    assert call(function, *[0] * 6) == 123456
    assert message() == f"{function}: injected fault {message().split()[3]} at call 1 (error 123456)"
    assert sim.memory() == before
    assert sim.counters().calls[function] == 1


def test_a_failed_call_leaves_everything_as_it_was():
    device, on, address = malloc(64), stream(), c_void_p(77)
    with sim.failing("aclrtFree"), sim.failing("aclrtDestroyStream"), sim.failing("aclrtMalloc"):
        assert call("aclrtFree", device) == 500000
        assert call("aclrtDestroyStream", on) == 500000
        assert call("aclrtMalloc", ctypes.byref(address), 64, 0) == 500000
    assert address.value == 77
    write(device, b"still there")
    do("aclrtSynchronizeStream", on)
    assert sim.memory(DEVICE).live_allocations == 1


def outcomes(count):
    return [call("aclrtSynchronizeDevice") for _ in range(count)]


def test_a_fault_hits_one_call_counted_from_when_it_is_set():
    outcomes(3)
    sim.fail("aclrtSynchronizeDevice", call=2, error=1)
    assert outcomes(4) == [0, 1, 0, 0]


def test_a_fault_can_last():
    sim.fail("aclrtSynchronizeDevice", call=2, times=2, error=1)
    assert outcomes(5) == [0, 1, 1, 0, 0]
    sim.fail("aclrtSynchronizeDevice", call=2, times=None, error=2)
    assert outcomes(100) == [0] + [2] * 99
    sim.clear_faults()
    assert outcomes(2) == [0, 0]


def test_faults_add_up_and_the_first_decides():
    sim.fail("aclrtSynchronizeDevice", call=3, error=3)
    sim.fail("aclrtSynchronizeDevice", call=1, error=1)
    sim.fail("aclrtSynchronizeDevice", call=3, times=2, error=4)
    sim.fail("aclrtFree", error=5)
    assert outcomes(5) == [1, 0, 3, 4, 0]
    assert call("aclrtFree", 0) == 5


def test_failing_takes_back_its_own_fault_only():
    sim.fail("aclrtSynchronizeDevice", call=2, error=1)
    with sim.failing("aclrtSynchronizeDevice", times=None, error=2):
        assert outcomes(1) == [2]
    assert outcomes(2) == [1, 0]


def test_a_fault_on_an_unknown_function_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'aclrtMaloc'.*aclrtMalloc, "):
        sim.fail("aclrtMaloc")


@pytest.mark.parametrize("wrong", [{"call": 0}, {"times": 0}, {"error": 0}, {"error": 1 << 40}])
def test_a_fault_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sim.fail("aclrtFree", **wrong)


def test_calls_are_counted_failed_ones_too():
    call("aclrtFree", 0)
    do("aclrtFree", malloc(64))
    assert sim.counters().calls["aclrtFree"] == 2
    assert set(sim.counters().calls) == set(sim.functions())
    sim.reset_counters()
    assert set(sim.counters().calls.values()) == {0}


# The machine


@pytest.mark.parametrize(
    "wrong",
    [
        {"hbm_bytes": 0},
        {"hbm_bytes": 1 << 64},
        {"device_count": 0},
        {"device_count": 5000},
        {"max_events": -1},
    ],
)
def test_a_machine_that_cannot_be_is_refused(wrong):
    before = sim.configuration()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sim.configure(poison=not before.poison, **wrong)
    assert sim.configuration() == before


def test_what_is_in_use_cannot_be_taken_away():
    malloc(4 * MIB)
    with pytest.raises(ValueError, match="in use on device 1"):
        sim.configure(hbm_bytes=4 * MIB)
    with pytest.raises(ValueError, match="take away device 1"):
        sim.configure(device_count=1)


def test_devices_can_be_added():
    sim.configure(device_count=8)
    count = c_uint32()
    do("aclrtGetDeviceCount", ctypes.byref(count))
    assert count.value == 8
    assert sim.memory(7).live_bytes == 0
    with pytest.raises(ValueError, match="there are 8"):
        sim.memory(8)


@pytest.mark.parametrize("wrong", [(-1, 8), (1 << 64, 8), (0, 0)])
def test_late_streams_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"seed|within_calls"):
        sim.late_streams(*wrong)


def test_threads_share_one_machine():
    context = make("aclrtGetCurrentContext")

    def work():
        do("aclrtSetCurrentContext", context)
        on = stream()
        for value in range(200):
            device = malloc(256)
            fill_async(device, value, 256, on)
            do("aclrtSynchronizeStream", on)
            assert read(device, 256) == bytes([value]) * 256
            do("aclrtFree", device)
        do("aclrtDestroyStream", on)
        return True

    results = []
    with sim.late_streams(9):
        threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 4
    assert sim.memory(DEVICE).live_allocations == 0
    assert sim.counters().calls["aclrtFree"] == 800
