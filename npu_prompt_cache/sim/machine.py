"""The simulated machine of this process: what may be set on it and read from it.

The contract of each call stands in ``csrc/sim/control.h``.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass

from npu_prompt_cache.sim.environment import library_folder

__all__ = [
    "Configuration",
    "Counters",
    "LateStreams",
    "Memory",
    "clear_faults",
    "clear_violations",
    "configuration",
    "configure",
    "counters",
    "fail",
    "failing",
    "functions",
    "late_streams",
    "library_path",
    "memory",
    "prompt_streams",
    "reset_counters",
    "run_stream",
    "violations",
]

_COPY_KINDS = ("H2H", "H2D", "D2H", "D2D")
_SYNCHRONIZING = (
    "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeEvent",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeStreamWithTimeout",
)
_ALL_DEVICES = -1
_INVALID_PARAM = 100000


@dataclass(frozen=True)
class Configuration:
    """The simulated machine."""

    hbm_bytes: int
    """HBM of each device, bytes."""
    device_count: int
    poison: bool
    """Whether new memory is filled with 0xFF, a NaN in fp16, bf16 and fp32."""
    max_events: int
    """Live events a device can have; one more is error 207007."""


@dataclass(frozen=True)
class Counters:
    """What was called and copied since the last :func:`reset_counters`."""

    calls: dict[str, int]
    """Calls by function, failed ones included; every function of :func:`functions` has an entry."""
    copies: dict[str, int]
    """Copies done, by what they really were: ``H2H``, ``H2D``, ``D2H``, ``D2D``. Queued ones are not done."""
    copy_bytes: dict[str, int]
    """The bytes they moved."""

    @property
    def synchronizations(self) -> int:
        """Calls that make the host wait for the device."""
        return sum(self.calls[name] for name in _SYNCHRONIZING)


@dataclass(frozen=True)
class Memory:
    """What is live now."""

    live_allocations: int
    """Allocations of device memory."""
    live_bytes: int
    """HBM they take, page rounding and padding included."""
    peak_bytes: int
    """The most ``live_bytes`` has been since the last :func:`reset_counters`."""
    live_streams: int
    """Streams created and not destroyed; default streams are not counted."""
    live_events: int
    live_host_allocations: int
    """Allocations by ``aclrtMallocHost``; they belong to no device."""


class _Config(ctypes.Structure):
    _fields_ = [
        ("hbm_bytes", ctypes.c_uint64),
        ("device_count", ctypes.c_uint32),
        ("max_events", ctypes.c_uint32),
        ("poison", ctypes.c_uint32),
    ]


class _Copies(ctypes.Structure):
    _fields_ = [("copies", ctypes.c_uint64 * 4), ("bytes", ctypes.c_uint64 * 4)]


class _Memory(ctypes.Structure):
    _fields_ = [
        ("live_allocations", ctypes.c_uint64),
        ("live_bytes", ctypes.c_uint64),
        ("peak_bytes", ctypes.c_uint64),
        ("live_streams", ctypes.c_uint64),
        ("live_events", ctypes.c_uint64),
        ("live_host_allocations", ctypes.c_uint64),
    ]


def library_path() -> str:
    """Absolute path of the simulator's shared library."""
    return str(library_folder() / "libnpu_prompt_cache_sim.so")


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(library_path())
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    library.npcSimFunctionCount.restype = ctypes.c_size_t
    library.npcSimFunctionName.restype = ctypes.c_char_p
    library.npcSimFunctionName.argtypes = [ctypes.c_size_t]
    library.npcSimGetConfig.argtypes = [ctypes.POINTER(_Config)]
    library.npcSimSetConfig.argtypes = [ctypes.POINTER(_Config)]
    library.npcSimLateStreams.argtypes = [ctypes.c_uint64, ctypes.c_uint32]
    library.npcSimRunStream.argtypes = [ctypes.c_void_p]
    library.npcSimAddFault.argtypes = [
        ctypes.c_char_p,
        ctypes.c_uint64,
        ctypes.c_uint64,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_uint64),
    ]
    library.npcSimRemoveFault.argtypes = [ctypes.c_uint64]
    library.npcSimGetCounters.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_size_t,
        ctypes.POINTER(_Copies),
    ]
    library.npcSimGetMemory.argtypes = [ctypes.c_int32, ctypes.POINTER(_Memory)]
    library.npcSimGetViolations.argtypes = [
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_size_t),
    ]
    return library


