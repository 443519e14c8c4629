from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from layouts import small_layout
from streams import Stream

import npu_prompt_cache as npc
from npu_prompt_cache import sim

# Tiny models gain nothing from threads, and threads that spin while they wait lose minutes on a busy machine.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run sweeps in full instead of samples of them")


@pytest.fixture(autouse=True)
def _runtime_is_left_clean() -> Iterator[None]:
    """Every test leaves the simulated runtime as it found it: no allocation more, and no violation."""
    sim.clear_faults()
    sim.prompt_streams()
    sim.clear_violations()
    before = sim.memory()
    yield
    sim.clear_faults()
    sim.prompt_streams()
    gc.collect()
    after = sim.memory()
    assert (after.live_allocations, after.live_bytes) == (before.live_allocations, before.live_bytes)
    assert sim.violations() == []
    # What is alive now, mostly code that was imported, is not walked again by the collections to come.
    gc.freeze()


@pytest.fixture
def make_cache() -> Iterator[Callable[..., npc.PromptCache]]:
    """Makes caches that are checked and closed after the test."""
    made: list[npc.PromptCache] = []

    def make(layout: npc.KVLayout | None = None, **options: object) -> npc.PromptCache:
        options.setdefault("pool_bytes", 32 << 20)
        cache = npc.PromptCache(layout or small_layout(), **options)  # type: ignore[arg-type]
        made.append(cache)
        return cache

    yield make
    sim.clear_faults()
    sim.prompt_streams()
    for cache in made:
        if not cache._core.closed:
            cache.check_integrity()
            assert cache.stats().leases == 0
            assert cache.stats().pinned_entries == 0
            cache.close()
    made.clear()  # pytest keeps the fixture's value, and so this list, until after the other fixtures' ends


@pytest.fixture
def streams(make_cache: Callable[..., npc.PromptCache]) -> Iterator[list[Stream]]:
    """Three streams of a caller's own."""
    make_cache().close()  # initialises the runtime
    streams = [Stream() for _ in range(3)]
    yield streams
    for stream in streams:
        stream.synchronize()
        stream.destroy()
