"""Forked children, and the end of the process in any order."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

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


def run(program: str) -> subprocess.CompletedProcess[str]:
    code = SET_UP + textwrap.dedent(program)
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True, check=False
    )


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