def _check(code: int) -> None:
    if code == 0:
        return
    text = _library().aclGetRecentErrMsg().decode()
    raise ValueError(text) if code == _INVALID_PARAM else RuntimeError(text)


def _want(name: str, value: int, low: int, bits: int) -> None:
    # ctypes would cut a number that does not fit without a word.
    if not low <= value < 1 << bits:
        raise ValueError(f"{name} is {value}, not in [{low}, 2**{bits})")


def configuration() -> Configuration:
    """The simulated machine as it is now."""
    config = _Config()
    _check(_library().npcSimGetConfig(ctypes.byref(config)))
    return Configuration(config.hbm_bytes, config.device_count, bool(config.poison), config.max_events)


def configure(
    *,
    hbm_bytes: int | None = None,
    device_count: int | None = None,
    poison: bool | None = None,
    max_events: int | None = None,
) -> None:
    """Changes what is given and leaves the rest; all of it, or on error none.

    Args:
        hbm_bytes: HBM of each device, bytes, at least 1 and at least what is in use. Only what a program
            writes takes real memory. At first 16 GiB.
        device_count: 1 to 1024. A device that is in use cannot be taken away. At first 1.
        poison: fill new memory with 0xFF, so that reading what was never written shows as NaN. At first on.
        max_events: live events a device. At first 65,535.

    Raises:
        ValueError: a value is out of range, or what is live does not fit into the new machine.
    """
    now = configuration()
    config = {
        "hbm_bytes": now.hbm_bytes if hbm_bytes is None else hbm_bytes,
        "device_count": now.device_count if device_count is None else device_count,
        "max_events": now.max_events if max_events is None else max_events,
    }
    _want("hbm_bytes", config["hbm_bytes"], 1, 64)
    _want("device_count", config["device_count"], 1, 32)
    _want("max_events", config["max_events"], 0, 32)
    fill = now.poison if poison is None else poison
    _check(_library().npcSimSetConfig(ctypes.byref(_Config(**config, poison=fill))))


class LateStreams(contextlib.AbstractContextManager["LateStreams"]):
    """Streams run late until this is left; see :func:`late_streams`."""

    def __exit__(self, *error: object) -> None:
        prompt_streams()


def late_streams(seed: int, within_calls: int = 8) -> LateStreams:
    """From here on queues asynchronous operations instead of running them at once.

    Each operation runs at the latest ``within_calls`` runtime calls after the one that submitted it, at a
    call chosen by a generator seeded with ``seed``, or earlier where a synchronise needs it; in order within
    its stream, a wait after the record it waits for. The same calls with the same seed run the same way.

    Works as a plain call, ended by :func:`prompt_streams`, or in a ``with`` statement, which ends it itself.

    Args:
        seed: 0 to 2**64 - 1.
        within_calls: runtime calls, at least 1.

    Raises:
        ValueError: an argument is out of range.
    """
    _want("seed", seed, 0, 64)
    _want("within_calls", within_calls, 1, 32)
    _check(_library().npcSimLateStreams(seed, within_calls))
    return LateStreams()


def prompt_streams() -> None:
    """Runs what is queued; from here on operations run inside the call that submits them, as at first."""
    _check(_library().npcSimPromptStreams())


def run_stream(handle: int) -> None:
    """Runs everything queued on a stream, with what that waits for.

    For whoever computes on the host in the place of the device: what an operator reads is there, in stream order.
    No call of the runtime: it is not counted, and no fault can hit it. What goes wrong in the queued work is a
    violation, and the error of the stream's next synchronise.

    Args:
        handle: the ``aclrtStream``; 0: the default stream of the thread's current context.

    Raises:
        ValueError: there is no such stream.
    """
    _check(_library().npcSimRunStream(handle or None))


