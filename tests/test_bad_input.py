"""Every wrong value is a typed error that names the value and the limit, and changes nothing."""

from __future__ import annotations

import array
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from layouts import small_layout

import npu_prompt_cache as npc
from npu_prompt_cache import sim

BAD_IDS = [
    ([], ValueError, "empty"),
    ((), ValueError, "empty"),
    (np.zeros(0, np.int64), ValueError, "empty"),
    (torch.zeros(0, dtype=torch.long), ValueError, "empty"),
    ([1, -1], ValueError, r"token_ids\[1\] = -1.*0 to 2147483647"),
    (np.array([5, -7]), ValueError, r"token_ids\[1\] = -7"),
    (torch.tensor([-1]), ValueError, r"token_ids\[0\] = -1"),
    ([2**31], ValueError, r"token_ids\[0\] = 2147483648"),
    ([2**70], ValueError, rf"token_ids\[0\] = {2**70}"),
    (np.array([0, 2**31]), ValueError, r"token_ids\[1\] = 2147483648"),
    (np.array([2**63], np.uint64), ValueError, rf"token_ids\[0\] = {2**63}"),
    (np.array([2**32 - 1], np.uint32), ValueError, r"token_ids\[0\] = 4294967295"),
    ([1.0], TypeError, r"token_ids\[0\] is a float"),
    (["1"], TypeError, r"token_ids\[0\] is a str"),
    ([None], TypeError, r"token_ids\[0\] is a NoneType"),
    (np.array([1.0]), TypeError, "format 'd'"),
    (torch.tensor([1.5]), TypeError, "format 'f'"),
    ([True], TypeError, r"token_ids\[0\] is a bool"),
    (np.array([True]), TypeError, "format '?'"),
    (torch.tensor([True]), TypeError, "format '?'"),
    ([[1, 2]], TypeError, r"token_ids\[0\] is a list"),
    (np.zeros((2, 3), np.int64), ValueError, "2 dimensions"),
    (np.int64(3), ValueError, "0 dimensions"),
    (torch.zeros(1, 4, dtype=torch.long), ValueError, "2 dimensions"),
    (np.array([1, 2], ">i4"), TypeError, "format '>i'"),
    (np.array(["a"]), TypeError, "format"),
    ("abc", TypeError, "token_ids is a str"),
    (b"abc", TypeError, "token_ids is a bytes"),
    (7, TypeError, "token_ids is a int"),
    (None, TypeError, "token_ids is a NoneType"),
    ({1, 2}, TypeError, "token_ids is a set"),
]


