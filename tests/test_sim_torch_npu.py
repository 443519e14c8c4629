"""What the simulated runtime has for torch_npu: devices, settings, time, refused operators, descriptors."""

import ctypes
import os
import time
from ctypes import c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p

import pytest
from acl_calls import (
    DEVICE,
    INVALID_DEVICE,
    INVALID_PARAM,
    NOT_SUPPORTED,
    PARAM_INVALID,
    acl,
    call,
    do,
    event,
    fill_async,
    in_thread,
    is_idle,
    machine,
    malloc,
    message,
    read,
    reset_device,
    stream,
)

from npu_prompt_cache import sim

__all__ = ["machine"]  # every test runs on a machine of its own

FAR = 1 << 30  # calls: later than any test lasts
JIT_COMPILE, DEBUG_LEVEL = 10, 5  # aclCompileOpt


def number(name, *args, kind=c_int64):
    """What a call returns by its last argument."""
    value = kind()
    do(name, *args, ctypes.byref(value))
    return value.value


# Devices


@pytest.mark.parametrize(("what", "value"), [(0, 24), (1, 48), (2, 192 << 20)])
def test_capabilities_are_the_parts(what, value):
    assert number("aclGetDeviceCapability", DEVICE, what) == value


@pytest.mark.parametrize(
    ("device", "what", "code"), [(2, 0, INVALID_DEVICE), (0, 3, INVALID_PARAM), (0, -1, INVALID_PARAM)]
)
def test_capabilities_that_are_none_are_refused(device, what, code):
    assert call("aclGetDeviceCapability", device, what, ctypes.byref(c_int64())) == code


@pytest.mark.parametrize(("device", "peer", "can"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_devices_reach_each_other(device, peer, can):
    value = c_int32(-1)
    do("aclrtDeviceCanAccessPeer", ctypes.byref(value), device, peer)
    assert value.value == can
    do("aclrtDeviceEnablePeerAccess", peer, 0)


def test_a_peer_that_is_none_is_refused():
    assert call("aclrtDeviceCanAccessPeer", ctypes.byref(c_int32()), 0, 2) == INVALID_DEVICE
    assert call("aclrtDeviceEnablePeerAccess", 2, 0) == INVALID_DEVICE
    assert call("aclrtDeviceEnablePeerAccess", 0, 1) == INVALID_PARAM


def test_the_process_is_known_by_its_id():
    assert number("aclrtDeviceGetBareTgid", kind=c_int32) == os.getpid()


def test_a_device_is_active_while_it_is_set():
    def active(device):
        return number("aclrtGetPrimaryCtxState", device, 0, kind=c_int32)

    assert active(DEVICE) == 1
    reset_device()
    assert active(DEVICE) == 0
    assert call("aclrtGetPrimaryCtxState", 2, 0, ctypes.byref(c_int32())) == INVALID_DEVICE
    assert call("aclrtGetPrimaryCtxState", 0, ctypes.byref(c_int32()), ctypes.byref(c_int32())) == INVALID_PARAM


# Settings


def test_system_parameters_can_be_read_back():
    before = number("aclrtGetSysParamOpt", 0)
    try:
        for name in ("aclrtSetSysParamOpt", "aclrtCtxSetSysParamOpt"):
            for value in (1, 0):
                do(name, 0, value)
                assert number("aclrtGetSysParamOpt", 0) == value
    finally:
        do("aclrtSetSysParamOpt", 0, before)


def test_compile_options_can_be_read_back():
    acl.aclGetCompileoptSize.restype = c_size_t
    value = ctypes.create_string_buffer(b"x" * 20)
    do("aclGetCompileopt", JIT_COMPILE, value, 20)
    assert value.value == b"disable"
    assert acl.aclGetCompileoptSize(JIT_COMPILE) == len(b"disable") + 1
    do("aclSetCompileopt", JIT_COMPILE, c_char_p(b"enable"))
    try:
        do("aclGetCompileopt", JIT_COMPILE, value, 20)
        assert value.value == b"enable"
    finally:
        do("aclSetCompileopt", JIT_COMPILE, c_char_p(b"disable"))
    assert call("aclGetCompileopt", JIT_COMPILE, value, 7) == INVALID_PARAM
    assert acl.aclGetCompileoptSize(DEBUG_LEVEL) == 0
    assert call("aclGetCompileopt", DEBUG_LEVEL, value, 20) == INVALID_PARAM


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aclSetCompileopt", (17, c_char_p(b"1"))),
        ("aclSetCompileopt", (0, 0)),
        ("aclrtSetSysParamOpt", (3, 1)),
        ("aclrtCtxSetSysParamOpt", (-1, 1)),
        ("aclrtGetSysParamOpt", (3, ctypes.byref(c_int64()))),
        ("aclrtSetDeviceSatMode", (2,)),
    ],
)
def test_settings_that_are_none_are_refused(name, arguments):
    assert call(name, *arguments) == INVALID_PARAM


