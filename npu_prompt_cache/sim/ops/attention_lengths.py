"""The lengths of the requests of one call, as torch_npu's attention operators take them.

Packed layouts (with a ``T``) take where each request ends, a running sum; the others take one length per request,
or one for all. With K/V in blocks, their lengths are per request in every layout.
"""

from collections.abc import Sequence

from npu_prompt_cache.sim.ops.registry import require

__all__ = ["ends", "per_request"]

_MOST_PACKED = 4096


def per_request(
    op: str, name: str, lengths: Sequence[int] | None, requests: int, limit: int | None, of: str
) -> list[int]:
    """One length per request.

    Args:
        name: of the operator's parameter.
        lengths: None: all are ``limit``; one: that for all; at least ``requests``: the first of them.
        limit: the greatest a length can be, which is what ``of`` has; None: that is checked elsewhere.
    """
    if lengths is None:
        assert limit is not None
        return [limit] * requests
    given = [int(length) for length in lengths]
    require(
        len(given) == 1 or len(given) >= requests,
        op,
        f"{name} has one length for all requests, or at least one for each",
        f"{len(given)} lengths for {requests} requests",
    )
    given = given * requests if len(given) == 1 else given[:requests]
    for request, length in enumerate(given):
        found = f"{length} for request {request}"
        require(length >= 0, op, f"{name}: no length is negative", found)
        require(
            limit is None or length <= limit,
            op,
            f"{name}: no length is more than the S of {of}, which is {limit}",
            found,
        )
    return given


def ends(op: str, name: str, lengths: Sequence[int] | None, tokens: int, of: str) -> list[int]:
    """Where each request of a packed layout ends: ``ends[-1]`` is ``tokens``, the ``T`` of ``of``."""
    require(lengths is not None, op, f"packed layouts (T) need {name}, one running sum per request", None)
    assert lengths is not None
    given = [int(end) for end in lengths]
    require(1 <= len(given) <= _MOST_PACKED, op, f"{name} has 1 to {_MOST_PACKED} elements, one a request", len(given))
    require(
        all(before <= after for before, after in zip([0, *given], given, strict=False)),
        op,
        f"{name} of a packed layout is a running sum: no element is negative or less than the one before it",
        given,
    )
    require(
        given[-1] == tokens,
        op,
        f"the last element of {name} of a packed layout is the number of tokens T of {of}, which is {tokens}",
        given[-1],
    )
    return given
