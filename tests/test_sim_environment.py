"""The machine that environment variables ask for."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from npu_prompt_cache import sim
acl = ctypes.CDLL(sim.library_path())
acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
count, event, streams = ctypes.c_uint32(), ctypes.c_void_p(), ctypes.c_void_p()
code = acl.aclrtGetDeviceCount(ctypes.byref(count))
if code == 0:
    code = acl.aclInit(None) or acl.aclrtSetDevice(count.value - 1)
if code:
    again = acl.aclInit(None)
    said = acl.aclGetRecentErrMsg().decode()
    acl.aclrtSetDevice(0)  # what torch_npu shows is the text of a later call
    assert said.removeprefix("aclInit: ").split(" (")[0] in acl.aclGetRecentErrMsg().decode()
    raise SystemExit(f"{code} {again} {said}")
p = ctypes.c_void_p()
assert acl.aclrtMalloc(ctypes.byref(p), ctypes.c_size_t(64), 0) == 0
assert acl.aclrtMemsetAsync(p, ctypes.c_size_t(64), 1, ctypes.c_size_t(64), None) == 0
done = ctypes.string_at(p, 1) == b"\\1"
print(sim.configuration(), "prompt" if done else "late")
"""


def machine_of(**variables):
    """What a process of its own says of its machine; variables by the end of their names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NPU_PROMPT_CACHE_SIM")}
    environment |= {f"NPU_PROMPT_CACHE_SIM_{name}": value for name, value in variables.items()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def test_without_variables_the_machine_is_the_default():
    assert machine_of() == machine_of(DEVICES="", HBM_BYTES="", MAX_EVENTS="", LATE_STREAMS="")
    assert machine_of() == (
        "Configuration(hbm_bytes=17179869184, device_count=1, poison=True, max_events=65535) prompt"
    )


def test_the_machine_is_what_the_variables_say():
    assert machine_of(DEVICES="3", HBM_BYTES="8388608", MAX_EVENTS="7", LATE_STREAMS="0") == (
        "Configuration(hbm_bytes=8388608, device_count=3, poison=True, max_events=7) late"
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DEVICES", "0"),
        ("DEVICES", "1025"),
        ("DEVICES", "two"),
        ("DEVICES", "2 "),
        ("DEVICES", "-1"),
        ("HBM_BYTES", "0"),
        ("HBM_BYTES", "1e9"),
        ("HBM_BYTES", "99999999999999999999999"),
        ("MAX_EVENTS", "4294967296"),
        ("LATE_STREAMS", "x"),
        ("LATE_STREAMS", "18446744073709551616"),
    ],
)
def test_a_bad_value_fails_every_start_and_is_named(variable, value):
    said = machine_of(**{variable: value})
    assert said.startswith("100000 100000 aclInit: ")
    assert f"NPU_PROMPT_CACHE_SIM_{variable}='{value}' is no whole number in [" in said