# Time


def test_elapsed_time_is_that_between_two_records():
    on, start, end = stream(), event(), event()
    do("aclrtRecordEvent", start, on)
    began = time.monotonic()
    time.sleep(0.02)
    do("aclrtRecordEvent", end, on)
    milliseconds = c_float()
    do("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)
    assert 20 <= milliseconds.value <= (time.monotonic() - began) * 1e3 + 1
    do("aclrtEventElapsedTime", ctypes.byref(milliseconds), end, start)
    assert milliseconds.value <= -20


def test_elapsed_time_needs_records_that_have_run():
    on, start, end = stream(), event(), event()
    milliseconds = c_float(77)
    do("aclrtRecordEvent", start, on)
    assert call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end) == PARAM_INVALID
    sim.late_streams(1, FAR)
    do("aclrtRecordEvent", end, on)
    assert call("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end) == PARAM_INVALID
    assert milliseconds.value == 77
    do("aclrtSynchronizeEvent", end)
    do("aclrtEventElapsedTime", ctypes.byref(milliseconds), start, end)
    assert 0 <= milliseconds.value < 77


@pytest.mark.parametrize("timeout", [-1, 0, 1000])
def test_a_synchronise_with_a_timeout_runs_what_is_queued(timeout):
    device, on = malloc(64), stream()
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, on)
    do("aclrtSynchronizeStreamWithTimeout", on, timeout)
    assert read(device, 1) == b"\1"
    fill_async(device, 2, 64, on)
    do("aclrtSynchronizeDeviceWithTimeout", timeout)
    assert read(device, 1) == b"\2"
    assert call("aclrtSynchronizeStreamWithTimeout", on, -2) == PARAM_INVALID
    assert call("aclrtSynchronizeDeviceWithTimeout", -2) == PARAM_INVALID


def test_synchronisations_are_counted_together():
    on, done = stream(), event()
    do("aclrtRecordEvent", done, on)
    assert sim.counters().synchronizations == 0
    do("aclrtSynchronizeStream", on)
    do("aclrtSynchronizeStreamWithTimeout", on, -1)
    do("aclrtSynchronizeEvent", done)
    do("aclrtSynchronizeDevice")
    do("aclrtSynchronizeDeviceWithTimeout", -1)
    assert sim.counters().synchronizations == 5


# What would compute


COMPUTE = [name for name in sim.functions() if name.startswith(("aclop", "rt", "aclrtBinary", "aclrtGetFunctionAddr"))]


@pytest.mark.parametrize("name", COMPUTE)
def test_what_would_compute_fails_and_says_its_name(name):
    assert call(name, *[0] * 6) == NOT_SUPPORTED
    assert message().startswith(f"{name}: ")


def test_what_would_compute_is_all_there():
    assert {"aclopCompileAndExecute", "rtKernelLaunch", "aclopSetAttrInt", "aclrtGetFunctionAddr"} < set(COMPUTE)


