"""The pool on ``npu:0``: torch_npu's own runtime, its tensors, its streams and its queue."""

from __future__ import annotations

import gc
import itertools
import random
import re
import subprocess
import sys

import pytest
import torch

import npu_prompt_cache as npc
from npu_prompt_cache import _core, sim
from npu_prompt_cache.attention import npu

LAYOUT = npc.KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)


def make_cache() -> npc.PromptCache:
    return npc.PromptCache(LAYOUT, device="npu:0", pool_bytes=32 << 20)


def flat(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(-1, *plane.shape[2:])


def test_the_pool_comes_from_the_runtime_that_torch_npu_loaded() -> None:
    torch.npu.current_device()
    used = sim.memory().live_bytes
    cache = make_cache()
    assert cache.stats().runtime == sim_file()
    assert sim.memory().live_bytes - used >= 32 << 20
    cache.close()
    assert sim.memory().live_bytes == used


def sim_file() -> str:
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if line.rstrip().endswith("/libascendcl.so")}
    assert len(files) == 1
    return files.pop()


def test_planes_are_tensors_of_torch_npu_over_the_pool_itself() -> None:
    cache = make_cache()
    for layer in range(LAYOUT.num_layers):
        for plane, address in ((cache.key(layer), 2 * layer), (cache.value(layer), 2 * layer + 1)):
            assert plane.data_ptr() == cache._plane_addresses[address]
            assert plane.device == torch.device("npu:0")
            assert plane.dtype == LAYOUT.dtype
            assert plane.is_contiguous()
            assert tuple(plane.shape[1:]) == (128, 2, 16)
    plane = cache.key(1)
    plane[3, 5] = 2.5
    assert cache.key(1)[3, 5].cpu().unique().tolist() == [2.5]
    cache.close()
    plane[3, 5] = 4.5  # still its memory
    assert plane[3, 5].cpu().unique().tolist() == [4.5]


def test_the_callers_device_and_context_stay_as_they_are() -> None:
    torch.npu.set_device(1)
    try:
        cache = make_cache()
        with cache.acquire([1, 2, 3]) as lease:
            lease.commit([1, 2, 3])
        cache.acquire([1, 2, 4]).release()
        cache.close()
        assert torch.npu.current_device() == 1
        assert torch.ones(3, device="npu").device == torch.device("npu:1")
    finally:
        torch.npu.set_device(0)


def test_a_cache_on_the_second_device() -> None:
    cache = npc.PromptCache(LAYOUT, device="npu:1", pool_bytes=32 << 20)
    assert cache.key(0).device == torch.device("npu:1")
    with cache.acquire([1] * 130) as lease:
        flat(cache.key(0))[torch.from_numpy(lease.slots(0, 130)).to("npu:1")] = 7.0
        lease.commit([1] * 130)
    with cache.acquire([1] * 129 + [2]) as lease:
        assert lease.cached_tokens == 129
        assert flat(cache.key(0))[torch.from_numpy(lease.slots(0, 129)).to("npu:1")].cpu().unique().tolist() == [7.0]
    assert torch.npu.current_device() == 0
    cache.close()


def test_insert_takes_tensors_on_the_device_by_one_copy() -> None:
    cache = make_cache()
    prompt = list(range(1, 301))
    kv = [tuple(torch.randn(300, 2, 16).half().to("npu:0") for _ in "KV") for _ in range(2)]
    assert cache.insert(prompt, kv) == 300
    match = cache.lookup(prompt)
    slots = torch.cat([torch.arange(128) + int(block) * 128 for block in match.block_table])[:300].to("npu:0")
    for layer, (keys, values) in enumerate(kv):
        assert torch.equal(flat(cache.key(layer))[slots], keys)
        assert torch.equal(flat(cache.value(layer))[slots], values)
    assert cache.stats().copies == {"H2H": 0, "H2D": 0, "D2H": 0, "D2D": 4}
    with pytest.raises(ValueError, match="device\\(type='cpu'\\)"):
        cache.insert([9, 9], [tuple(torch.zeros(2, 2, 16).half() for _ in "KV") for _ in range(2)])
    cache.close()


def test_insert_comes_after_the_copies_that_its_tensors_still_wait_for() -> None:
    cache = make_cache()
    host = torch.randn(2, 2, 100, 2, 16).half().pin_memory()
    kv = torch.zeros(2, 2, 100, 2, 16, dtype=torch.float16, device="npu:0")
    torch.npu.synchronize()
    with sim.late_streams(seed=1, within_calls=10_000):
        kv.copy_(host, non_blocking=True)
        cache.insert([1] * 100, [(keys, values) for keys, values in kv])
    torch.npu.synchronize()
    first = int(cache.lookup([1] * 100).block_table[0]) * 128
    for layer in range(2):
        assert torch.equal(flat(cache.key(layer))[first : first + 100].cpu(), host[layer, 0])
        assert torch.equal(flat(cache.value(layer))[first : first + 100].cpu(), host[layer, 1])
    cache.close()


