"""Streams that run late: a block is reused only when every stream that may still read it has passed (P5)."""

from __future__ import annotations

import random

import pytest
import torch
from layouts import blocks_of, small_layout
from streams import Stream

from npu_prompt_cache import sim

LAYOUT = small_layout(num_layers=1, num_kv_heads=64, head_dim=32)


@pytest.fixture
def stream(streams: list[Stream]) -> Stream:
    return streams[0]


def flat(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(-1, *plane.shape[2:])


def test_released_blocks_wait_for_the_stream(make_cache, stream: Stream) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20)
    with sim.late_streams(seed=1, within_calls=10_000):
        lease = cache.acquire([1] * 20, stream=stream.handle)
        stream.copy(cache.value(0)[1], cache.key(0)[1])
        lease.release()
        stats = cache.stats()
        assert stats.fenced_bytes == blocks_of(cache, 2)
        assert cache.check_integrity()
        stream.synchronize()
        cache.acquire([2]).release()
        assert cache.stats().free_bytes + cache.stats().fenced_bytes == stats.pool_bytes
        assert cache.stats().fenced_bytes <= blocks_of(cache, 1)


def test_an_evicted_block_is_not_reused_before_its_readers_are_done(make_cache, stream: Stream) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    prompt = [1] * 16
    with cache.acquire(prompt) as lease:
        flat(cache.key(0))[torch.from_numpy(lease.slots(0, 16))] = 5.0
        lease.commit(prompt)
    with sim.late_streams(seed=2, within_calls=100_000):
        reader = cache.acquire([*prompt, 2], stream=stream.handle)
        block = int(reader.block_table[0])
        target = cache.value(0)[int(reader.block_table[1])]
        stream.copy(target, cache.key(0)[block])  # queued: it will read the block later
        reader.release()
        cache.clear()
        assert cache.stats().fenced_bytes == blocks_of(cache, 2)
        leases = [cache.acquire([first] * 16) for first in range(10, 10 + usable - 2)]
        for lease in leases:
            assert block not in lease.block_table
            flat(cache.key(0))[torch.from_numpy(lease.slots(0, 16))] = 9.0
        stream.synchronize()
        assert (target == 5.0).all()
        for lease in leases:
            lease.release()


def test_a_copy_on_the_callers_stream_is_only_enqueued(make_cache, stream: Stream) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20)
    with cache.acquire([1] * 20) as lease:
        flat(cache.key(0))[torch.from_numpy(lease.slots(0, 20))] = 5.0
        lease.commit([1] * 20)
    with sim.late_streams(seed=3, within_calls=10_000):
        with cache.acquire([1] * 20 + [2], stream=stream.handle) as lease:
            tail = torch.from_numpy(lease.slots(16, 20))
            assert torch.isnan(flat(cache.key(0))[tail]).all()
            stream.synchronize()
            assert (flat(cache.key(0))[tail] == 5.0).all()
        with cache.acquire([1] * 20 + [3]) as lease:  # without a stream the copy has been done
            assert (flat(cache.key(0))[torch.from_numpy(lease.slots(16, 20))] == 5.0).all()


def test_a_reader_on_another_stream_waits_for_the_writer(make_cache, streams: list[Stream]) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20)
    outside = make_cache(LAYOUT, pool_bytes=4 << 20)
    source, target = outside.key(0), outside.value(0)
    source.fill_(5.0)
    writer, reader, _ = streams
    with sim.late_streams(seed=5, within_calls=10_000):
        with cache.acquire([1] * 20, stream=writer.handle) as lease:
            for block in lease.block_table:
                writer.copy(cache.key(0)[int(block)], source[1])
            lease.commit([1] * 20)
        with cache.acquire([1] * 20 + [2], stream=reader.handle) as lease:
            assert lease.cached_tokens == 20
            for place, block in enumerate(lease.block_table):
                reader.copy(target[place], cache.key(0)[int(block)])
            reader.synchronize()
        assert (flat(target)[:20] == 5.0).all()


def test_waiting_for_fenced_blocks_instead_of_failing(make_cache) -> None:
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    usable = cache.stats().pool_bytes // LAYOUT.block_bytes
    with sim.late_streams(seed=4, within_calls=50):
        for first in range(50):
            with cache.acquire([first] * (16 * usable)) as lease:
                lease.commit([first] * (16 * usable))
            cache.check_integrity()


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_on_late_streams_read_what_was_written(make_cache, streams: list[Stream], seed: int) -> None:
    """Writes and reads are queued copies; every hit must read the values that its tokens stand for."""
    cache = make_cache(LAYOUT, pool_bytes=4 << 20, watermark_bytes=0)
    rng = random.Random(seed)
    # Sources to copy from and a place to read to, in device memory: a second pool stands in for the model's.
    outside = make_cache(LAYOUT, pool_bytes=4 << 20)
    values, target = outside.key(0), outside.value(0)
    for token in range(20):
        values[token] = float(token)
    row = lambda plane, slot: flat(plane)[int(slot)]
    prompts: list[list[int]] = [[1]]
    with sim.late_streams(seed=seed, within_calls=40):
        for _ in range(150):
            old = rng.choice(prompts[-8:])
            prompt = old[: rng.randrange(len(old) + 1)] + [rng.randrange(20) for _ in range(rng.randrange(1, 30))]
            prompt = prompt[:100]
            stream = rng.choice(streams)
            lease = cache.acquire(prompt, stream=stream.handle)
            slots = lease.slots(0, len(prompt))
            for at in range(lease.cached_tokens, len(prompt)):
                stream.copy(row(cache.key(0), slots[at]), values[prompt[at]][0])
            checked = rng.sample(range(len(prompt)), min(5, len(prompt)))
            for place, at in enumerate(checked):
                stream.copy(row(target, place), row(cache.key(0), slots[at]))
            if rng.random() < 0.9:
                lease.commit(prompt)
                prompts.append(prompt)
            lease.release()
            if rng.random() < 0.2:
                stream.synchronize()
                read = [float(row(target, place)[0, 0]) for place in range(len(checked))]
                assert read == [float(prompt[at]) for at in checked]
            cache.check_integrity()
        for stream in streams:
            stream.synchronize()
    assert cache.stats().hit_tokens > 0
