"""Warming a cache: prompts go through the attached model once, so that requests which begin like them hit."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from npu_prompt_cache.cache import Pin
from npu_prompt_cache.integrations.transformers.identity import namespace_of_prompt
from npu_prompt_cache.integrations.transformers.paged_cache import CacheBypassWarning
from npu_prompt_cache.integrations.transformers.rotary import rotary_lengths
from npu_prompt_cache.template import Prompt, PromptTemplate

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel

    from npu_prompt_cache.cache import PromptCache


class Warmed:
    """What `PromptCache.warm` did. A context manager, which unpins what was pinned.

    Attributes:
        cached_tokens: of each prompt, in the order given: all of its tokens (of a deterministic cache, of its whole
            blocks), or fewer where `problems` says why.
        computed_tokens: tokens that went through the model.
        problems: why a prompt is not cached whole, by its place among the prompts.
    """

    def __init__(
        self, cached_tokens: list[int], computed_tokens: int, problems: dict[int, str], pins: ExitStack
    ) -> None:
        self.cached_tokens = cached_tokens
        self.computed_tokens = computed_tokens
        self.problems = problems
        self._pins = pins

    def release(self) -> None:
        """Lets the prompts be evicted again. May be called again."""
        self._pins.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        whole = len(self.cached_tokens) - len(self.problems)
        return f"Warmed({whole} of {len(self.cached_tokens)} prompts, {self.computed_tokens} tokens computed)"


def warm(cache: PromptCache, prompts: Iterable[Any], tokenizer: Any, batch_tokens: int, pin: bool) -> Warmed:
    """See `PromptCache.warm`."""
    work = _Work(cache, _token_ids(prompts, tokenizer))
    with ExitStack() as pins:  # an error unpins what was pinned so far
        total = sum(len(ids) for ids in work.distinct)
        with tqdm(total=total, desc="Warming", unit="token", delay=2, leave=False, disable=None) as bar:
            for batch in work.batches(batch_tokens):
                work.run(batch)
                if pin:
                    for one in batch:
                        pins.enter_context(work.pin(one.ids))
                bar.update(sum(len(one.ids) for one in batch))
        cached, problems = work.outcome()
        kept = pins.pop_all()
    if problems:
        at, problem = next(iter(problems.items()))
        warnings.warn(
            f"{len(problems)} of {len(cached)} prompts are not cached whole; prompt {at}: {problem}",
            CacheBypassWarning,
            stacklevel=3,
        )
    return Warmed(cached, work.computed_tokens, problems, kept)


class _Run(NamedTuple):
    """A prompt, and how many of its tokens are cached before it runs, or computed by the one before it."""

    ids: npt.NDArray[np.int64]
    cached_tokens: int

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.cached_tokens


class _Work:
    """The prompts, sorted so that those with a common prefix are neighbours; of equal beginnings only the longest."""

    def __init__(self, cache: PromptCache, prompts: list[npt.NDArray[np.int64]]) -> None:
        self._cache = cache
        self._model = _attached_model(cache)
        # Rows of a deterministic cache share nothing, and where keys depend on the longest row, each has its own.
        self._one_by_one = cache.deterministic or not rotary_lengths(self._model).are_fixed
        #: What can be published of each: a deterministic cache keeps whole blocks.
        unit = cache.layout.block_size if cache.deterministic else 1
        self._prompts = [ids[: len(ids) // unit * unit] for ids in prompts]
        #: Big-endian bytes are sorted as the numbers are, and begin with those of a prefix.
        keys = sorted({(self._root(ids), ids.astype(">i8").tobytes()) for ids in self._prompts if len(ids)})
        followed = zip(keys, [*keys[1:], (b"", b"")], strict=False)
        longest = [key for (root, key), (after, longer) in followed if root != after or not longer.startswith(key)]
        self.distinct = [np.frombuffer(key, ">i8").astype(np.int64) for key in longest]
        self.computed_tokens = 0

    def batches(self, batch_tokens: int) -> Iterator[list[_Run]]:
        """Prompts to run together; each batch is to be run before the next one is asked for."""
        batch: list[_Run] = []
        for ids in self.distinct:
            one = self._run_of(ids, batch)
            if batch and (
                self._one_by_one
                or sum(other.new_tokens for other in batch) + one.new_tokens > batch_tokens
                or self._blocks([*batch, one]) > self._room()
            ):
                yield batch
                batch, one = [], self._run_of(ids, [])
            if self._blocks([one]) <= self._room():
                batch.append(one)
        if batch:
            yield batch

    def _run_of(self, ids: npt.NDArray[np.int64], batch: list[_Run]) -> _Run:
        shared = _common(batch[-1].ids, ids) if batch else 0  # of the sorted ones before it, with none has it more
        return _Run(ids, max(self._lookup(ids), shared))

    def run(self, batch: list[_Run]) -> None:
        """One forward of what is not cached of these prompts."""
        new = [one for one in batch if one.new_tokens]
        if not new:
            return
        columns = max(len(one.ids) for one in new)
        ids = np.zeros((len(new), columns), np.int64)
        for row, one in zip(ids, new, strict=True):
            row[columns - len(one.ids) :] = one.ids
        places = np.arange(columns) - np.array([[columns - len(one.ids)] for one in new])
        arguments = {"input_ids": ids, "attention_mask": places >= 0, "position_ids": np.maximum(places, 0)}
        with torch.no_grad():
            self._model(
                **{name: torch.from_numpy(value).to(self._model.device) for name, value in arguments.items()},
                use_cache=True,
                logits_to_keep=1,
            )
        self.computed_tokens += sum(one.new_tokens for one in new)

    def pin(self, ids: npt.NDArray[np.int64]) -> Pin:
        """What is cached of a prompt, and so of all that it begins with."""
        return Pin(self._cache._core.pin(self._root(ids), ids))

    def outcome(self) -> tuple[list[int], dict[int, str]]:
        """Tokens of each prompt that are cached now, and where that is not all of them, why."""
        cached = [self._lookup(ids) for ids in self._prompts]
        short = [at for at, ids in enumerate(self._prompts) if cached[at] < len(ids)]
        return cached, {at: self._problem(self._prompts[at], cached[at]) for at in short}

    def _problem(self, ids: npt.NDArray[np.int64], cached: int) -> str:
        blocks, room = self._blocks([_Run(ids, cached)]), self._room()
        if blocks > room:
            return f"it needs {blocks} blocks, and the pool has {room} that are neither pinned nor in its watermark"
        return "it went through the model, and was evicted for later prompts or not cached at all (under autocast)"

    def _lookup(self, ids: npt.NDArray[np.int64]) -> int:
        return self._cache._core.lookup(self._root(ids), ids)[0] if len(ids) else 0

    def _root(self, ids: npt.NDArray[np.int64]) -> bytes:
        return self._cache._root(None, namespace_of_prompt(self._model, lambda: len(ids)))

    def _blocks(self, runs: list[_Run]) -> int:
        size = self._cache.layout.block_size
        return sum(-(-len(one.ids) // size) - one.cached_tokens // size for one in runs if one.new_tokens)

    def _room(self) -> int:
        """Blocks that prompts may get, by eviction too."""
        stats, block_bytes = self._cache.stats(), self._cache.layout.block_bytes
        usable = stats.pool_bytes - self._cache.config.watermark_bytes - stats.leased_bytes
        return usable // block_bytes - stats.pinned_entries


def _attached_model(cache: PromptCache) -> PreTrainedModel:
    models = [attachment.model for attachment in list(cache._attachments)]
    if len(models) == 1:
        if models[0].training:
            raise ValueError(f"{type(models[0]).__name__} is in training mode, in which nothing is cached: call eval()")
        return models[0]
    if not models:
        raise ValueError("warm() needs a model: attach(model) this cache first, or make it by npc.enable(model)")
    names = ", ".join(type(model).__name__ for model in models)
    raise ValueError(f"warm() runs the one model that is attached, and this cache has {len(models)}: {names}")


def _token_ids(prompts: Iterable[Any], tokenizer: Any) -> list[npt.NDArray[np.int64]]:
    if isinstance(prompts, (str, Prompt, PromptTemplate)):
        raise TypeError(f"prompts is one {type(prompts).__name__}: a list of prompts is needed")
    return [_ids_of(prompt, at, tokenizer) for at, prompt in enumerate(prompts)]


def _ids_of(prompt: Any, at: int, tokenizer: Any) -> npt.NDArray[np.int64]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"prompt {at} is a string: warm(prompts, tokenizer) takes strings")
        prompt = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, Prompt):
        prompt = prompt.token_ids
    elif isinstance(prompt, PromptTemplate):
        prompt = prompt.static_ids
    ids = prompt.numpy(force=True) if isinstance(prompt, torch.Tensor) else np.asarray(prompt)
    if ids.ndim == 2 and len(ids) == 1:  # what a tokenizer returns as a tensor
        ids = ids[0]
    if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise ValueError(
            f"prompt {at} has shape {list(ids.shape)} and dtype {ids.dtype}: a string, a template, or one sequence of "
            "token ids is needed, with at least one"
        )
    return ids.astype(np.int64)


def _common(one: npt.NDArray[np.int64], other: npt.NDArray[np.int64]) -> int:
    """Tokens with which both begin."""
    size = min(len(one), len(other))
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if len(different) else size
