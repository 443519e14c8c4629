"""Models that were given to torch.compile: what is served runs as it was written, all else is compiled as before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import transformers
from tiny import SYSTEM, join, tiny_model, tokens

import npu_prompt_cache as npc
from npu_prompt_cache.integrations.transformers import CacheBypassWarning

PROMPTS = [join(SYSTEM, tokens(5)), join(SYSTEM, tokens(9, seed=4))]


class Counting:
    """A backend that runs graphs as they are, and counts what it was given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        self.graphs += 1
        return graph.forward

    def __deepcopy__(self, memo: object) -> Counting:
        return self  # transformers copies what is in a CompileConfig


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def by_compile(model: transformers.PreTrainedModel, backend: Counting) -> torch.nn.Module:
    return torch.compile(model, backend=backend)


def by_forward(model: transformers.PreTrainedModel, backend: Counting) -> torch.nn.Module:
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def by_its_method(model: transformers.PreTrainedModel, backend: Counting) -> torch.nn.Module:
    model.compile(backend=backend)
    return model


def layer_by_layer(model: transformers.PreTrainedModel, backend: Counting) -> torch.nn.Module:
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


def inside(model: transformers.PreTrainedModel, backend: Counting) -> torch.nn.Module:
    model.model = torch.compile(model.model, backend=backend)
    return model


WAYS = [by_compile, by_forward, by_its_method, layer_by_layer, inside]


def texts(model: torch.nn.Module, **options: object) -> list[torch.Tensor]:
    return [model.generate(prompt, max_new_tokens=4, do_sample=False, **options) for prompt in PROMPTS]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@torch.no_grad()
def logits(model: torch.nn.Module) -> list[torch.Tensor]:
    return [model(prompt, logits_to_keep=1).logits for prompt in PROMPTS]


@pytest.mark.parametrize("attached", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_is_served(way: Callable[..., torch.nn.Module], attached: str, backend: Counting) -> None:
    model = tiny_model()
    wanted, wanted_logits = texts(model), logits(model)
    embedded: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: embedded.append(args[0].numel()))
    if attached == "before":
        cache = npc.enable(model, pool_bytes=64 << 20)
    compiled = way(model, backend)
    if attached == "after":
        cache = npc.enable(compiled, pool_bytes=64 << 20)
    assert equal(texts(compiled), wanted)
    for ours, theirs in zip(logits(compiled), wanted_logits, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    assert [count for count in embedded if count > 1] == [505, 9]
    assert cache.stats().computed_tokens == 505 + 9 + 1 + 1
    assert backend.graphs == 0
    npc.disable(compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo's own
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_served_is_compiled_as_before(way: Callable[..., torch.nn.Module], backend: Counting) -> None:
    model = tiny_model()
    losses = [model(prompt, labels=prompt).loss for prompt in PROMPTS]
    cache = npc.enable(model, pool_bytes=64 << 20)
    compiled = way(model, backend)
    for prompt, loss in zip(PROMPTS, losses, strict=True):
        assert torch.allclose(compiled(prompt, labels=prompt).loss, loss, atol=1e-5)
        texts(compiled)  # does not change what comes after it
    assert backend.graphs > 0
    assert torch.allclose(compiled(PROMPTS[0], labels=PROMPTS[0]).loss, losses[0], atol=1e-5)
    assert cache.stats().computed_tokens == 505 + 9 + 1 + 1
    npc.disable(model)


def test_a_static_cache_is_compiled_whole(backend: Counting) -> None:
    """generate() compiles the whole forward by itself, and fails where a graph breaks."""
    config = transformers.CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    model = tiny_model()
    wanted = texts(model)
    cache = npc.enable(model, pool_bytes=64 << 20)
    assert equal(texts(model), wanted)
    with pytest.warns(CacheBypassWarning, match="cache_implementation='static'"):
        assert equal(texts(model, **options), wanted)
    assert backend.graphs > 0
    assert cache.stats().lookups == 2
    assert equal(texts(model), wanted)
    assert cache.stats().lookups == 4
    npc.disable(model)


def test_threads_leave_the_compilers_stance_as_it_was(backend: Counting) -> None:
    model = tiny_model()
    wanted = texts(model)
    layer_by_layer(model, backend)
    npc.enable(model, pool_bytes=64 << 20)
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(equal(texts(model), wanted))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert backend.graphs == 0
    npc.disable(model)
    texts(model)
    assert backend.graphs > 0


def test_a_whole_compile_that_may_not_break_is_refused_by_the_compiler(backend: Counting) -> None:
    model = tiny_model()
    cache = npc.enable(model, pool_bytes=64 << 20)
    model.compile(backend=backend, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"Attachment\._forward_uncompiled"):
        texts(model)
    assert cache.stats().leases == cache.stats().entries == 0
    npc.disable(model)
    assert len(texts(model)) == 2
