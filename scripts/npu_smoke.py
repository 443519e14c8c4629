"""The main claims of this project about an NPU, tried on yours, in one command and one report.

    python scripts/npu_smoke.py
    python scripts/npu_smoke.py --device npu:1 --output report.md

Loads the runtime, allocates the pool, wraps its planes as torch tensors, writes and reads them, runs paged attention
against a float64 reference, runs a small random model without and with the cache in each dtype, and times the first
token. Prints a report in Markdown that can be pasted into an issue. The exit status is 0 only if every check holds.
Streams, fences and several devices are left to the tests.

Needs torch-npu and transformers, no download. Without an NPU: `python -m npu_prompt_cache.sim run -- python
scripts/npu_smoke.py`; its times are the CPU's then.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import npu_prompt_cache as npc

DTYPES = (torch.float16, torch.bfloat16)
#: Attention shapes: query heads, key/value heads, head_dim.
SHAPES = ((8, 2, 128), (4, 4, 64), (8, 2, 64), (4, 4, 80))
#: What layers ask for besides, each with every shape: a sliding window, and whether there are sinks.
KINDS = ((None, False), (150, False), (150, True))
#: A batch: new tokens and length of each sequence. Lengths end before, at and after the end of a block.
SEQUENCES = ((1, 300), (7, 129), (128, 128), (200, 456), (1, 1))
#: Largest difference from the reference, for inputs of unit variance.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: The support bot of the README: tokens that every request begins with, and new ones a turn.
SHARED_TOKENS, NEW_TOKENS, TURNS = 500, 100, 5


class Report:
    """Checks and their outcome, timings, and the Markdown of both."""

    def __init__(self) -> None:
        self.facts: list[tuple[str, str]] = []
        self.checks: list[tuple[str, str]] = []  # what, "" or what went wrong
        self.times: list[tuple[str, str]] = []
        self.tracebacks: list[str] = []

    def check(self, what: str, action: Callable[[], None]) -> None:
        """Runs one check. A failure is noted, and the next one runs."""
        print(f"{what} ... ", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        wrong = ""
        try:
            action()
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
            self.tracebacks.append(f"{what}\n{traceback.format_exc()}")
        print(f"{'FAILED' if wrong else 'ok'} ({time.perf_counter() - start:.1f} s)", file=sys.stderr)
        self.checks.append((what, wrong))

    @property
    def ok(self) -> bool:
        """Whether every check so far holds."""
        return all(not wrong for _, wrong in self.checks)

    def markdown(self) -> str:
        """All of it, to paste."""
        lines = ["# npu_prompt_cache on an NPU", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {_cell(value)} |" for name, value in self.facts]
        lines += ["", "| check | outcome |", "|---|---|"]
        lines += [f"| {what} | {'ok' if not wrong else '**FAILED** ' + _cell(wrong)} |" for what, wrong in self.checks]
        lines += ["", "| time to the first token, median | ms |", "|---|---|"]
        lines += [f"| {what} | {found} |" for what, found in self.times]
        for text in self.tracebacks:
            lines += ["", "```", text.rstrip(), "```"]
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:400]


def require(holds: bool, found: str) -> None:
    if not holds:
        raise AssertionError(found)


# ---- the pool ----


def check_pool(device: torch.device, report: Report) -> None:
    layout = npc.KVLayout(num_layers=2, num_kv_heads=2, head_dim=128, dtype=torch.float16)
    made: list[npc.PromptCache] = []
    report.check(
        "the pool is allocated", lambda: made.append(npc.PromptCache(layout, str(device), pool_bytes=64 << 20))
    )
    if not made:
        return
    cache = made[0]
    report.facts.append(("runtime", f"{cache.stats().runtime} ({cache.stats().runtime_found})"))
    try:
        report.check("planes are torch tensors over the pool's own memory", lambda: check_planes(cache))
        report.check("K/V written through torch are read back through a lease", lambda: check_lease(cache))
        report.check("a hit inside a block copies that block's rows on the device", lambda: check_partial_hit(cache))
        report.check("the cache's own books agree", lambda: require(cache.check_integrity(), "they do not"))
    finally:
        cache.close()


def check_planes(cache: npc.PromptCache) -> None:
    blocks = cache.key(0).shape[0]
    cache.key(0).fill_(1.0)
    cache.value(1)[blocks - 1].fill_(2.0)
    found = [cache.key(0)[0, 0, 0, 0].item(), cache.value(1)[blocks - 1, -1, -1, -1].item()]
    require(found == [1.0, 2.0], f"wrote 1 and 2, read {found}")


def check_lease(cache: npc.PromptCache) -> None:
    prompt = list(range(1, 201))
    states = torch.randn(200, 2, 128).to(cache.key(0))
    with cache.acquire(prompt) as lease:
        rows(cache.key(1))[on(cache, lease.slots(0, 200))] = states
        lease.commit(prompt)
    match = cache.lookup(prompt)
    require(match is not None and match.cached_tokens == 200, f"looked 200 committed tokens up, found {match}")
    with cache.acquire([*prompt, 7]) as lease:
        found = rows(cache.key(1))[on(cache, lease.slots(0, 200))]
        require(torch.equal(found.cpu(), states.cpu()), "other K than was written")


def check_partial_hit(cache: npc.PromptCache) -> None:
    prompt = list(range(1, 201))
    before = cache.stats().copies
    with cache.acquire([*prompt[:150], 7]) as lease:
        require(lease.cached_tokens == 150, f"150 shared tokens, {lease.cached_tokens} cached")
        shared = cache.lookup(prompt)
        require(shared is not None, "the prompt is gone")
        old = rows(cache.key(1))[on(cache, shared.block_table[1:2].astype(np.int64) * 128)]  # type: ignore[union-attr]
        new = rows(cache.key(1))[on(cache, lease.slots(128, 129))]
        require(torch.equal(old.cpu(), new.cpu()), "the copied row differs")
    after = cache.stats().copies
    copied = {kind: after[kind] - before[kind] for kind in after}
    require(copied == {"H2H": 0, "H2D": 0, "D2H": 0, "D2D": 4}, f"4 planes, copies {copied}")


def rows(plane: torch.Tensor) -> torch.Tensor:
    return plane.view(-1, *plane.shape[2:])


def on(cache: npc.PromptCache, indices: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(indices).to(cache.device)


# ---- paged attention against a reference ----


def check_attention(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int | None,
    with_sinks: bool,
) -> None:
    from npu_prompt_cache.attention import npu
    from npu_prompt_cache.attention.kind import AttentionKind, Span
    from npu_prompt_cache.attention.sequence import Sequence

    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(heads * head_dim)
    layout = npc.KVLayout(num_layers=1, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    planes = [torch.randn(32, 128, kv_heads, head_dim, generator=generator).to(dtype) for _ in "KV"]
    keys, values = (plane.to(device) for plane in planes)
    free = iter((torch.randperm(31, generator=generator) + 1).tolist())
    sequences, slots, at = [], [], 0
    for new, length in SEQUENCES:
        table = np.array([next(free) for _ in range(-(-length // 128))], np.int32)
        sequences.append(Sequence(at, at + new, length, table))
        places = np.arange(length - new, length)
        slots.append(table[places // 128].astype(np.int64) * 128 + places % 128)
        at += new
    query = torch.randn(1, heads, at, head_dim, generator=generator).to(dtype)
    new_kv = [torch.randn(1, kv_heads, at, head_dim, generator=generator).to(dtype) for _ in "KV"]
    batch = npu.paged_attention(layout, heads, device).batch(sequences, np.concatenate(slots))
    batch.write(keys, values, *(states.to(device) for states in new_kv))
    sinks = torch.randn(heads, generator=generator).to(dtype) if with_sinks else None
    kind = AttentionKind(span=Span(window), sinks=None if sinks is None else sinks.to(device))
    found = batch.attend(query.to(device), keys, values, kind).cpu().double()[0]
    for plane, states in zip(planes, new_kv, strict=True):
        rows(plane)[torch.from_numpy(np.concatenate(slots))] = states[0].transpose(0, 1)
    wanted = torch.cat([reference(query, *planes, sequence, window, sinks) for sequence in sequences])
    worst = (found - wanted).abs().max().item()
    require(worst <= TOLERANCE[dtype], f"differs by up to {worst:.3g}, more than {TOLERANCE[dtype]:g}")


def reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sequence: object,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """In float64 on the CPU: ``[tokens, heads, head_dim]`` of one sequence."""
    from npu_prompt_cache.attention.sequence import Sequence

    assert isinstance(sequence, Sequence)
    table = torch.from_numpy(sequence.block_table).long()
    k, v = (plane[table].flatten(0, 1)[: sequence.kv_length].double() for plane in (keys, values))
    q = query[0, :, sequence.start : sequence.stop].double()
    group = q.shape[0] // k.shape[1]
    k, v = (states.repeat_interleave(group, dim=1).transpose(0, 1) for states in (k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    first = sequence.kv_length - sequence.tokens
    hidden = torch.ones(sequence.tokens, sequence.kv_length, dtype=torch.bool).triu(first + 1)
    if window is not None:
        hidden |= torch.ones_like(hidden).tril(first - window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, sequence.tokens, 1)], dim=-1)
    return (scores.softmax(-1)[..., : sequence.kv_length] @ v).transpose(0, 1)


# ---- a model without and with the cache ----


def small_model(dtype: torch.dtype, device: torch.device) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A random Llama on the device, and the same in float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=4096,
        eos_token_id=None,
        initializer_range=0.02,
    )
    model = LlamaForCausalLM(config).eval()
    exact = LlamaForCausalLM(config).eval()
    exact.load_state_dict(model.to(dtype).state_dict())
    return model.to(device), exact


def check_model(dtype: torch.dtype, device: torch.device, report: Report) -> None:
    model, exact = small_model(dtype, device)
    ids = torch.randint(3, 4096, (1, SHARED_TOKENS + NEW_TOKENS), generator=torch.Generator().manual_seed(1))
    prompt = ids.to(device)
    with torch.no_grad():
        wanted = exact(ids, logits_to_keep=4).logits
        plain = model(prompt, logits_to_keep=4).logits.float().cpu()
        tokens = generate(model, prompt, 16)
        cache = npc.enable(model, max_gb=0.5)
        try:
            outcomes = [model(prompt, logits_to_keep=4).logits.float().cpu() for _ in ("cold", "hit")]
            rounding = (plain - wanted).abs().max().item()
            largest = wanted.abs().max().item()
            require(rounding <= 0.1 * largest, f"uncached logits of up to {largest:.3g} are off by {rounding:.3g}")
            for name, logits in zip(("cold", "hit"), outcomes, strict=True):
                worst = (logits - wanted).abs().max().item()
                require(
                    worst <= 2 * rounding + 1e-3,
                    f"{name} logits differ by {worst:.3g}, uncached ones by {rounding:.3g}",
                )
            require(cache.stats().hit_tokens > 0, "nothing was hit")
            check_tokens(exact, tokens, generate(model, prompt, 16), 2 * rounding)
            if dtype is DTYPES[-1]:
                measure(model, cache, prompt, report)
            cache.check_integrity()
        finally:
            npc.disable(model)


def check_tokens(exact: torch.nn.Module, plain: torch.Tensor, cached: torch.Tensor, near: float) -> None:
    """The same tokens, up to where two logits are nearer to each other than half precision can tell."""
    different = (plain != cached)[0].nonzero()
    if len(different) == 0:
        return
    at = int(different[0])
    logits = exact(plain[:, :at], logits_to_keep=1).logits[0, -1]
    gap = (logits[plain[0, at]] - logits[cached[0, at]]).abs().item()
    require(gap <= near, f"token {at} differs, and its logit by {gap:.3g}, more than rounding")


def generate(model: torch.nn.Module, prompt: torch.Tensor, count: int) -> torch.Tensor:
    output: torch.Tensor = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return output.cpu()


def measure(model: torch.nn.Module, cache: npc.PromptCache, prompt: torch.Tensor, report: Report) -> None:
    """The support bot: one beginning, other questions; without the cache, with an empty and with a full one."""

    def first_token_ms(turn: int) -> float:
        turns_own = (prompt[:, SHARED_TOKENS:] + 7 * turn) % 4000 + 3
        ids = torch.cat([prompt[:, :SHARED_TOKENS], turns_own], dim=1)
        torch.npu.synchronize()  # type: ignore[attr-defined]
        start = time.perf_counter()
        generate(model, ids, 1)
        return 1e3 * (time.perf_counter() - start)

    def miss_ms(turn: int) -> float:
        cache.clear()
        return first_token_ms(turn)

    first_token_ms(0)  # pays for what only a first call pays for
    hits = [first_token_ms(turn) for turn in range(1, TURNS + 1)]
    misses = [miss_ms(turn) for turn in range(TURNS + 1, 2 * TURNS + 1)]
    handle = model.forward.attachment  # type: ignore[union-attr]
    handle.detach()
    plain = [first_token_ms(turn) for turn in range(TURNS)]
    cache.attach(model)  # type: ignore[arg-type]
    for name, times in (("no cache", plain), ("cache, miss", misses), (f"cache, {SHARED_TOKENS} tokens hit", hits)):
        report.times.append((f"{SHARED_TOKENS + NEW_TOKENS} tokens, {name}", f"{statistics.median(times):.1f}"))


# ---- all of it ----


def gather_facts(device: torch.device, report: Report) -> None:
    import torch_npu

    free, total = torch.npu.mem_get_info(device)  # type: ignore[attr-defined]
    report.facts += [
        ("device", f"{torch.npu.get_device_name(device)}, {total / 2**30:.1f} GiB HBM, {free / 2**30:.1f} free"),  # type: ignore[attr-defined]
        ("torch, torch_npu", f"{torch.__version__}, {torch_npu.__version__}"),
        ("npu_prompt_cache", npc.__version__),
        ("Python, system", f"{platform.python_version()}, {platform.platform()}"),
        ("ASCEND_HOME_PATH", os.environ.get("ASCEND_HOME_PATH", "not set")),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="example: python scripts/npu_smoke.py --output report.md",
    )
    parser.add_argument("--device", default="npu:0", help="the NPU (default: npu:0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report to FILE too")
    arguments = parser.parse_args()
    report = Report()
    device = torch.device("cpu")

    def load() -> None:
        nonlocal device
        import torch_npu  # noqa: F401

        device = torch.device(arguments.device)
        torch.npu.set_device(device)  # type: ignore[attr-defined]
        gather_facts(device, report)

    report.check("torch_npu and the runtime load", load)
    if report.ok:
        check_pool(device, report)
        for dtype in DTYPES:
            for shape, (window, with_sinks) in itertools.product(SHAPES, KINDS):
                heads, kv_heads, head_dim = shape
                what = f"paged attention, {heads} heads of {head_dim} over {kv_heads}, {str(dtype)[6:]}"
                what += f", window {window}" * (window is not None) + ", sinks" * with_sinks
                report.check(what, functools.partial(check_attention, device, shape, dtype, window, with_sinks))
        for dtype in (*DTYPES, torch.float32):
            report.check(f"a small model, {str(dtype)[6:]}", lambda d=dtype: check_model(d, device, report))
    text = report.markdown()
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
