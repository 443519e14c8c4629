"""Tiny models that read images (and videos), and prompts for them: pixels without a processor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from tiny import EOS, PAD, VOCABULARY, left_padded
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

LAYERS = 3
IMAGE, VIDEO = VOCABULARY - 1, VOCABULARY - 2
#: `tiny.tokens` makes these too: as text they are none of ours.
TEXT_END = VOCABULARY - 4
_PATCH, _MERGE = 4, 2
_PATCH_VALUES = 3 * 2 * _PATCH * _PATCH  # channels, times, height, width

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "initializer_range": 0.2,
}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": _PATCH,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}
_TOWERS: dict[str, dict[str, object]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 16,
        "tokens_per_second": 2,
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    },
}
PATCHED = tuple(_TOWERS)
MODEL_TYPES = (*PATCHED, "llava")


class Medium(NamedTuple):
    """An image or a video of a prompt."""

    kind: str
    pixels: torch.Tensor
    grid: torch.Tensor | None
    ids: torch.Tensor  # [1, tokens]: its placeholders, and what stands between them

    @property
    def tokens(self) -> int:
        return self.ids.shape[1]


class Prompt(NamedTuple):
    """What a processor makes of one prompt."""

    ids: torch.Tensor  # [1, tokens]
    media: list[Medium]


def build(
    model_type: str,
    text_type: str = "llama",
    tower: str = "clip_vision_model",
    text: dict[str, object] | None = None,
    **options: object,
) -> PreTrainedModel:
    torch.manual_seed(1)
    parts = parts_of(model_type, text_type, tower)
    config = AutoConfig.for_model(model_type, **parts | {"text_config": parts["text_config"] | (text or {})})
    model = AutoModelForImageTextToText.from_config(config, **options).eval()
    for name, parameter in model.named_parameters():
        if "language_model" not in name and parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.5)  # so that no tower is blind to what it is shown
    return model


def parts_of(model_type: str, text_type: str = "llama", tower_type: str = "clip_vision_model") -> dict[str, Any]:
    if model_type == "llava":
        tower: dict[str, object] = {"model_type": tower_type, "image_size": 8, "patch_size": _PATCH}
        tower |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
        text = {"model_type": text_type, **_TEXT} | ({"sliding_window": None} if text_type == "mistral" else {})
        parts: dict[str, object] = {
            "text_config": text,
            "vision_config": tower | {"initializer_range": 0.5},
            "image_token_index": IMAGE,
        }
        if tower_type == "siglip_vision_model":  # no token for the whole image, that would be left out
            parts["vision_feature_select_strategy"] = "full"
        return parts
    return {
        "text_config": dict(_TEXT | _MROPE),
        "vision_config": _TOWER | _TOWERS[model_type],
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": VOCABULARY - 3,
        "vision_end_token_id": VOCABULARY - 4,
    }


def text(count: int, seed: int) -> torch.Tensor:
    """``[1, count]`` token ids, none of them of a medium."""
    return torch.randint(3, TEXT_END, (1, count), generator=torch.Generator().manual_seed(seed))


def image(model_type: str, seed: int, grid: tuple[int, int, int] = (1, 4, 6)) -> Medium:
    """An image; `grid` of patches where the model takes images of several sizes."""
    if model_type == "llava":
        return Medium("image", _noise((1, 3, 8, 8), seed), None, torch.full((1, (8 // _PATCH) ** 2), IMAGE))
    return _patches("image", seed, grid)


def video(model_type: str, seed: int, grid: tuple[int, int, int] = (3, 4, 4)) -> Medium:
    whole = _patches("video", seed, grid)
    if model_type != "qwen3_vl":
        return whole
    pictures = whole.ids.view(grid[0], -1)  # each has its time before it
    return whole._replace(ids=torch.cat([text(grid[0], seed + 50).view(-1, 1), pictures], dim=1).view(1, -1))


def _patches(kind: str, seed: int, grid: tuple[int, int, int]) -> Medium:
    patches = grid[0] * grid[1] * grid[2]
    ids = torch.full((1, patches // _MERGE**2), IMAGE if kind == "image" else VIDEO)
    return Medium(kind, _noise((patches, _PATCH_VALUES), seed), torch.tensor([grid]), ids)


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))


def prompt(*parts: torch.Tensor | Medium) -> Prompt:
    """Text and media in this order."""
    ids = [part.ids if isinstance(part, Medium) else part for part in parts]
    return Prompt(torch.cat(ids, dim=1), [part for part in parts if isinstance(part, Medium)])


def inputs(*prompts: Prompt, padding: int = 0) -> dict[str, Any]:
    """Arguments of a forward or of generate(): a left-padded batch with its media, as a processor makes it."""
    batch: dict[str, Any] = left_padded([one.ids for one in prompts], extra=padding)
    if len(prompts) == 1 and not padding:
        del batch["attention_mask"]
    media = [medium for one in prompts for medium in one.media]
    for kind, pixels, grid in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        of_kind = [medium for medium in media if medium.kind == kind]
        if of_kind:
            batch[pixels] = torch.cat([medium.pixels for medium in of_kind])
            if of_kind[0].grid is not None:
                batch[grid] = torch.cat([medium.grid for medium in of_kind if medium.grid is not None])
    if any(medium.grid is not None for medium in media):
        ids = batch["input_ids"]
        batch["mm_token_type_ids"] = (ids == IMAGE).long() + 2 * (ids == VIDEO).long()
    return batch
