"""Calling the simulated runtime through its C interface, for the tests of it.

Everything happens on device 1 of two, which is reset after each test: what other tests keep on device 0 stays.
"""

import ctypes
import subprocess
import sys
import threading
from ctypes import c_int, c_size_t, c_void_p

import pytest

from npu_prompt_cache import sim

MIB = 1 << 20
DEVICE = 1
HUGE_FIRST, HUGE_ONLY, NORMAL_ONLY = 0, 1, 2
H2H, H2D, D2H, D2D, DEFAULT, HOST_BUF, INNER_D2D, INTER_D2D = range(8)

INVALID_PARAM, UNINITIALIZED, REPEAT_INIT, REPEAT_FINALIZE = 100000, 100001, 100002, 100037
PARAM_INVALID, INVALID_DEVICE, NO_CONTEXT, STREAM_CONTEXT, UNALIGNED = 107000, 107001, 107002, 107003, 107008
NOT_SUPPORTED, NO_EVENT, OUT_OF_MEMORY, SYSTEM_DMA = 207000, 207007, 207001, 507013

acl = ctypes.CDLL(sim.library_path())
for _name in ("aclGetRecentErrMsg", "aclrtGetSocName"):
    getattr(acl, _name).restype = ctypes.c_char_p


def call(name, *args):
    """The error code of one runtime call. Ints are passed as 64 bits: every C integer reads its part."""
    return getattr(acl, name)(*(c_void_p(arg) if isinstance(arg, int) else arg for arg in args))


def do(name, *args):
    code = call(name, *args)
    assert code == 0, message()


def message():
    return acl.aclGetRecentErrMsg().decode()


def make(name, *args):
    """The handle or address that a creating call returns by its first argument."""
    handle = c_void_p()
    do(name, ctypes.byref(handle), *args)
    return handle.value


def malloc(size, policy=HUGE_FIRST):
    return make("aclrtMalloc", size, policy)


def host(data=b"\0"):
    """A host buffer, its address and its size; the caller keeps it alive."""
    return (buffer := ctypes.create_string_buffer(data, len(data))), ctypes.addressof(buffer), len(data)


def write(address, data):
    _keep, source, size = host(data)
    do("aclrtMemcpy", address, size, source, size, H2D)


def read(address, size):
    """What lies at a device address now. It overtakes queued work, and is an API call itself."""
    buffer, target, _ = host(bytes(size))
    do("aclrtMemcpy", target, size, address, size, D2H)
    return buffer.raw


def stream():
    return make("aclrtCreateStream")


def event():
    return make("aclrtCreateEventExWithFlag", 1)


def is_complete(handle):
    status = c_int(-1)
    do("aclrtQueryEventStatus", handle, ctypes.byref(status))
    return status.value == 1


def is_idle(handle):
    status = c_int(-1)
    do("aclrtStreamQuery", handle, ctypes.byref(status))
    return status.value == 0


def copy_async(dst, src, size, on, kind=D2D):
    return call("aclrtMemcpyAsync", dst, size, src, size, kind, on)


def fill_async(dst, value, size, on):
    do("aclrtMemsetAsync", dst, size, value, size, on)


def free_and_total(attr=1):
    free, total = c_size_t(77), c_size_t(77)
    do("aclrtGetMemInfo", attr, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def reset_device():
    while call("aclrtResetDevice", DEVICE) == 0:
        pass


def in_thread(work):
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def run_python(code):
    """Runs a program of its own that has `acl` (the library) and `sim`."""
    start = "import ctypes, os, signal\nfrom npu_prompt_cache import sim\nacl = ctypes.CDLL(sim.library_path())\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60)


@pytest.fixture(autouse=True)
def machine():
    before = c_void_p()
    config = sim.configuration()
    assert call("aclInit", 0) in (0, REPEAT_INIT)
    call("aclrtGetCurrentContext", ctypes.byref(before))
    sim.configure(device_count=max(2, config.device_count))
    do("aclrtSetDevice", DEVICE)
    sim.reset_counters()
    sim.clear_violations()
    yield
    sim.prompt_streams()
    sim.clear_faults()
    sim.clear_violations()
    reset_device()
    sim.configure(
        hbm_bytes=config.hbm_bytes,
        device_count=config.device_count,
        poison=config.poison,
        max_events=config.max_events,
    )
    if before.value:
        do("aclrtSetCurrentContext", before.value)
