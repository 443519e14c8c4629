"""Ways of generating on ``npu:0`` with the cache: what they give without it, from as few tokens as they can."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Embedded, join, left_padded, tiny_model, tokens
from transformers import PreTrainedModel

import npu_prompt_cache as npc

BLOCK = 128
PROMPT = tokens(BLOCK + 30, seed=100)
P, NEW = PROMPT.shape[1], 10
#: They begin alike, for a block and a bit.
ROWS = [join(PROMPT[:, : BLOCK + 5], tokens(4 + row, seed=row)) for row in range(4)]
OWN = sum(4 + row for row in range(4))


def generate(model: PreTrainedModel, prompts: list[torch.Tensor], **options: Any) -> torch.Tensor:
    inputs = {name: value.to("npu:0") for name, value in left_padded(prompts).items()}
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(**inputs, **options).cpu()


def assistant() -> PreTrainedModel:
    small = tiny_model(num_hidden_layers=3).to("npu:0")
    small.generation_config.num_assistant_tokens = 4
    small.generation_config.assistant_confidence_threshold = 0
    return small


#: A way of generating: its prompts, its options, and the tokens that its prompts need cold and as a hit.
WAYS: dict[str, tuple[list[torch.Tensor], dict[str, Any], int, int]] = {
    "beams": ([PROMPT], {"num_beams": 4, "num_return_sequences": 2}, P + 3, 4),
    "beams of a batch": (ROWS, {"num_beams": 2}, BLOCK + 5 + OWN + 4, 8),
    "rows that begin alike": (ROWS, {}, BLOCK + 5 + OWN, 4),
    "prompt lookup": ([join(PROMPT, PROMPT)], {"prompt_lookup_num_tokens": 4}, 2 * P, 1),
    "assisted": ([PROMPT], {"assistant_model": True}, P, 1),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch_npu's deepcopy of a tensor, once
@pytest.mark.parametrize("way", WAYS)
def test_ways_of_generating(way: str) -> None:
    prompts, options, cold, hit = WAYS[way]

    def result(model: PreTrainedModel) -> torch.Tensor:
        return generate(
            model, prompts, **({"assistant_model": assistant()} if "assistant_model" in options else options)
        )

    fresh = tiny_model().to("npu:0")
    embedded = Embedded(fresh)
    plain, sent = result(fresh), embedded.take()
    of_prompts = left_padded(prompts)["input_ids"].numel() * options.get("num_beams", 1)
    model = tiny_model().to("npu:0")
    embedded, cache = Embedded(model), npc.enable(model, pool_bytes=64 << 20)
    for new in (cold, hit):
        assert torch.equal(result(model), plain)
        assert sent - embedded.take() == of_prompts - new
    stats = cache.stats()
    assert stats.copies["H2D"] == stats.copies["D2H"] == stats.leases == 0
    cache.check_integrity()
    npc.disable(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [128, 64], ids=["TND", "BSND"])
def test_fused_attention_reads_shared_and_forked_blocks(head_dim: int, dtype: torch.dtype) -> None:
    """Logits of rows that begin alike, and of rows that part from one, as near to the exact ones as without a cache."""
    changes: dict[str, Any] = {"head_dim": head_dim, "initializer_range": 0.1}
    fresh, model = (tiny_model(**changes).to("npu:0", dtype) for _ in range(2))
    exact = tiny_model(**changes).to(dtype).double()
    cache = npc.enable(model, pool_bytes=256 << 20)
    parents, more = torch.tensor([2, 0, 2, 2]), tokens(8, seed=9).view(4, 2)

    def result(model: PreTrainedModel) -> torch.Tensor:
        rows = torch.cat([row[:, : BLOCK + 9] for row in ROWS]).to(model.device)
        first = model(rows, logits_to_keep=2)
        first.cache.reorder_cache(parents.to(model.device))
        second = model(more.to(model.device), cache=first.cache)
        return torch.stack([first.logits, second.logits]).cpu().double()

    with torch.no_grad():
        wanted, plain = result(exact), result(fresh)
        for _ in range(2):
            assert (result(model) - wanted).abs().max() <= 2 * (plain - wanted).abs().max()
    assert cache.stats().leases == 0
    npc.disable(model)
