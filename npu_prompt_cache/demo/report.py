"""The figures for people, as a table, and for programs, as JSON."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
import transformers

import npu_prompt_cache as npc
from npu_prompt_cache.demo.checks import Check
from npu_prompt_cache.demo.figures import Request, Result

#: Goes up when a field of the JSON changes its meaning or goes.
JSON_FORMAT = 1

_HEADINGS = (
    ("", "", "prompt", "", "", "prefill ms", "prefill ms", "", "same"),
    ("customer", "turn", "tokens", "cached", "computed", "without", "with", "speed-up", "answer"),
)
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Totals:
    """Sums over all requests."""

    prompt_tokens: int
    computed_tokens: int
    prefill_ms_without: float
    prefill_ms_with: float
    total_ms_without: float
    total_ms_with: float

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found."""
        return self.prompt_tokens - self.computed_tokens

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was found, 0 ... 1: prefill work that was saved."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def prefill_time_saved(self) -> float:
        """Share of the prefill time that was saved, 0 ... 1."""
        return 1 - self.prefill_ms_with / self.prefill_ms_without


def totals(requests: Sequence[Request]) -> Totals:
    """Sums the requests up."""
    names = [field.name for field in dataclasses.fields(Totals)]
    return Totals(**{name: sum(getattr(request, name) for request in requests) for name in names})


def median_speedup(requests: Sequence[Request]) -> float:
    """Of the prefill. Unlike the sums, one request that was slowed down from outside does not move it."""
    return statistics.median(request.speedup for request in requests)


def as_text(result: Result, checks: Sequence[Check], model_name: str) -> str:
    """Everything that a person reads: sample, table, totals, checks."""
    settings = result.settings
    head = (
        f"{model_name}, float32, {settings.device}, {result.threads} threads: {settings.customers} customers, "
        f"{settings.turns} turns each, one shared system prompt"
    )
    parts = (
        head,
        _sample(result.requests[0]),
        table(result.requests),
        _totals_text(result),
        _checks_text(checks),
    )
    return "\n\n".join(parts)


def table(requests: Sequence[Request]) -> str:
    """One line a request."""
    rows = [*_HEADINGS, *(_row(request) for request in requests)]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([*lines[: len(_HEADINGS)], rule, *lines[len(_HEADINGS) :]])


def as_json(result: Result, checks: Sequence[Check], model_name: str) -> dict[str, Any]:
    """All figures, and what they were measured with. Times are ms, sizes are bytes."""
    return {
        "format": JSON_FORMAT,
        "ok": all(check.holds for check in checks),
        "model": model_name,
        "versions": {
            "npu_prompt_cache": npc.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {"platform": platform.platform(), "threads": result.threads},
        "settings": dataclasses.asdict(result.settings),
        "requests": [_request_json(request) for request in result.requests],
        "totals": {
            **_totals_json(totals(result.requests)),
            "median_speedup": median_speedup(result.requests),
        },
        "pool": {
            "pool_bytes": result.stats.pool_bytes,
            "cached_bytes": result.stats.cached_bytes,
            "free_bytes": result.stats.free_bytes,
            "block_bytes": result.block_bytes,
        },
        "runtime": {
            "file": result.stats.runtime,
            "malloc_calls": result.malloc_calls,
            "copies": result.copies,
            "copy_bytes": result.copy_bytes,
        },
        "checks": [check._asdict() for check in checks],
    }


def _row(request: Request) -> tuple[str, ...]:
    return (
        request.customer,
        f"{request.turn}",
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.computed_tokens:,}",
        f"{request.prefill_ms_without:,.0f}",
        f"{request.prefill_ms_with:,.0f}",
        f"{request.speedup:.1f}x",
        "✓" if request.same_answer else "✗",
    )


def _sample(request: Request) -> str:
    def wrap(who: str, text: str) -> str:
        return textwrap.fill(" ".join(text.split()), 100, initial_indent=f"{who}: ", subsequent_indent="  ")

    return f"{wrap(request.customer, request.question)}\n{wrap('Paige', request.answer)}"


def _totals_text(result: Result) -> str:
    sums, stats = totals(result.requests), result.stats
    copies = ", ".join(f"{kind} {result.copies[kind]:,} ({result.copy_bytes[kind]:,} bytes)" for kind in result.copies)
    lines = [
        (
            "prefill tokens",
            f"{sums.prompt_tokens:,} without the cache, {sums.computed_tokens:,} with it: "
            f"{sums.hit_rate:.1%} saved (hit rate)",
        ),
        (
            "prefill time",
            f"{sums.prefill_ms_without / 1e3:.1f} s without the cache, {sums.prefill_ms_with / 1e3:.1f} s with it: "
            f"{_saved(sums.prefill_time_saved)}; median speed-up {median_speedup(result.requests):.1f}x",
        ),
        (
            "whole requests",
            f"{sums.total_ms_without / 1e3:.1f} s without the cache, {sums.total_ms_with / 1e3:.1f} s with "
            "it (generation included)",
        ),
        (
            "pool",
            f"{stats.cached_bytes / _MIB:,.0f} of {stats.pool_bytes / _MIB:,.0f} MiB hold {stats.entries:,} "
            f"entries, in blocks of {result.block_bytes / _MIB:.1f} MiB",
        ),
        ("copies", copies),
    ]
    if result.malloc_calls is not None:
        lines.append(("device memory", f"aclrtMalloc was called {result.malloc_calls} time(s)"))
    return "\n".join(f"{name:<15} {text}" for name, text in lines)


def _saved(share: float) -> str:
    return f"{share:.1%} saved" if share >= 0 else f"{-share:.1%} more"


def _checks_text(checks: Sequence[Check]) -> str:
    return "\n".join(f"{'✓' if holds else '✗'} {claim}" for claim, holds, _ in checks)


def _request_json(request: Request) -> dict[str, Any]:
    return {**dataclasses.asdict(request), "cached_tokens": request.cached_tokens, "speedup": request.speedup}


def _totals_json(sums: Totals) -> dict[str, Any]:
    return {
        **dataclasses.asdict(sums),
        "cached_tokens": sums.cached_tokens,
        "hit_rate": sums.hit_rate,
        "prefill_time_saved": sums.prefill_time_saved,
    }
