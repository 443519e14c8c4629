"""Forked children, and the end of the process in any order."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SET_UP = """
import os, sys, gc, torch
import npu_prompt_cache as npc
from npu_prompt_cache import sim
layout = npc.KVLayout(num_layers=1, num_kv_heads=4, head_dim=16, dtype=torch.float16, block_size=16)
cache = npc.PromptCache(layout, pool_bytes=8 << 20)
with cache.acquire(list(range(40))) as lease:
    lease.commit(list(range(40)))
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "faulthandler", "-c", SET_UP + textwrap.dedent(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_forked_child_gets_a_typed_error_and_makes_no_call() -> None:
    done = run(
        """
        lease = cache.acquire(list(range(50)))
        before = dict(sim.counters().calls)
        child = os.fork()
        if child == 0:
            failed = []
            for call in (
                lambda: cache.acquire([1]), lambda: cache.lookup([1]), lambda: cache.stats(), lambda: cache.clear(),
                lambda: cache.key(0), lambda: lease.commit(list(range(50))), lambda: lease.extend(1),
                lambda: lease.release(), lambda: lease.block_table, lambda: cache.check_integrity(),
                lambda: cache.close(), lambda: npc.PromptCache(layout, pool_bytes=8 << 20),
            ):
                try:
                    call()
                except npc.PromptCacheError as error:
                    failed.append(type(error).__name__)
            print(*failed)
            del lease, cache
            gc.collect()
            sys.stdout.flush()
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, status
        assert cache.acquire(list(range(50))).cached_tokens == 40
        lease.release()
        cache.check_integrity()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    # The simulator, like the real runtime, refuses a child altogether; its counters cannot be asked there. What the
    # child's own cache objects do is seen in the names: refused by us, not by the runtime (AclError).
    assert done.stdout.split() == ["CacheClosed"] * 11 + ["AclError"]


def test_a_forked_child_with_another_threads_lock_held_does_not_hang() -> None:
    done = run(
        """
        import threading, time
        stop = False
        def busy():
            while not stop:
                cache.acquire(list(range(40))).release()
        threads = [threading.Thread(target=busy) for _ in range(4)]
        [thread.start() for thread in threads]
        for _ in range(20):
            child = os.fork()
            if child == 0:
                try:
                    cache.acquire([1])
                except npc.CacheClosed:
                    os._exit(3)
                os._exit(4)
            assert os.waitpid(child, 0)[1] == 3 << 8
        stop = True
        [thread.join() for thread in threads]
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("order", list(itertools.permutations(["cache", "lease", "plane"])), ids="-".join)
def test_the_process_ends_well_with_everything_alive(order: tuple[str, ...]) -> None:
    # Module globals go in the order of their names here, and at exit in no order that one could rely on.
    done = run(
        f"""
        lease = cache.acquire(list(range(50)))
        plane = cache.key(0)
        for name in {list(order)[:2]!r}:
            del globals()[name]
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_process_ends_well_with_an_attached_model() -> None:
    done = run(
        """
        from transformers import LlamaConfig, LlamaForCausalLM
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0))
        npc.enable(model.eval(), pool_bytes=8 << 20)
        kept = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=3, return_dict_in_generate=True)
        sys.keep_for_ever = [kept, cache.acquire([1, 2]), model]
        """
    )
    assert done.returncode == 0, done.stderr


def test_exit_in_the_middle_of_a_request() -> None:
    done = run("lease = cache.acquire([1, 2, 3])\nsys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")


SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
/* Hands every call to the simulator, and says so where it is one that gives something back. */
static void* real(const char* name) {
  static void* library;
  if (!library) library = dlopen(getenv("SIMULATOR"), RTLD_NOW);
  return dlsym(library, name);
}
#define FORWARD(name, say)                                                        \\
  long name(long a, long b, long c, long d, long e, long f) {                     \\
    if (say) fprintf(stderr, #name " was called\\n");                             \\
    return ((long (*)(long, long, long, long, long, long))real(#name))(a, b, c, d, e, f); \\
  }
"""


def test_nothing_is_called_once_the_process_is_exiting(tmp_path: Path) -> None:
    names = re.findall(r"\(\*(acl\w+)\)\(", (Path(__file__).parent.parent / "csrc" / "acl" / "loader.h").read_text())
    gives_back = ("aclrtFree", "aclrtDestroyStream", "aclrtDestroyEvent", "aclrtSynchronizeDevice")
    source = tmp_path / "shim.c"
    source.write_text(SHIM + "".join(f"FORWARD({name}, {int(name in gives_back)})\n" for name in names))
    shim = tmp_path / "libshim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(shim), str(source)], check=True)
    program = f"""
        os.environ["SIMULATOR"] = sim.library_path()
        other = npc.PromptCache(layout, pool_bytes=8 << 20, acl_lib={str(shim)!r})
        if sys.argv[-1] == "close":
            other.close()
        else:
            lease = other.acquire([1, 2, 3])
            other.acquire([4]).release()
        """
    assert "aclrtFree was called" in run(program, "close").stderr  # the shim does speak
    done = run(program, "leave")
    assert (done.returncode, done.stderr) == (0, "")
