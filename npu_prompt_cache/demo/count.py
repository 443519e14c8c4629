"""The independent count: what a perfect prefix cache finds. Plain Python, with no code of the cache in it."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))


class PrefixCount:
    """Remembers every sequence whose K/V some request computed."""

    def __init__(self) -> None:
        self._computed: list[list[int]] = []

    def cached_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of `prompt` that need not be computed: what some earlier sequence began with too.

        The last token is always computed: its logits choose the first token of the answer.
        """
        longest = max((common_prefix(prompt, earlier) for earlier in self._computed), default=0)
        return min(longest, len(prompt) - 1)

    def add(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A request is done. The last generated token was chosen, but never went through the model."""
        self._computed.append([*prompt, *generated[:-1]])
