"""Tiny models with random weights, and prompts for them."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

PAD, EOS, VOCABULARY = 0, 2, 300

#: Llama's near relations, which `tiny_config` makes without a tweak. All that is supported is in test_architectures.py.
LLAMA_LIKE = (
    "arcee",
    "glm",
    "granite",
    "helium",
    "llama",
    "mistral",
    "olmo",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
)


def tiny_config(model_type: str = "llama", **changes: object) -> transformers.PreTrainedConfig:
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "pad_token_id": PAD,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "sliding_window": None,
        "initializer_range": 0.2,  # logits far enough apart for greedy text to be the same under any rounding
    }
    return AutoConfig.for_model(model_type, **{**options, **changes})


def tiny_model(model_type: str = "llama", **changes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(tiny_config(model_type, **changes)).eval()


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """``[1, count]`` token ids, none of them special."""
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


SYSTEM = tokens(500, seed=100)


def left_padded(prompts: list[torch.Tensor], extra: int = 0) -> dict[str, torch.Tensor]:
    columns = max(prompt.shape[1] for prompt in prompts) + extra
    ids = torch.full((len(prompts), columns), PAD)
    mask = torch.zeros(len(prompts), columns, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, columns - prompt.shape[1] :] = prompt
        mask[row, columns - prompt.shape[1] :] = 1
    return {"input_ids": ids, "attention_mask": mask}


class Embedded:
    """Counts the tokens that go through the model's embedding."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self._tokens = 0
        model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._tokens += output.shape[:-1].numel()

    def take(self) -> int:
        taken, self._tokens = self._tokens, 0
        return taken
