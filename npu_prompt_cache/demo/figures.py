"""The figures of a run, as they were measured."""

from __future__ import annotations

from dataclasses import dataclass

import npu_prompt_cache as npc
from npu_prompt_cache.demo import shop


@dataclass(frozen=True)
class Settings:
    """What to run."""

    customers: int = len(shop.QUESTIONS)
    turns: int = min(len(questions) for questions in shop.QUESTIONS.values())
    #: The most tokens of an answer.
    new_tokens: int = 40
    #: GiB of the cache's pool.
    max_gb: float = 1.0
    #: Where the model and the pool are: ``"cpu"``, ``"npu"`` or ``"npu:N"``.
    device: str = "cpu"


@dataclass(frozen=True)
class Request:
    """One question, answered without and with the cache.

    Times of the prefill are from the call to the first token of the answer.
    """

    customer: str
    turn: int
    question: str
    answer: str
    prompt_tokens: int
    #: Prompt tokens that the cache says it did not find.
    computed_tokens: int
    #: Prompt tokens that need not be computed, by `PrefixCount`.
    expected_cached_tokens: int
    #: Tokens that went through the attached model: the prompt's computed ones and those of the answer.
    model_tokens: int
    answer_tokens: int
    same_answer: bool
    prefill_ms_without: float
    prefill_ms_with: float
    total_ms_without: float
    total_ms_with: float
    #: Bytes copied within the device for this request.
    d2d_bytes: int

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found."""
        return self.prompt_tokens - self.computed_tokens

    @property
    def speedup(self) -> float:
        """Prefill time without the cache over that with it."""
        return self.prefill_ms_without / self.prefill_ms_with


@dataclass(frozen=True)
class Result:
    """All figures of a run."""

    settings: Settings
    requests: list[Request]
    #: Of the cache, at the end.
    stats: npc.Stats
    #: Lookups of the cache that the requests made.
    lookups: int
    #: Copies by kind over the whole run: on the CPU all that the simulated runtime made, on an NPU the cache's own.
    copies: dict[str, int]
    #: Their bytes.
    copy_bytes: dict[str, int]
    #: Calls of aclrtMalloc over the whole run; None on an NPU, where torch makes its own.
    malloc_calls: int | None
    #: Bytes of one block of the cache in all planes.
    block_bytes: int
    #: Threads that torch computed with.
    threads: int
