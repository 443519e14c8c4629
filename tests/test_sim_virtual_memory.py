"""The simulated runtime's address space and physical memory, mapped into each other."""

import ctypes
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p

import pytest
from acl_calls import (
    D2D,
    DEVICE,
    INVALID_DEVICE,
    INVALID_PARAM,
    MIB,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PARAM_INVALID,
    SYSTEM_DMA,
    call,
    do,
    fill_async,
    free_and_total,
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

HBM, HBM_HUGE, HBM_NORMAL, HBM_HUGE_1G, DDR = 1, 4, 5, 10, 0
ON_HOST, ON_DEVICE = 0, 1
PAGE = 2 * MIB


class Properties(ctypes.Structure):  # aclrtPhysicalMemProp
    _fields_ = [
        ("handle_type", c_int),
        ("allocation_type", c_int),
        ("attribute", c_int),
        ("device", c_uint32),
        ("location_type", c_int),
        ("reserved", c_uint64),
    ]


def properties(attribute=HBM_HUGE, device=DEVICE, location=ON_DEVICE):
    return ctypes.byref(Properties(0, 0, attribute, device, location, 0))


def reserve(size):
    return make("aclrtReserveMemAddress", c_size_t(size), 0, 0, 1)


def physical(size=PAGE, **changes):
    return make("aclrtMallocPhysical", c_size_t(size), properties(**changes), 0)


def map_in(at, handle, size=PAGE, offset=0):
    return call("aclrtMapMem", at, c_size_t(size), c_size_t(offset), handle, 0)


def mapped(pages=1):
    """A reservation with a handle of one page mapped at each of its first pages."""
    base, handles = reserve(8 * PAGE), [physical() for _ in range(pages)]
    for page, handle in enumerate(handles):
        assert map_in(base + page * PAGE, handle) == 0, message()
    return base, handles


def test_mapped_memory_is_device_memory():
    base, _ = mapped()
    assert read(base, 64) == b"\xff" * 64
    write(base, b"here")
    copy = malloc(64)
    do("aclrtMemcpy", copy, 4, base, 4, D2D)
    assert read(copy, 4) == b"here"
    assert sim.counters().copies == {"H2H": 0, "H2D": 1, "D2H": 2, "D2D": 1}


def test_an_access_may_cross_from_one_handle_into_the_next():
    base, _ = mapped(3)
    data = bytes(range(256)) * (2 * PAGE // 256)
    write(base + PAGE // 2, data)
    assert read(base + PAGE // 2, len(data)) == data


@pytest.mark.parametrize(("start", "size"), [(0, 2 * PAGE + 1), (PAGE, PAGE + 1), (2 * PAGE, 1), (7 * PAGE, 1)])
def test_an_access_to_where_nothing_is_mapped_is_refused(start, size):
    base, _ = mapped(2)
    target = malloc(4 * PAGE)
    assert call("aclrtMemcpy", target, 4 * PAGE, base + start, size, D2D) == PARAM_INVALID
    assert "reserved address space" in message() or "past the end" in message()


def test_hbm_is_taken_by_the_handle_wherever_it_is_mapped():
    free, total = free_and_total()
    handle = physical(6 * MIB)
    assert free_and_total() == (free - 6 * MIB, total)
    base = reserve(64 * PAGE)
    assert free_and_total() == (free - 6 * MIB, total)
    assert map_in(base, handle, 6 * MIB) == 0
    do("aclrtUnmapMem", base)
    assert free_and_total() == (free - 6 * MIB, total)
    do("aclrtFreePhysical", handle)
    do("aclrtReleaseMemAddress", base)
    assert free_and_total() == (free, total)
    assert sim.memory(DEVICE).live_allocations == 0


def test_physical_memory_can_run_out():
    sim.configure(hbm_bytes=8 * MIB)
    handles = [physical() for _ in range(4)]
    assert call("aclrtMallocPhysical", ctypes.byref(c_void_p()), PAGE, properties(), 0) == OUT_OF_MEMORY
    assert "0 of 8388608 bytes of HBM free" in message()
    do("aclrtFreePhysical", handles[0])
    physical()


def test_a_handle_can_be_mapped_again_and_has_forgotten_what_it_held():
    base, (handle,) = mapped()
    write(base, b"before")
    do("aclrtUnmapMem", base)
    assert map_in(base + 3 * PAGE, handle) == 0
    assert read(base + 3 * PAGE, 6) == b"\xff" * 6
    assert map_in(base, physical()) == 0


def test_addresses_that_were_unmapped_are_refused():
    base, _ = mapped()
    do("aclrtUnmapMem", base)
    assert call("aclrtMemset", base, 64, 0, 64) == PARAM_INVALID
    assert "no memory mapped in" in message()


def test_unmapping_does_not_wait_and_the_copy_is_a_violation():
    base, _ = mapped()
    on = stream()
    sim.late_streams(5, 1 << 30)
    fill_async(base, 1, 64, on)
    do("aclrtUnmapMem", base)
    assert call("aclrtSynchronizeStream", on) == SYSTEM_DMA
    assert "no memory mapped in" in sim.violations()[0]


def test_a_host_access_to_unmapped_memory_faults():
    result = run_python(
        "base = ctypes.c_void_p()\n"
        "assert acl.aclInit(None) == acl.aclrtSetDevice(0) == 0\n"
        "assert acl.aclrtReserveMemAddress(ctypes.byref(base), ctypes.c_size_t(1 << 21), 0, None, 1) == 0\n"
        "print('reserved', flush=True)\n"
        "ctypes.string_at(base, 1)\n"
    )
    assert result.stdout == "reserved\n", result.stderr
    assert result.returncode != 0


@pytest.mark.parametrize(
    ("at", "size", "offset"),
    [
        (0, PAGE // 2, 0),
        (0, PAGE, PAGE),
        (0, 2 * PAGE, 0),
        (1, PAGE, 0),
        (8 * PAGE, PAGE, 0),
        (7 * PAGE + 4096, PAGE, 0),
    ],
)
def test_a_handle_is_mapped_whole_inside_the_reservation(at, size, offset):
    base, handle = reserve(8 * PAGE), physical()
    assert map_in(base + at, handle, size, offset) == PARAM_INVALID


@pytest.mark.parametrize("at", [0, 4096, 3 * PAGE - 4096])
def test_what_is_mapped_is_not_mapped_over(at):
    base = reserve(8 * PAGE)
    assert map_in(base, physical()) == 0
    assert map_in(base + 3 * PAGE, physical()) == 0
    assert map_in(base + at, physical()) == PARAM_INVALID
    assert "mapped in already" in message()


def test_a_handle_is_at_one_place_at_a_time():
    base, (handle,) = mapped()
    assert map_in(base + PAGE, handle) == PARAM_INVALID
    assert "already" in message()


def test_what_is_in_use_is_not_given_back():
    base, (handle,) = mapped()
    assert call("aclrtFreePhysical", handle) == PARAM_INVALID
    assert call("aclrtReleaseMemAddress", base) == PARAM_INVALID
    assert call("aclrtFree", base) == PARAM_INVALID
    assert "aclrtUnmapMem" in message()
    do("aclrtUnmapMem", base)
    do("aclrtFreePhysical", handle)
    do("aclrtReleaseMemAddress", base)


def test_stale_and_foreign_names_are_refused():
    base, (handle,) = mapped()
    assert call("aclrtUnmapMem", base + PAGE) == PARAM_INVALID
    do("aclrtUnmapMem", base)
    do("aclrtFreePhysical", handle)
    do("aclrtReleaseMemAddress", base)
    assert call("aclrtUnmapMem", base) == PARAM_INVALID
    assert call("aclrtFreePhysical", handle) == PARAM_INVALID
    assert call("aclrtReleaseMemAddress", base) == PARAM_INVALID
    assert map_in(base, handle) == PARAM_INVALID


def test_addresses_can_be_reserved_without_a_device():
    result = run_python(
        "base = ctypes.c_void_p()\n"
        "assert acl.aclInit(None) == 0\n"
        "assert acl.aclrtReserveMemAddress(ctypes.byref(base), ctypes.c_size_t(512), 0, None, 1) == 0\n"
        "assert base.value % (2 << 20) == 0\n"
        "assert acl.aclrtReleaseMemAddress(base) == 0\n"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("size", "alignment", "expected", "flags"), [(0, 0, 0, 1), (PAGE, 3, 0, 1), (PAGE, 0, 4096, 1), (PAGE, 0, 0, 2)]
)
def test_wrong_reservations_are_refused(size, alignment, expected, flags):
    base = c_void_p(77)
    assert call("aclrtReserveMemAddress", ctypes.byref(base), size, alignment, expected, flags) == PARAM_INVALID
    assert base.value == 77


@pytest.mark.parametrize(
    ("size", "wrong", "code"),
    [
        (0, {}, PARAM_INVALID),
        (PAGE + 4096, {}, PARAM_INVALID),
        (PAGE, {"attribute": HBM_HUGE_1G}, PARAM_INVALID),
        (4097, {"attribute": HBM_NORMAL}, PARAM_INVALID),
        (PAGE, {"attribute": DDR}, NOT_SUPPORTED),
        (PAGE, {"location": ON_HOST}, NOT_SUPPORTED),
        (PAGE, {"device": 2}, INVALID_DEVICE),
    ],
)
def test_physical_memory_that_cannot_be_is_refused(size, wrong, code):
    assert call("aclrtMallocPhysical", ctypes.byref(c_void_p()), size, properties(**wrong), 0) == code
    assert call("aclrtMallocPhysical", ctypes.byref(c_void_p()), PAGE, 0, 0) == INVALID_PARAM
    assert sim.memory(DEVICE).live_bytes == 0


def test_small_pages_make_small_handles():
    base, handle = reserve(PAGE), physical(4096, attribute=HBM_NORMAL)
    assert map_in(base + 4096, handle, 4096) == 0
    assert read(base + 4096, 4096) == b"\xff" * 4096
    assert sim.memory(DEVICE).live_bytes == 4096


def test_resetting_the_device_gives_its_memory_back():
    base, (handle,) = mapped()
    reset_device()
    assert sim.memory(DEVICE).live_allocations == 0
    do("aclrtSetDevice", DEVICE)
    assert call("aclrtFreePhysical", handle) == PARAM_INVALID
    assert map_in(base, physical()) == 0
