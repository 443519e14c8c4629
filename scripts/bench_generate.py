"""Times generate() with the cache beside what transformers users do without it, on SmolLM2-135M in float32.

Both sides of a row run the same prompts with the same arguments, in turns, and what they generate is compared: a row
whose texts differ ends the run. Figures are medians over the rounds; a ratio is ours through theirs, of each round,
with its median and its range. Prompts are cut from the help texts that come with Python.

* hit: 500 tokens cached, 100 new, to the first token. Theirs: the best that is made by hand, a `DynamicCache` of those
  500 tokens that goes into generate() and is cropped after it.
* cold: 600 tokens of which none is cached, to the first token.
* decode: time of a token after the first, with so many before it. Theirs: that same `DynamicCache`.
* batch: 8 prompts that share 500 tokens and have 100 of their own, none cached, and 32 new tokens of each. Theirs:
  generate_batch() (continuous batching) with block sharing; its pages and its manager are made once, before the first
  round.
* memory: bytes of 100 conversations of 1,000 tokens that share 500, through those of their 50,500 different tokens.
* kvboost (PyPI; where it is installed): the same hit, and how many of the texts are those that the model generates.

    python scripts/bench_generate.py --plot bench.png
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import pydoc_data.topics
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

import npu_prompt_cache as npc
from npu_prompt_cache.demo import model as demo_model

SHARED, OWN = 500, 100
BLOCK_SIZES = (16, 32, 128)


class Row(NamedTuple):
    """A figure of one round each."""

    name: str
    limit: float | None  # of the ratio
    is_rate: bool  # more is better
    unit: str
    ours: list[float]
    theirs: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours through theirs, of each round."""
        return [one / other for one, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def holds(self) -> bool:
        """Whether the median ratio is within the limit."""
        ratio = statistics.median(self.ratios)
        return self.limit is None or (ratio >= self.limit if self.is_rate else ratio <= self.limit)


class Bench:
    """A model as it is and its twin over the same weights, with the cache; and text for prompts."""

    def __init__(self, stack: ExitStack) -> None:
        self.plain, self.tokenizer = demo_model.load("cpu")
        self.cached = demo_model.share_weights(self.plain)
        self.cache = npc.enable(self.cached, max_gb=2)
        stack.callback(npc.disable, self.cached)
        for layer in range(self.cache.layout.num_layers):  # the host gives memory on first touch, a device has it
            self.cache.key(layer).zero_()
            self.cache.value(layer).zero_()
        text = "\n".join(pydoc_data.topics.topics.values())
        self._text = torch.tensor([self.tokenizer(text, add_special_tokens=False)["input_ids"]])
        self._at = 0

    def tokens(self, count: int) -> torch.Tensor:
        """``[1, count]``: text that no prompt before had."""
        self._at += count
        assert self._at <= self._text.shape[1], "the text is used up: fewer rounds"
        return self._text[:, self._at - count : self._at]

    def config(self, new_tokens: int) -> GenerationConfig:
        """Greedy, to so many new tokens."""
        return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(self, model: Any, prompt: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
        """The new tokens, ``[rows, new_tokens]``."""
        mask = torch.ones_like(prompt)
        output = model.generate(prompt, attention_mask=mask, generation_config=self.config(new_tokens), **options)
        return output[:, prompt.shape[1] :]

    def dense(self, prompt: torch.Tensor) -> DynamicCache:
        """A cache of transformers' own that holds the prompt."""
        cache = DynamicCache(config=self.plain.config)
        with torch.inference_mode():
            self.plain(prompt, cache=cache, logits_to_keep=1)
        return cache


class Steps(BaseStreamer):
    """When each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token came, or the prompt."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    @property
    def tokens_per_second(self) -> float:
        """After the first token."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])  # the prompt comes first


def seconds(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def in_turns(
    at: int, ours: Callable[[], tuple[float, Any]], theirs: Callable[[], tuple[float, Any]]
) -> tuple[float, float]:
    """One round of both, each first in every second round; what they generate is the same."""
    if at % 2:
        (other, text), (one, own) = theirs(), ours()
    else:
        (one, own), (other, text) = ours(), theirs()
    if not torch.equal(own, text):
        raise SystemExit(f"the texts differ: {own.tolist()} with the cache, {text.tolist()} without")
    return one, other


def hit(bench: Bench) -> Iterator[tuple[float, float]]:
    shared = bench.tokens(SHARED)
    bench.cache.warm([shared])
    dense = bench.dense(shared)
    at = 0
    while True:
        prompt = torch.cat([shared, bench.tokens(OWN)], dim=1)

        def theirs(prompt: torch.Tensor = prompt) -> torch.Tensor:
            token = bench.generate(bench.plain, prompt, 1, cache=dense)
            dense.crop(-OWN)
            return token

        one, other = in_turns(
            at, lambda p=prompt: seconds(lambda: bench.generate(bench.cached, p, 1)), lambda: seconds(theirs)
        )
        yield 1e3 * one, 1e3 * other
        at += 1


def cold(bench: Bench) -> Iterator[tuple[float, float]]:
    at = 0
    while True:
        bench.cache.clear()
        prompt = bench.tokens(SHARED + OWN)
        calls = [
            lambda m=model, p=prompt: seconds(lambda: bench.generate(m, p, 1)) for model in (bench.cached, bench.plain)
        ]
        one, other = in_turns(at, *calls)
        yield 1e3 * one, 1e3 * other
        at += 1


def decode(bench: Bench, context: int, new_tokens: int) -> Iterator[tuple[float, float]]:
    prompt = bench.tokens(context)
    bench.cache.clear()
    bench.cache.warm([prompt])
    dense = bench.dense(prompt)
    dense.crop(-1)  # generate() wants a token to begin with

    def ours() -> tuple[float, torch.Tensor]:
        steps = Steps()
        text = bench.generate(bench.cached, prompt, new_tokens, streamer=steps)
        return steps.tokens_per_second, text

    def theirs() -> tuple[float, torch.Tensor]:
        steps = Steps()
        text = bench.generate(bench.plain, prompt, new_tokens, cache=dense, streamer=steps)
        dense.crop(-new_tokens)
        return steps.tokens_per_second, text

    at = 0
    while True:
        yield in_turns(at, ours, theirs)
        at += 1


def batch(bench: Bench, stack: ExitStack) -> Iterator[tuple[float, float]]:
    settings = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=2048, max_memory_percent=0.5)
    manager = stack.enter_context(
        bench.plain.continuous_batching_context_manager(
            generation_config=bench.config(32), continuous_batching_config=settings
        )
    )

    def theirs(prompts: torch.Tensor) -> torch.Tensor:
        names = manager.add_requests(prompts.tolist(), max_new_tokens=32)
        done = {}
        while len(done) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result.generated_tokens
        return torch.tensor([done[name] for name in names or done])

    at = 0
    while True:
        bench.cache.clear()
        prompts = torch.cat([bench.tokens(SHARED).expand(8, -1), bench.tokens(8 * OWN).view(8, OWN)], dim=1)
        yield in_turns(
            at,
            lambda p=prompts: seconds(lambda: bench.generate(bench.cached, p, 32)),
            lambda p=prompts: seconds(lambda: theirs(p)),
        )
        at += 1


def memory(bench: Bench, block_size: int) -> tuple[float, float]:
    """Bytes in use, and the fewest that could be: through the index alone, nothing is computed."""
    layout = bench.cache.layout
    layout = npc.KVLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype, block_size)
    rng, shared = np.random.default_rng(0), np.arange(500)
    with npc.PromptCache(layout, pool_bytes=4 << 30) as cache:
        for _ in range(100):
            prompt = np.concatenate([shared, rng.integers(1000, 40_000, 500)])
            with cache.acquire(prompt) as lease:
                lease.commit(prompt)
        return cache.stats().cached_bytes / 2**20, (500 + 100 * 500) * layout.token_bytes / 2**20


def kvboost(bench: Bench, rounds: int, bar: Any) -> tuple[Row, str]:
    """Its time to the first token beside ours; and how many of its texts of 16 tokens are the model's own."""
    from kvboost import KVBoost

    engine = KVBoost(bench.plain, bench.tokenizer, max_cache_bytes=1 << 30, device="cpu")
    shared = bench.tokenizer.decode(bench.tokens(SHARED)[0])
    bench.cache.warm([shared], bench.tokenizer)
    engine.warm(shared)
    row, same = Row("hit TTFT, kvboost", None, False, "ms", [], []), 0
    for _ in range(rounds):
        text = shared + bench.tokenizer.decode(bench.tokens(OWN)[0])
        ids = bench.tokenizer(text, return_tensors="pt")["input_ids"]
        own = bench.generate(bench.plain, ids, 16)
        one, token = seconds(lambda ids=ids: bench.generate(bench.cached, ids, 1))
        assert torch.equal(token, own[:, :1])
        got: list[int] = []
        engine.generate(text, max_new_tokens=16, on_token=got.append, cacheable_prefix_len=SHARED)
        start = time.perf_counter()
        engine.generate(text, max_new_tokens=1, cacheable_prefix_len=SHARED)
        row.theirs.append(1e3 * (time.perf_counter() - start))
        row.ours.append(1e3 * one)
        same += got == own[0, : len(got)].tolist()
        bar.update()
    return row, f"kvboost {importlib.metadata.version('kvboost')}: {same} of {rounds} texts on hits are the model's own"


def run(rounds: int, quick: bool) -> tuple[list[Row], list[str]]:
    with ExitStack() as stack:
        bench = Bench(stack)
        long, new = (1024, 8) if quick else (4096, 32)
        plans = [
            (f"hit TTFT, {SHARED} + {OWN}", 1.03, False, "ms", hit(bench)),
            (f"cold prefill, {SHARED + OWN}", 1.03, False, "ms", cold(bench)),
            ("decode at 512", 1.0, True, "tokens/s", decode(bench, 512, new)),
            (f"decode at {long:,}", 1.2, True, "tokens/s", decode(bench, long, new)),
            ("8 prompts, 32 new", 0.8, False, "s", batch(bench, stack)),
        ]
        rows, notes = [], []
        has_kvboost = importlib.util.find_spec("kvboost") is not None
        with tqdm(total=len(plans) * (rounds + 1) + has_kvboost * rounds, unit="round", leave=False) as bar:
            for name, limit, is_rate, unit, calls in plans:
                bar.set_description(name)
                next(calls)  # the first is not counted
                bar.update()
                row = Row(name, limit, is_rate, unit, [], [])
                for _ in range(rounds):
                    one, other = next(calls)
                    row.ours.append(one)
                    row.theirs.append(other)
                    bar.update()
                rows.append(row)
            for size in BLOCK_SIZES:
                one, other = memory(bench, size)
                rows.append(Row(f"memory, blocks of {size}", 1.1, False, "MiB", [one], [other]))
            if has_kvboost:
                bar.set_description("kvboost")
                row, note = kvboost(bench, rounds, bar)
                rows.append(row)
                notes.append(note)
        return rows, notes


def table(rows: list[Row]) -> str:
    lines = [f"{'':<26}{'ours':>10}{'theirs':>10}  {'':<9}{'ratio':>6}  {'range':<13}{'wanted':>8}"]
    for row in rows:
        ratios = row.ratios
        wanted = "" if row.limit is None else f"{'≥' if row.is_rate else '≤'} {row.limit:g} {'✓' if row.holds else '✗'}"
        lines.append(
            f"{row.name:<26}{statistics.median(row.ours):>10,.1f}{statistics.median(row.theirs):>10,.1f}  "
            f"{row.unit:<9}{statistics.median(ratios):>6.2f}  {f'{min(ratios):.2f} … {max(ratios):.2f}':<13}{wanted:>8}"
        )
    return "\n".join(lines)


def plot(rows: list[Row], file: Path) -> None:
    """Ratios with their ranges; better is to the left of 1 for times and bytes, to the right for rates."""
    figure = Figure(figsize=(8.5, 0.5 * len(rows) + 1.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        ratios = row.ratios
        middle = statistics.median(ratios)
        color = "#1b7837" if row.holds else "#b2182b"
        axes.barh(place, middle, color=color, alpha=0.75, height=0.6)
        axes.plot([min(ratios), max(ratios)], [place, place], color="black", linewidth=1)
        if row.limit is not None:
            axes.plot(row.limit, place, "k|", markersize=18)
        axes.text(max(*ratios, middle) + 0.03, place, f"{middle:.2f}", va="center", fontsize=9)
    axes.axvline(1, color="#636363", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [f"{row.name}{' (more is better)' if row.is_rate else ''}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ours / theirs; line: range of the rounds; bar: what is wanted")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds to take the median of (default 7)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, and shorter contexts: does it run?")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default 2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios into this PNG")
    parser.add_argument("--json", action="store_true", help="print the figures of every round as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    demo_model.quiet_transformers()
    rows, notes = run(2 if options.quick else options.rounds, options.quick)
    print(json.dumps([row._asdict() for row in rows], indent=2) if options.json else table(rows))
    print("\n".join(notes), file=sys.stderr if options.json else sys.stdout)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
