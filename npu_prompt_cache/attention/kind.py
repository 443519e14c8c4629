"""What a layer asks of its attention: which tokens its queries see, and how scores become weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Span(NamedTuple):
    """Which of the tokens up to its own place a query sees: all of them where nothing is said.

    K/V of every token stay in the pool either way, so that a hit may end anywhere.

    Args:
        window: the last so many tokens, its own among them: at place q those with ``q - window < k <= q``.
        chunk: those of its own chunk of so many; chunks are counted from the sequence's first token.
    """

    window: int | None = None
    chunk: int | None = None

    def first_key(self, query: int) -> int:
        """The first token that a query at this place sees; one further on sees none before it."""
        if self.window is not None:
            return max(query - self.window + 1, 0)
        return 0 if self.chunk is None else query // self.chunk * self.chunk

    def limits(self, length: int) -> bool:
        """True where a sequence of so many tokens has some that do not see all before them."""
        return any(reach is not None and reach < length for reach in self)


#: Every token up to its own.
EVERYTHING = Span()


@dataclass(slots=True, eq=False)
class AttentionKind:
    """What a layer asks of its attention, which is causal.

    Args:
        scale: factor on the scores; None for ``head_dim ** -0.5``.
        span: which tokens a query sees.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks: ``[heads]``: each head's queries attend to one more score, with a value of 0.
    """

    scale: float | None = None
    span: Span = EVERYTHING
    softcap: float | None = None
    sinks: torch.Tensor | None = None