@pytest.mark.parametrize(("ids", "error", "text"), BAD_IDS, ids=[str(i) for i in range(len(BAD_IDS))])
def test_bad_token_ids(make_cache, ids: object, error: type[Exception], text: str) -> None:
    cache = make_cache()
    before = cache.stats()
    with cache.acquire([1, 2, 3]) as lease:
        held = cache.stats()
        for call in (cache.acquire, cache.lookup, lease.commit, lambda ids: cache.insert(ids, [])):
            with pytest.raises(error, match=text):
                call(ids)
        assert cache.stats() == held
        cache.check_integrity()
    after = cache.stats()
    assert (after.entries, after.leases, after.free_bytes) == (
        before.entries,
        before.leases,
        before.free_bytes,
    )


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        np.array([3, 1, 2]),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 9, 1, 9, 2], np.int16)[::2],
        np.array([2, 1, 3])[::-1],
        torch.tensor([3, 1, 2]),
        torch.tensor([3, 1, 2], dtype=torch.int32),
        array.array("q", [3, 1, 2]),
        [np.int32(3), np.int64(1), torch.tensor(2)],
    ],
)
def test_every_kind_of_token_ids_is_the_same_prompt(make_cache, ids: object) -> None:
    cache = make_cache()
    with cache.acquire([3, 1, 2, 7]) as lease:
        lease.commit([3, 1, 2, 7])
    assert cache.lookup(ids).cached_tokens == 3


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"block_size": 0}, ValueError, "block_size=0"),
        ({"block_size": -16}, ValueError, "block_size=-16"),
        ({"block_size": 100}, ValueError, "block_size=100 is not a multiple of 16"),
        ({"block_size": 16.0}, TypeError, "block_size=16.0 is a float"),
        ({"block_size": True}, TypeError, "block_size=True is a bool"),
        ({"num_layers": 0}, ValueError, "num_layers=0"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads=-1"),
        ({"head_dim": 0}, ValueError, "head_dim=0"),
        ({"dtype": torch.int8}, ValueError, "dtype=torch.int8 is not one of torch.float16"),
        ({"dtype": "float16"}, ValueError, "dtype='float16' is not one of"),
        ({"num_kv_heads": 1, "head_dim": 1}, ValueError, "K of layer 0 has 32 bytes.*not a multiple of 64"),
        ({"value_head_dim": 0}, ValueError, "value_head_dim=0"),
        ({"value_head_dim": (16, 2.0)}, TypeError, r"value_head_dim\[1\]=2.0 is a float"),
        ({"num_kv_heads": (2, 2, 2)}, ValueError, "num_kv_heads has 3 values for 2 layers"),
        ({"head_dim": [16, -1]}, ValueError, r"head_dim\[1\]=-1"),
        ({"head_dim": "16"}, TypeError, "head_dim='16' is a str"),
        ({"num_kv_heads": 1, "value_head_dim": (16, 1)}, ValueError, "V of layer 1 has 32 bytes"),
    ],
)
def test_bad_layouts(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        small_layout(**changes)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"pool_bytes": 1 << 20},
            ValueError,
            r"pool_bytes=1048576 is too small: 4 planes.*at least 8388608 bytes",
        ),
        ({"pool_bytes": 0}, ValueError, "pool_bytes=0"),
        ({"pool_bytes": -5}, ValueError, "pool_bytes=-5"),
        ({"pool_bytes": 1e9}, TypeError, "pool_bytes=1000000000.0 is a float"),
        ({"max_gb": 0}, ValueError, "max_gb=0"),
        ({"max_gb": float("nan")}, ValueError, "max_gb=nan"),
        ({"max_gb": float("inf")}, ValueError, "max_gb=inf"),
        ({"max_gb": 1e30}, ValueError, "is more than"),
        ({"pool_bytes": 2**70}, ValueError, "is more than"),
        ({"device": "npu:99999999999"}, ValueError, "device='npu:99999999999'"),
        ({"namespace": "abc"}, TypeError, "namespace='abc' is a str"),
        ({"max_gb": "2"}, TypeError, "max_gb='2' is a str"),
        ({"max_gb": 1, "pool_bytes": 1 << 30}, ValueError, "max_gb=1 and pool_bytes=1073741824"),
        (
            {"pool_bytes": 16 << 20, "watermark_bytes": 16 << 20},
            ValueError,
            "watermark_bytes=16777216.*pool_bytes=16777216",
        ),
        ({"pool_bytes": 16 << 20, "watermark_bytes": -1}, ValueError, "watermark_bytes=-1"),
        ({"pool_bytes": 16 << 20, "watermark_bytes": 0.5}, TypeError, "watermark_bytes=0.5"),
        (
            {"pool_bytes": 16 << 20, "watermark_bytes": (16 << 20) - 1},
            ValueError,
            "leaves nothing to cache in",
        ),
        ({"device": "gpu"}, ValueError, "device='gpu' is not 'cpu', 'npu' or 'npu:N'"),
        ({"device": "cpu:0"}, ValueError, "device='cpu:0'"),
    ],
)
def test_bad_pools(options: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        npc.PromptCache(small_layout(), **options)
    assert sim.memory().live_bytes == 0


def test_a_pool_larger_than_the_device_says_what_was_asked() -> None:
    with (
        sim_hbm(64 << 20),
        pytest.raises(npc.AclError, match=r"aclrtMalloc of \d+ bytes for the pool \(67108864 of") as caught,
    ):
        npc.PromptCache(small_layout(), pool_bytes=128 << 20)
    assert (caught.value.code, caught.value.name) == (207001, "ACL_ERROR_RT_MEMORY_ALLOCATION")


def test_planes_must_stay_below_the_operators_limit() -> None:
    layout = npc.KVLayout(num_layers=1, num_kv_heads=128, head_dim=128, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"fewer than 2147483648"):
        npc.PromptCache(layout, max_gb=8.1)
    only_one_is_large = npc.KVLayout(2, (1, 128), 128, torch.float16, value_head_dim=(128, 1))
    with pytest.raises(ValueError, match=r"a plane of \d+ elements"):
        npc.PromptCache(only_one_is_large, max_gb=4.2)


def uses_of(lease: npc.Lease) -> list[Callable[[], object]]:
    return [
        lambda: lease.commit([1, 2, 3]),
        lambda: lease.extend(1),
        lambda: lease.slots(0, 1),
        lambda: lease.block_table,
        lambda: lease.length,
    ]


def test_use_after_close(make_cache) -> None:
    cache = make_cache()
    lease = cache.acquire([1, 2, 3])
    other = cache.acquire([1, 2, 3])
    cache.close()
    cache.close()
    calls = [
        lambda: cache.acquire([1]),
        lambda: cache.lookup([1]),
        lambda: cache.insert([1], [(torch.zeros(1, 2, 16, dtype=torch.float16),) * 2] * 2),
        lambda: cache.key(0),
        cache.stats,
        cache.clear,
        *uses_of(lease),
    ]
    for call in calls:
        with pytest.raises(npc.CacheClosed, match="closed"):
            call()
    lease.release()
    del other
    assert cache.check_integrity()
    assert "closed" in repr(cache)


def test_use_after_release(make_cache) -> None:
    cache = make_cache()
    lease = cache.acquire([1, 2, 3])
    lease.release()
    for call in [lease.release, *uses_of(lease)]:
        with pytest.raises(npc.LeaseReleased, match="released"):
            call()
    with lease:
        pass  # leaving is quiet: somebody released it on purpose
    assert repr(lease) == "Lease(cached_tokens=0, released)"


def test_bad_commits_change_nothing(make_cache) -> None:
    cache = make_cache()
    prompt = list(range(40))
    with cache.acquire(prompt[:30]) as lease:
        lease.commit(prompt[:30])
    with cache.acquire(prompt) as lease:
        before = cache.stats()
        for ids, text in [
            (prompt[:29], "commit of 29 tokens: at least 30"),
            ([*prompt, 1], "commit of 41 tokens: the lease has slots for 40"),
            ([9, *prompt[1:]], "token 0 is 9, was 0"),
            ([*prompt[:16], 99, *prompt[17:]], "token 16 is 99, was 16"),
            ([*prompt[:39], 99], "token 39 is 99, was 39"),
        ]:
            with pytest.raises(ValueError, match=text):
                lease.commit(ids)
            assert cache.stats() == before
        lease.commit(prompt[:35])
        lease.extend(5)
        with pytest.raises(ValueError, match="commit of 34 tokens: at least 35"):
            lease.commit(prompt[:34])
        with pytest.raises(ValueError, match="token 37 is 99, was 37"):
            lease.commit([*prompt[:37], 99])
        lease.commit([*prompt, 1, 2])
        with pytest.raises(ValueError, match="token 41 is 3, was 2"):
            lease.commit([*prompt, 1, 3, 4])
        assert cache.lookup([*prompt, 1, 2, 3]).cached_tokens == 42


def test_bad_slots_and_extends(make_cache) -> None:
    cache = make_cache()
    with cache.acquire([1, 2, 3]) as lease:
        for start, stop in [(-1, 2), (2, 1), (0, 4)]:
            with pytest.raises(ValueError, match=re.escape(f"slots({start}, {stop})") + r".*\[0, 3\)"):
                lease.slots(start, stop)
        with pytest.raises(ValueError, match=r"extend\(-1\)"):
            lease.extend(-1)
        with pytest.raises(TypeError):
            lease.extend(1.5)
        for count in (10**12, 2**63 - 1):
            with pytest.raises(npc.PoolExhausted, match=f"{count} tokens more"):
                lease.extend(count)
        lease.extend(0)
        assert lease.length == 3
    with pytest.raises(TypeError, match="salt=3 is a int"):
        cache.acquire([1], salt=3)


def test_ids_that_change_while_they_are_read(make_cache) -> None:
    class Emptying:
        def __index__(self) -> int:
            ids.clear()
            return 5

    ids: list[object] = [Emptying(), *range(10**5, 2 * 10**5)]
    with make_cache(pool_bytes=64 << 20).acquire(ids) as lease:
        assert lease.length == 10**5 + 1


def test_bad_inserts(make_cache) -> None:
    cache = make_cache()
    good = torch.zeros(3, 2, 16, dtype=torch.float16)
    for kv, text in [
        ([(good, good)], "kv has 1 layers, the layout has 2"),
        ([(good, good), (good, good[:2])], "V of layer 1 is"),
        ([(good, good.float())] * 2, "V of layer 0 is"),
        ([(good.transpose(0, 1).contiguous().transpose(0, 1), good)] * 2, "K of layer 0 is not contiguous"),
    ]:
        with pytest.raises(ValueError, match=text):
            cache.insert([1, 2, 3], kv)
    assert cache.stats().entries == 0


def test_bad_planes(make_cache) -> None:
    cache = make_cache()
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer={layer} is not in \[0, 2\)"):
            cache.key(layer)


class sim_hbm:
    """A smaller device for a while."""

    def __init__(self, hbm_bytes: int) -> None:
        self.hbm_bytes = hbm_bytes

    def __enter__(self) -> None:
        self.before = sim.configuration().hbm_bytes
        sim.configure(hbm_bytes=self.hbm_bytes)

    def __exit__(self, *error: object) -> None:
        sim.configure(hbm_bytes=self.before)
