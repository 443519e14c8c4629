"""The run: every request twice, without and with the cache, every figure noted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import npu_prompt_cache as npc
from npu_prompt_cache import sim
from npu_prompt_cache.demo import shop
from npu_prompt_cache.demo.chat import Conversation
from npu_prompt_cache.demo.count import PrefixCount
from npu_prompt_cache.demo.errors import DemoError
from npu_prompt_cache.demo.figures import Request, Result, Settings
from npu_prompt_cache.demo.model import share_weights
from npu_prompt_cache.demo.progress import bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WARM_UP_TOKENS = 64


class _Generated(NamedTuple):
    ids: list[int]
    prefill_ms: float
    total_ms: float


class _FirstTokenClock:
    """A streamer that notes when the first token of the answer is there."""

    def __init__(self) -> None:
        self._puts = 0
        self.first_token_at = 0.0

    def put(self, _ids: torch.Tensor) -> None:
        """Called with the prompt, before it is computed, then with each token."""
        self._puts += 1
        if self._puts == 2:
            self.first_token_at = time.perf_counter()

    def end(self) -> None:
        """Nothing to do."""


def run(model: PreTrainedModel, tokenizer: Any, settings: Settings) -> Result:
    """Runs the demo: customers take turns, as a server would see them. The model is left as it was.

    Raises:
        DemoError: the pool cannot be made.
    """
    plain = share_weights(model)
    if settings.device == "cpu":
        sim.reset_counters()
    try:
        cache = npc.enable(model, max_gb=settings.max_gb)
    except ValueError as error:
        raise DemoError(f"a pool of {settings.max_gb:g} GiB cannot be made: {error}") from error
    try:
        _warm_up(model, plain, cache)
        lookups = cache.stats().lookups
        requests = _serve(model, plain, cache, tokenizer, settings)
        cache.check_integrity()
        stats = cache.stats()
        return Result(
            settings=settings,
            requests=requests,
            stats=stats,
            lookups=stats.lookups - lookups,
            **_copied(cache),
            block_bytes=cache.layout.block_bytes,
            threads=torch.get_num_threads(),
        )
    finally:
        npc.disable(model)


def _serve(
    model: PreTrainedModel,
    plain: PreTrainedModel,
    cache: npc.PromptCache,
    tokenizer: Any,
    settings: Settings,
) -> list[Request]:
    customers = list(shop.QUESTIONS)[: settings.customers]
    conversations = {customer: Conversation(tokenizer, shop.SYSTEM_PROMPT) for customer in customers}
    count = PrefixCount()
    requests: list[Request] = []
    requests_count = settings.customers * settings.turns
    with _counted_tokens(model) as model_tokens, bar("Requests", requests_count, "request") as progress:
        for turn in range(1, settings.turns + 1):
            for customer in customers:
                progress.set_description(f"{customer}, turn {turn}")
                question = shop.QUESTIONS[customer][turn - 1]
                requests.append(
                    _request(
                        model,
                        model_tokens,
                        plain,
                        cache,
                        conversations[customer],
                        count,
                        customer,
                        turn,
                        question,
                        settings,
                    )
                )
                progress.update()
    return requests


def _request(
    model: PreTrainedModel,
    model_tokens: list[int],
    plain: PreTrainedModel,
    cache: npc.PromptCache,
    conversation: Conversation,
    count: PrefixCount,
    customer: str,
    turn: int,
    question: str,
    settings: Settings,
) -> Request:
    prompt = conversation.ask(question)
    expected = count.cached_tokens(prompt)
    without = _generate(plain, prompt, settings.new_tokens)
    stats, copied = cache.stats(), _copied(cache)["copy_bytes"]["D2D"]
    model_tokens.clear()
    cached = _generate(model, prompt, settings.new_tokens)
    count.add(prompt, cached.ids)
    return Request(
        customer=customer,
        turn=turn,
        question=question,
        answer=conversation.answer(cached.ids),
        prompt_tokens=len(prompt),
        computed_tokens=cache.stats().computed_tokens - stats.computed_tokens,
        expected_cached_tokens=expected,
        model_tokens=sum(model_tokens),
        answer_tokens=len(cached.ids),
        same_answer=cached.ids == without.ids,
        prefill_ms_without=without.prefill_ms,
        prefill_ms_with=cached.prefill_ms,
        total_ms_without=without.total_ms,
        total_ms_with=cached.total_ms,
        d2d_bytes=_copied(cache)["copy_bytes"]["D2D"] - copied,
    )


def _copied(cache: npc.PromptCache) -> dict[str, Any]:
    """What `Result` says of copies and allocations. On an NPU the runtime is not ours to ask."""
    if cache.config.device_type == "cpu":
        counters = sim.counters()
        return {
            "copies": counters.copies,
            "copy_bytes": counters.copy_bytes,
            "malloc_calls": counters.calls["aclrtMalloc"],
        }
    stats = cache.stats()
    return {"copies": stats.copies, "copy_bytes": stats.copy_bytes, "malloc_calls": None}


def _generate(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> _Generated:
    """Greedy, so that both models must give the same answer."""
    ids = torch.tensor([prompt], device=model.device)
    clock = _FirstTokenClock()
    start = time.perf_counter()
    output: Any = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    end = time.perf_counter()
    generated = output[0, len(prompt) :].tolist()
    return _Generated(generated, 1e3 * (clock.first_token_at - start), 1e3 * (end - start))


@contextmanager
def _counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts the tokens that really go through the model, at its very first layer.

    One hook for the whole run: a hook may change what a model computes, so the cache keeps entries apart by it.
    """
    counts: list[int] = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _module, inputs: counts.append(inputs[0].numel())
    )
    try:
        yield counts
    finally:
        hook.remove()


def _warm_up(model: PreTrainedModel, plain: PreTrainedModel, cache: npc.PromptCache) -> None:
    """A process's first forward pays for threads and page faults: neither way is to pay for the other."""
    prompt = [model.config.bos_token_id or 0] * _WARM_UP_TOKENS
    for one in (plain, model):
        _generate(one, prompt, new_tokens=2)
    cache.clear()
