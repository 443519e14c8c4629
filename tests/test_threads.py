"""Eight threads on one cache."""

from __future__ import annotations

import random
import threading

import npu_prompt_cache as npc


def test_8_threads_of_20000_requests_with_exceptions(make_cache) -> None:
    cache = make_cache(pool_bytes=16 << 20)  # small: they evict each other's entries
    errors: list[BaseException] = []
    exhausted = [0] * 8

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(20_000):
                shared = [rng.randrange(8)] * rng.randrange(1, 40)
                prompt = shared + [rng.randrange(1000) for _ in range(rng.randrange(1, 8))]
                try:
                    with cache.acquire(prompt) as lease:
                        assert 0 <= lease.cached_tokens < len(prompt)
                        lease.extend(rng.randrange(4))
                        if rng.random() < 0.05:
                            raise KeyError("in the middle of a request")
                        lease.commit(prompt)
                except KeyError:
                    pass
                except npc.PoolExhausted:
                    exhausted[seed] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache.check_integrity()
    stats = cache.stats()
    assert (stats.leases, stats.pinned_entries, stats.leased_bytes) == (0, 0, 0)
    assert stats.lookups == 8 * 20_000 - sum(exhausted)
    assert stats.hits > 0
    assert stats.evicted_blocks > 0


def test_threads_that_share_one_lease_and_close(make_cache) -> None:
    for _ in range(200):
        cache = make_cache(pool_bytes=16 << 20)
        lease = cache.acquire([1, 2, 3])
        start = threading.Barrier(4)
        errors: list[BaseException] = []

        def run(call, start: threading.Barrier = start, errors: list[BaseException] = errors) -> None:
            start.wait()
            try:
                call()
            except npc.PromptCacheError:
                pass
            except BaseException as error:
                errors.append(error)

        calls = [
            lease.release,
            lambda lease=lease: lease.extend(1),
            lambda lease=lease: lease.commit([1, 2]),
            cache.close,
        ]
        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        if not lease.released:
            lease.release()
        cache.check_integrity()
        cache.close()
