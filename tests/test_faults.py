"""Every call of the runtime fails in turn: a typed error or a right result, and nothing is lost (P6, P7, P10)."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from layouts import small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import sim

LAYOUT = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)  # 31 blocks of 16 tokens in 4 MiB


def life(cache: npc.PromptCache) -> None:
    """acquire, insert, a hit that copies, eviction, release."""
    prompt = list(range(40))
    kv = [(torch.ones(40, 64, 32, dtype=torch.float16), torch.full((40, 64, 32), 2.0, dtype=torch.float16))]
    with cache.acquire([7] * 20) as lease:
        lease.commit([7] * 20)
    cache.insert(prompt, kv)
    with cache.acquire([*prompt, 5]) as lease:
        assert lease.cached_tokens == 40
        slots = torch.from_numpy(lease.slots(0, 40))
        # What a hit reads is what was inserted, or the request was refused: never something else.
        assert (cache.value(0).view(-1, 64, 32)[slots] == 2.0).all()
        lease.extend(3)
        lease.commit([*prompt, 5])
    for first in range(100, 130):
        with cache.acquire([first] * 50) as lease:
            lease.commit([first] * 50)
    assert cache.stats().evicted_blocks > 0


def construct_and_live(made: list[npc.PromptCache]) -> None:
    cache = npc.PromptCache(LAYOUT, pool_bytes=4 << 20)
    made.append(cache)
    try:
        life(cache)
    finally:
        cache.check_integrity()
        stats = cache.stats()
        assert (stats.leases, stats.pinned_entries, stats.leased_bytes) == (0, 0, 0)
        cache.close()


def calls_of_a_life() -> dict[str, int]:
    sim.reset_counters()
    construct_and_live([])
    gc.collect()
    return {name: count for name, count in sim.counters().calls.items() if count and name in sim.functions()}


def test_a_life_reaches_every_function_that_is_bound() -> None:
    bound = set(calls_of_a_life())
    assert bound >= {
        "aclInit",
        "aclrtSetDevice",
        "aclrtGetDeviceCount",
        "aclrtGetCurrentContext",
        "aclrtSynchronizeDevice",
        "aclrtMalloc",
        "aclrtFree",
        "aclrtMemcpyAsync",
        "aclrtCreateStream",
        "aclrtDestroyStream",
        "aclrtSynchronizeStream",
        "aclrtCreateEventExWithFlag",
        "aclrtRecordEvent",
        "aclrtQueryEventStatus",
        "aclrtDestroyEvent",
    }


@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
@pytest.mark.parametrize("function", sorted(calls_of_a_life()))
def test_failing_each_call_in_turn(function: str, times: int | None, pytestconfig: pytest.Config) -> None:
    calls = calls_of_a_life()[function]
    # All calls with --slow. Without, of a function that is called often, the first ones, where the kinds of use differ,
    # and some later ones.
    tried = sorted({*range(1, min(calls, 30) + 1), *range(30, calls, max(1, calls // 20)), calls})
    if pytestconfig.getoption("--slow"):
        tried = list(range(1, calls + 1))
    failed = 0
    before = sim.memory()
    for call in tried:
        made: list[npc.PromptCache] = []  # outlives the fault: what could not be given back then is given back now
        sim.fail(function, call, times=times)
        try:
            construct_and_live(made)
        except npc.AclError as error:
            failed += 1
            assert error.code == 500000
            assert function in str(error)
        finally:
            if function in ("aclrtDestroyEvent", "aclrtDestroyStream"):
                made.clear()  # destructors call these: they must bear it
            sim.clear_faults()
        made.clear()
        gc.collect()
        after = sim.memory()
        assert after.live_bytes == before.live_bytes, f"call {call}"
        if function not in ("aclrtDestroyEvent", "aclrtDestroyStream"):
            assert after == before.__class__(**{**vars(before), "peak_bytes": after.peak_bytes}), f"call {call}"
    must_fail = {
        "aclInit",
        "aclrtMalloc",
        "aclrtCreateStream",
        "aclrtMemcpyAsync",
        "aclrtFree",
        "aclrtSynchronizeStream",
    }
    assert failed > 0 or function not in must_fail


def test_close_can_be_tried_again() -> None:
    cache = npc.PromptCache(LAYOUT, pool_bytes=4 << 20)
    sim.fail("aclrtFree")
    with pytest.raises(npc.AclError, match=r"aclrtFree of the pool of \d+ bytes failed: 500000"):
        cache.close()
    assert sim.memory().live_bytes > 4 << 20
    cache.close()
    assert sim.memory().live_bytes == 0


def test_a_failed_copy_gives_the_lease_back() -> None:
    with npc.PromptCache(LAYOUT, pool_bytes=4 << 20) as cache:
        with cache.acquire([1] * 20) as lease:
            lease.commit([1] * 20)
        sim.fail("aclrtMemcpyAsync", 2)
        with pytest.raises(npc.AclError, match=r"aclrtMemcpyAsync of .* bytes into plane 1"):
            cache.acquire([1] * 20 + [2])
        cache.check_integrity()
        assert cache.stats().leases == 0
        assert cache.acquire([1] * 20 + [2]).cached_tokens == 20


def test_without_events_blocks_come_back_late_but_do() -> None:
    with npc.PromptCache(LAYOUT, pool_bytes=4 << 20) as cache:
        sim.fail("aclrtRecordEvent", times=None)
        for first in range(5):
            cache.acquire([first] * 20).release()
        assert cache.stats().fenced_bytes == 10 * LAYOUT.block_bytes
        sim.clear_faults()
        cache.acquire([9]).release()
        cache.acquire([9]).release()
        assert cache.stats().fenced_bytes == 0
        cache.check_integrity()


def test_a_lease_dropped_while_the_runtime_fails() -> None:
    cache = npc.PromptCache(LAYOUT, pool_bytes=4 << 20)
    held = [cache.acquire([1, 2, 3]), cache.acquire([4])]
    results: list[BaseException | None] = []

    def drop() -> None:  # in a thread without a context, so that one must be set
        try:
            with sim.failing("aclrtSetCurrentContext", times=None):
                held.pop().release()
                held.clear()
            results.append(None)
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert results == [None]
    assert cache.stats().leases == 0
    cache.acquire([5]).release()
    cache.check_integrity()
    cache.close()


def test_a_failed_insert_does_not_read_the_callers_memory_later() -> None:
    with npc.PromptCache(LAYOUT, pool_bytes=4 << 20) as cache:
        pair = (torch.ones(40, 64, 32, dtype=torch.float16), torch.ones(40, 64, 32, dtype=torch.float16))
        with sim.late_streams(seed=1, within_calls=1000):
            with sim.failing("aclrtMemcpyAsync", call=2), pytest.raises(npc.AclError):
                cache.insert(list(range(40)), [pair])
            pair[0].fill_(7.0)
        assert not (cache.key(0) == 7.0).any()
        assert cache.stats().entries == 0