def test_atb_operations_are_refused():
    create = acl["_ZN3atb15CreateOperationINS_5infer20ReshapeAndCacheParamEEEiRKT_PPNS_9OperationE"]
    assert create(None, None) == NOT_SUPPORTED
    assert message().startswith("atb::CreateOperation: ")


def test_descriptors_hold_what_they_were_made_of():
    for name in ("aclCreateTensorDesc", "aclCreateDataBuffer", "aclopCreateAttr"):
        getattr(acl, name).restype = c_void_p
    acl.aclGetTensorDescNumDims.restype = c_size_t
    descriptor = c_void_p(acl.aclCreateTensorDesc(1, 3, (c_int64 * 3)(4, 5, 6), 2))
    assert acl.aclGetTensorDescType(descriptor) == 1
    assert acl.aclGetTensorDescFormat(descriptor) == 2
    dims = range(acl.aclGetTensorDescNumDims(descriptor))
    assert [number("aclGetTensorDescDimV2", descriptor, c_size_t(index)) for index in dims] == [4, 5, 6]
    assert call("aclGetTensorDescDimV2", descriptor, c_size_t(3), ctypes.byref(c_int64())) == INVALID_PARAM
    do("aclSetTensorFormat", descriptor, 30)  # of the storage: the tensor's own stays
    do("aclSetTensorShape", descriptor, 1, (c_int64 * 1)(7))
    assert acl.aclGetTensorDescFormat(descriptor) == 2
    assert acl.aclGetTensorDescNumDims(descriptor) == 3
    acl.aclDestroyTensorDesc(descriptor)
    do("aclDestroyDataBuffer", c_void_p(acl.aclCreateDataBuffer(None, c_size_t(0))))
    assert acl.aclopCreateAttr() is None


def test_the_null_descriptor_is_refused():
    assert call("aclSetTensorFormat", 0, 2) == INVALID_PARAM
    assert call("aclGetTensorDescDimV2", 0, 0, 0) == INVALID_PARAM


# Running a stream in the place of the device


def test_a_stream_is_run_with_what_it_waits_for():
    device, other = malloc(64), malloc(64)
    writer, reader, written = stream(), stream(), event()
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, writer)
    do("aclrtRecordEvent", written, writer)
    fill_async(other, 1, 64, writer)
    do("aclrtStreamWaitEvent", reader, written)
    fill_async(device, 2, 32, reader)
    sim.run_stream(reader)
    assert (read(device, 64), read(other, 1)) == (b"\2" * 32 + b"\1" * 32, b"\xff")


def test_running_a_stream_is_no_call_of_the_runtime():
    device, on, other = malloc(64), stream(), stream()
    sim.late_streams(3, 1)
    fill_async(device, 1, 64, other)  # due at the next call, whichever it is
    before = sim.counters()
    for _ in range(5):
        sim.run_stream(on)
    assert sim.counters() == before
    assert ctypes.string_at(device, 1) == b"\xff"
    assert is_idle(other)
    assert ctypes.string_at(device, 1) == b"\1"


def test_stream_0_is_the_default_one_of_the_threads_context():
    device = malloc(64)
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, 0)
    sim.run_stream(0)
    assert read(device, 1) == b"\1"
    with pytest.raises(ValueError, match="no context"):
        in_thread_raising(lambda: sim.run_stream(0))


def in_thread_raising(work):
    def kept():
        try:
            return work()
        except ValueError as error:
            return error

    result = in_thread(kept)
    if isinstance(result, ValueError):
        raise result
    return result


def test_what_goes_wrong_in_a_stream_that_is_run_is_a_violation():
    device, on = malloc(64), stream()
    sim.late_streams(3, FAR)
    fill_async(device, 1, 64, on)
    do("aclrtFree", device)
    sim.run_stream(on)
    assert "queued memset" in sim.violations()[0]


def test_a_stream_that_is_none_cannot_be_run():
    on = stream()
    do("aclrtDestroyStream", on)
    for handle in (on, 4096):
        with pytest.raises(ValueError, match="no live stream"):
            sim.run_stream(handle)
