"""What the cache claims, checked on the figures of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from npu_prompt_cache.demo.figures import Request, Result


class Check(NamedTuple):
    """One claim, checked."""

    claim: str
    holds: bool
    #: What was found instead, where it does not hold.
    found: str


def check(result: Result) -> list[Check]:
    """Checks a run."""
    requests = result.requests
    crossed = {kind: result.copy_bytes[kind] for kind in ("H2D", "D2H")}
    checks = [
        _each(requests, "every answer is the same, token by token", _answer),
        _each(requests, "every request computed exactly the tokens that an independent count says", _computed),
        _each(requests, "no more tokens than those went through the model", _model_tokens),
        Check(
            "one lookup a request",
            result.lookups == len(requests),
            f"{result.lookups} lookups for {len(requests)} requests",
        ),
        Check(
            "no K/V went between host and device",
            not any(crossed.values()),
            ", ".join(f"{kind} {size:,} bytes" for kind, size in crossed.items()),
        ),
        _each(
            requests,
            "at most one block a request was copied within the device",
            lambda request: _d2d_bytes(request, result.block_bytes),
        ),
    ]
    if result.malloc_calls is not None:
        found = f"{result.malloc_calls} calls of aclrtMalloc"
        checks.append(Check("device memory was allocated once", result.malloc_calls == 1, found))
    return checks


def _each(requests: list[Request], claim: str, fault_of: Callable[[Request], str | None]) -> Check:
    faults = [(request, fault_of(request)) for request in requests]
    found = [f"{request.customer}, turn {request.turn}: {fault}" for request, fault in faults if fault]
    return Check(claim, not found, "; ".join(found))


def _answer(request: Request) -> str | None:
    return None if request.same_answer else "the answers differ"


def _computed(request: Request) -> str | None:
    expected = request.prompt_tokens - request.expected_cached_tokens
    if request.computed_tokens == expected:
        return None
    return (
        f"computed {request.computed_tokens} of {request.prompt_tokens} prompt tokens, the count says {expected} "
        "(it knows no eviction: is the pool large enough?)"
    )


def _model_tokens(request: Request) -> str | None:
    # The last token of an answer is chosen, but does not go through the model.
    expected = request.computed_tokens + request.answer_tokens - 1
    if request.model_tokens == expected:
        return None
    return f"{request.model_tokens} tokens went through the model, not {expected}"


def _d2d_bytes(request: Request, block_bytes: int) -> str | None:
    if request.d2d_bytes <= block_bytes:
        return None
    return f"{request.d2d_bytes:,} bytes, a block has {block_bytes:,}"
