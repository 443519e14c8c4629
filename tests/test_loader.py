"""How the runtime is found, and that nothing is put in its place (P11)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from layouts import small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import sim

VARIABLE = "NPU_PROMPT_CACHE_ACL_LIB"
SHELL = Path(sim.library_path()).with_name("libascendcl.so")  # the simulator by the name that programs look for


def runtime_of(code: str = "", **environment: str) -> str:
    """Where a process of its own finds the runtime of device='npu'; or the error."""
    program = f"""
import ctypes, torch
import npu_prompt_cache as npc
{code}
layout = npc.KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype=torch.float16)
try:
    stats = npc.PromptCache(layout, device="npu:0", pool_bytes=8 << 20).stats()
    print(stats.runtime, "|", stats.runtime_found)
except npc.PromptCacheError as error:
    print(type(error).__name__, error)
"""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout


def test_no_runtime_is_an_error_that_names_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(npc.RuntimeNotFound) as caught:
        npc.PromptCache(small_layout(), device="npu", pool_bytes=32 << 20)
    text = str(caught.value)
    assert f"variable {VARIABLE}: not set" in text
    assert "a libascendcl.so this process loaded before" in text
    assert "libascendcl.so by the loader's search path" in text
    assert 'device="cpu"' in text


def test_the_simulator_of_a_cpu_cache_does_not_pass_for_an_npu(make_cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    make_cache()
    with pytest.raises(npc.RuntimeNotFound):
        npc.PromptCache(small_layout(), device="npu", pool_bytes=32 << 20)


def test_the_variable_names_the_library() -> None:
    out = runtime_of(**{VARIABLE: sim.library_path()})
    assert out == f"{sim.library_path()} | the variable {VARIABLE}\n"


def test_a_library_on_the_search_path_is_found() -> None:
    out = runtime_of(LD_LIBRARY_PATH=str(Path(sim.library_path()).parent))
    assert out == f"{SHELL} | libascendcl.so by the loader's search path\n"


def test_a_library_the_process_loaded_before_comes_before_the_search_path() -> None:
    out = runtime_of("ctypes.CDLL('libascendcl.so')", LD_LIBRARY_PATH=str(Path(sim.library_path()).parent))
    assert out == f"{SHELL} | a libascendcl.so this process loaded before\n"


def test_an_explicit_place_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(npc.RuntimeNotFound, match=r"the path given: .*nowhere\.so"):
        npc.PromptCache(small_layout(), pool_bytes=32 << 20, acl_lib=str(tmp_path / "nowhere.so"))
    out = runtime_of(
        **{VARIABLE: str(tmp_path / "nowhere.so"), "LD_LIBRARY_PATH": str(Path(sim.library_path()).parent)}
    )
    assert out.startswith("RuntimeNotFound")
    assert "nowhere.so" in out


def test_all_functions_are_bound_or_none(tmp_path: Path) -> None:
    half = tmp_path / "libascendcl.so"
    source = tmp_path / "half.c"
    source.write_text("int aclInit(const char* p) { return p != 0; }\nint aclrtFree(void* p) { return p != 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(half), str(source)], check=True)
    with pytest.raises(npc.RuntimeNotFound, match=r"libascendcl\.so lacks aclrtSetDevice, .*aclGetRecentErrMsg"):
        npc.PromptCache(small_layout(), pool_bytes=32 << 20, acl_lib=str(half))


def test_what_was_loaded_is_reported(make_cache) -> None:
    stats = make_cache().stats()
    assert stats.runtime == sim.library_path()
    assert stats.runtime_found == "the path given"


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"device 7: the runtime .* has 1 device"):
        npc.PromptCache(small_layout(), device="npu:7", pool_bytes=32 << 20, acl_lib=sim.library_path())