def test_100000_releases_with_1023_events() -> None:
    sim.configure(max_events=1023)
    try:
        cache = make_cache()
        torch.npu.current_stream()
        prompt = list(range(1, 200))
        for request in range(100_000):
            lease = cache.acquire(prompt if request % 2 else prompt[:100])
            lease.commit(prompt if request % 2 else prompt[:100])
            lease.release()
        assert cache.check_integrity()
        assert cache.stats().leases == 0
        assert sim.memory(0).live_events <= 1023
        cache.close()
    finally:
        sim.configure(max_events=65_535)


# ---- streams that run late ----


#: 512 KiB of K a block: a plane of 2 MiB has four blocks, and three can be leased.
FEW_BLOCKS = npc.KVLayout(num_layers=1, num_kv_heads=64, head_dim=32, dtype=torch.float16)


def late_reuse_keeps_its_bytes(seed: int, fenced: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Requests on two streams that go through the same few blocks, every copy late. True where no K/V were overwritten.

    Each request hits a prefix that ends inside a block, so its first rows are copied on its stream. It is released
    while that copy may still wait, and its block goes to a request of the other stream, which writes at once.
    """
    real = _core.PromptCache
    with monkeypatch.context() as patch:
        patch.setattr(_core, "PromptCache", lambda **options: real(**options, fenced=fenced))
        cache = npc.PromptCache(FEW_BLOCKS, device="npu:0", pool_bytes=4 << 20, watermark_bytes=0)
    rng = random.Random(seed)
    streams = [torch.npu.Stream() for _ in range(2)]
    keys = flat(cache.key(0))
    prefix = [1] * 100
    with cache.acquire(prefix) as lease:
        keys[torch.from_numpy(lease.slots(0, 100)).to("npu:0")] = 1.0
        lease.commit(prefix)
    torch.npu.synchronize()
    right = True
    with sim.late_streams(seed, within_calls=64):
        for request in range(16):
            with torch.npu.stream(rng.choice(streams)):
                if rng.random() < 0.5:
                    cache.acquire(prefix + [2]).release()
                    continue
                mine = [3 + request] * 100
                with cache.acquire(mine) as lease:
                    slots = torch.from_numpy(lease.slots(0, 100)).to("npu:0")
                    keys[slots] = float(3 + request)
                    for stream in streams:  # whatever waits elsewhere has its chance now
                        if rng.random() < 0.5:
                            stream.synchronize()
                    right = right and keys[slots].eq(3 + request).all().item()
    torch.npu.synchronize()
    cache.check_integrity()
    cache.close()
    return right


def test_without_fences_late_copies_overwrite_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not all(late_reuse_keeps_its_bytes(seed, fenced=False, monkeypatch=monkeypatch) for seed in range(50))


def test_with_fences_no_late_copy_ever_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(1000):
        assert late_reuse_keeps_its_bytes(seed, fenced=True, monkeypatch=monkeypatch), f"seed {seed}"


def test_torchs_queue_is_handed_on_before_the_caches_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch was asked for before an acquire is enqueued before the acquire's copy."""
    cache = make_cache()
    prefix = [1] * 100
    source = torch.full((100, 2, 16), 3.0, dtype=torch.float16, device="npu:0")
    for _ in range(200):
        cache.clear()
        with cache.acquire(prefix) as lease:
            first = int(lease.slots(0, 1)[0])
            keys = flat(cache.key(0))[first : first + 100]
            keys.fill_(0)
            torch.npu.synchronize()
            keys.copy_(source, non_blocking=True)  # goes through torch_npu's queue, in another thread
            lease.commit(prefix)
        with cache.acquire(prefix + [2]) as lease:
            copied = flat(cache.key(0))[torch.from_numpy(lease.slots(0, 100)).to("npu:0")]
            assert lease.cached_tokens == 100
            assert copied.eq(3).all().item()
    cache.close()


def test_the_queue_of_a_device_that_is_not_current_is_handed_on_too() -> None:
    cache = npc.PromptCache(LAYOUT, device="npu:1", pool_bytes=32 << 20)
    host = torch.full((2, 2, 100, 2, 16), 3.0, dtype=torch.float16).pin_memory()
    wrong = 0
    for _ in range(300):
        cache.clear()
        kv = torch.zeros(2, 2, 100, 2, 16, dtype=torch.float16, device="npu:1")
        kv.copy_(host, non_blocking=True)
        cache.insert([1] * 100, [(keys, values) for keys, values in kv])
        torch.npu.synchronize("npu:1")
        first = int(cache.lookup([1] * 100).block_table[0]) * 128
        wrong += not flat(cache.value(1))[first : first + 100].eq(3).all().item()
    assert wrong == 0
    assert torch.npu.current_device() == 0
    cache.close()


def test_torchs_queue_is_handed_on_before_every_copy_and_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's own thread cannot be held up from here, so that a fence too early is a matter of luck: count."""
    cache = make_cache()
    kv = [tuple(torch.zeros(1, 2, 16, dtype=torch.float16, device="npu:0") for _ in "KV") for _ in range(2)]
    handed_on = []
    real = npu.QueuedStream.hand_on
    monkeypatch.setattr(npu.QueuedStream, "hand_on", lambda stream: handed_on.append(0) or real(stream))
    lease = cache.acquire([1, 2, 3])
    assert handed_on == [0]
    lease.commit([1, 2, 3])
    assert handed_on == [0] * 2
    lease.release()
    assert handed_on == [0] * 3
    with cache.acquire([1, 2, 4]):
        assert handed_on == [0] * 4
    assert handed_on == [0] * 5
    cache.acquire([1, 2, 5])  # nobody keeps it
    gc.collect()
    assert handed_on == [0] * 7
    cache.insert([9], kv)
    assert handed_on == [0] * 8
    cache.close()


def test_a_lease_is_given_back_whatever_torch_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()

    def fail(stream: npu.QueuedStream) -> int:
        raise RuntimeError("an asynchronous error of the device")

    lease, other = cache.acquire([1, 2, 3]), cache.acquire([4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(npu.QueuedStream, "hand_on", fail)
        with pytest.raises(RuntimeError, match="asynchronous"):
            lease.release()
        with pytest.raises(KeyError, match="the body's own"), other:
            raise KeyError("the body's own")
    assert lease.released
    assert other.released
    assert cache.stats().leases == 0
    cache.close()


# ---- who initialises the runtime, and who goes first at exit ----

ORDERS = {
    "torch_npu, then the cache": "x = torch.ones(3, device='npu:0'); cache = make()",
    "the cache, then torch_npu": "cache = make(); x = torch.ones(3, device='npu:0')",
    "the cache, then torch_npu, then planes": "cache = make(); x = torch.ones(3, device='npu:0'); plane = cache.key(0)",
}
ENDS = {
    "nothing": "",
    "close": "cache.close()",
    "torch's objects first": "del x",
    "the cache first": "del cache",
    "an open lease": "lease = cache.acquire([1, 2, 3])",
    "an open lease and a plane": "lease = cache.acquire([1, 2, 3]); plane = cache.key(1); plane[1] = 3.0",
}


def test_a_second_device_that_torch_has_not_touched() -> None:
    """The first to use it is the cache, in every thread; torch's own device stays the first."""
    program = """
import threading, torch, torch_npu
import npu_prompt_cache as npc

layout = npc.KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)
cache = npc.PromptCache(layout, device="npu:1", pool_bytes=32 << 20)
devices = []

def use():
    with cache.acquire([1] * 130) as lease:
        lease.extend(1)
        lease.commit([1] * 130)
    devices.append(torch.npu.current_device())
    devices.append(torch.ones(2, device="npu").get_device())

for target in (use, use):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
use()
assert devices == [0] * 6, devices
assert cache.key(0).get_device() == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


#: Each order with both orders of imports, each end once.
PROGRAMS = [
    (imports, order, end)
    for (imports, order), end in zip(
        itertools.product(["torch_npu first", "the cache first"], ORDERS), ENDS, strict=True
    )
]


@pytest.mark.parametrize(("imports", "order", "end"), PROGRAMS)
def test_initialisation_and_exit_in_any_order(imports: str, order: str, end: str) -> None:
    lines = ["import torch, torch_npu", "import npu_prompt_cache as npc"]
    program = "\n".join(
        [
            *(lines if imports == "torch_npu first" else reversed(lines)),
            "layout = npc.KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype=torch.float16)",
            "make = lambda: npc.PromptCache(layout, device='npu:0', pool_bytes=32 << 20)",
            ORDERS[order],
            "with cache.acquire([1, 2, 3]) as lease: lease.commit([1, 2, 3])",
            "assert cache.lookup([1, 2, 3]).cached_tokens == 3",
            "assert x.sum().item() == 3",
            ENDS[end],
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # torch_npu itself says that CANN's variables are not set, how it rounds allocations and, where its queue
    # runs empty at the wrong moment, that it waits: warnings and information (I, month, day), no errors.
    assert all(re.match(r"I\d{4} |.*Warning: ", line) for line in done.stderr.splitlines()), done.stderr
