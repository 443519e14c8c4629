"""scripts/replay_trace.py: what it counts is what independent counts say, and LRU is never worse than a plain list."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "replay_trace.py"


@functools.cache
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replay_trace", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_trace(path: Path, requests: int, seed: int, widths: tuple[int, ...] = (3, 4, 6, 8)) -> Path:
    """Requests that walk down a random tree: an id stands for a block and all before it."""
    rng = random.Random(seed)
    numbers: dict[tuple[int, ...], int] = {}
    lines = []
    for _ in range(requests):
        walk = tuple(min(int(rng.expovariate(1.0)), width) for width in widths[: rng.randrange(1, len(widths) + 1)])
        ids = [numbers.setdefault(walk[: n + 1], 10**12 + len(numbers)) for n in range(len(walk))]
        lines.append(json.dumps({"hash_ids": ids, "input_length": 512 * len(ids) - rng.randrange(512)}))
    path.write_text("\n".join(lines))
    return path


def never_less(ours: list[int], theirs: list[int]) -> bool:
    return all(a >= b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_lru_hits_no_less_than_a_plain_list_in_any_request(tmp_path: Path, seed: int) -> None:
    """Both keep what the latest requests touched; of the last of those, the list keeps ends that nothing precedes."""
    tool = script()
    trace = tool.read(write_trace(tmp_path / "trace", 1_000, seed))
    more = 0
    for capacity in (4, 5, 7, 11, 20, 50):
        ours, _ = tool.replay(trace, capacity, policy="lru")
        plain = tool.plain_list(trace, capacity)
        assert never_less(ours, plain)
        assert sum(plain) <= sum(ours) <= sum(tool.optimum(trace, capacity))
        lfu, _ = tool.replay(trace, capacity, policy="lfu")
        assert sum(lfu) <= sum(tool.optimum(trace, capacity))
        more += sum(ours) - sum(plain)
    assert more > 0


def test_with_room_for_all_every_policy_hits_what_came_before(tmp_path: Path) -> None:
    tool = script()
    trace = tool.read(write_trace(tmp_path / "trace", 500, 1))
    seen: set[int] = set()
    expected = []
    for ids in trace.ids:
        expected.append(sum(block in seen for block in ids))
        seen.update(ids)
    for policy in ("lru", "lfu"):
        assert tool.replay(trace, len(seen), policy=policy)[0] == expected
    assert tool.plain_list(trace, len(seen)) == tool.optimum(trace, len(seen)) == expected


def most_hits(ids: list[list[int]], capacity: int) -> int:
    """By trying all that may be kept after each request."""
    states = {frozenset[int](): 0}
    for blocks in ids:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            hits += next((n for n, block in enumerate(blocks) if block not in kept), len(blocks))
            there = kept | set(blocks)
            for some in itertools.combinations(there, min(capacity, len(there))):
                state = frozenset(some)
                after[state] = max(after.get(state, 0), hits)
        states = after
    return max(states.values())


@pytest.mark.parametrize("seed", range(10))
def test_nothing_hits_more_than_the_optimum(tmp_path: Path, seed: int) -> None:
    tool = script()
    trace = tool.read(write_trace(tmp_path / "trace", 14, seed, widths=(2, 2, 1)))
    for capacity in (3, 4):
        assert sum(tool.optimum(trace, capacity)) == most_hits(trace.ids, capacity)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"hash_ids": [1, 2], "input_length": 1000}, {"hash_ids": [1, 2, 3], "input_length": 1030}]
    trace = tmp_path / "trace"
    trace.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["replay_trace.py", str(trace), "--capacity", "inf", "3"])
    script().main()
    rows = [line.split()[:-1] for line in capsys.readouterr().out.splitlines()]
    # 2 of 5 blocks, and 1,024 of 2,030 tokens
    assert ["unlimited", "lru", "40.00", "50.44"] in rows
    assert ["unlimited", "optimum", "40.00", "50.44"] in rows
    monkeypatch.setattr(sys, "argv", ["replay_trace.py", str(trace), "--capacity", "2"])
    with pytest.raises(SystemExit):
        script().main()
    assert "a capacity of 2 blocks is below the 3 of the longest request" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"hash_ids": [1]}', '{"hash_ids": 1, "input_length": 2}', "{"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        script().read(path)