@functools.cache
def _functions() -> tuple[str, ...]:
    library = _library()
    return tuple(library.npcSimFunctionName(i).decode() for i in range(library.npcSimFunctionCount()))


def functions() -> list[str]:
    """Names of the runtime functions whose calls are counted and can be made to fail."""
    return list(_functions())


def _add_fault(function: str, call: int, times: int | None, error: int) -> int:
    if function not in _functions():
        raise ValueError(f"there is no function {function!r} to fail; there are {', '.join(_functions())}")
    _want("call", call, 1, 64)
    _want("error", error, 1, 31)
    if times is not None:
        _want("times", times, 1, 64)
    fault = ctypes.c_uint64()
    _check(_library().npcSimAddFault(function.encode(), call, times or 0, error, ctypes.byref(fault)))
    return fault.value


def fail(function: str, call: int = 1, *, times: int | None = 1, error: int = 500000) -> None:
    """Makes runtime calls fail: numbers ``[call, call + times)`` of ``function``, counted from 1 from now on.

    A call made to fail returns ``error`` and does nothing. Faults add up; each counts every call of its
    function, and where two hit the same call the one set first decides the code.

    Args:
        function: one of :func:`functions`.
        call: number of the first call to fail, at least 1.
        times: how many calls fail; None: all of them from there on.
        error: the code they return, not 0.

    Raises:
        ValueError: no such function (the text names all), or a number out of range.
    """
    _add_fault(function, call, times, error)


@contextlib.contextmanager
def failing(function: str, call: int = 1, *, times: int | None = 1, error: int = 500000) -> Iterator[None]:
    """:func:`fail` for the length of a ``with`` statement; other faults stay as they are."""
    fault = _add_fault(function, call, times, error)
    try:
        yield
    finally:
        _check(_library().npcSimRemoveFault(fault))


def clear_faults() -> None:
    """Takes back every fault."""
    _check(_library().npcSimClearFaults())


def counters() -> Counters:
    """Calls and copies since the last :func:`reset_counters`."""
    names = functions()
    calls = (ctypes.c_uint64 * len(names))()
    copies = _Copies()
    _check(_library().npcSimGetCounters(calls, len(names), ctypes.byref(copies)))
    return Counters(
        calls=dict(zip(names, calls, strict=True)),
        copies=dict(zip(_COPY_KINDS, copies.copies, strict=True)),
        copy_bytes=dict(zip(_COPY_KINDS, copies.bytes, strict=True)),
    )


def reset_counters() -> None:
    """Sets calls and copies to 0, and peaks to what is live now."""
    _check(_library().npcSimResetCounters())


def memory(device: int | None = None) -> Memory:
    """What is live on one device, or on all together.

    Args:
        device: counted from 0; None: all devices, and host memory.

    Raises:
        ValueError: there is no such device.
    """
    if device is not None:
        _want("device", device, 0, 31)
    found = _Memory()
    _check(_library().npcSimGetMemory(_ALL_DEVICES if device is None else device, ctypes.byref(found)))
    return Memory(**{name: getattr(found, name) for name in Memory.__dataclass_fields__})


def violations() -> list[str]:
    """What the program did wrong where no call could report it at once, oldest first.

    For instance a queued copy whose memory was freed before it ran. The next synchronise of its stream also
    returns an error.
    """
    needed = ctypes.c_size_t(1)
    text = ctypes.create_string_buffer(0)
    while len(text) < needed.value:  # another thread may add one between two calls
        text = ctypes.create_string_buffer(needed.value)
        _check(_library().npcSimGetViolations(text, len(text), ctypes.byref(needed)))
    return text.value.decode().split("\n") if text.value else []


def clear_violations() -> None:
    """Forgets the violations so far; errors that synchronises still have to return stay."""
    _check(_library().npcSimClearViolations())
