"""What a forward is asked for, as the cache serves it: checked, packed, and unpacked again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from npu_prompt_cache.integrations.transformers.media import arguments_of, has_media
from npu_prompt_cache.integrations.transformers.models import attention_is_served, text_config
from npu_prompt_cache.integrations.transformers.prompt_media import Media, read_media

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from npu_prompt_cache.attention import PagedBatch
    from npu_prompt_cache.cache import PromptCache
    from npu_prompt_cache.integrations.transformers.paged_cache import PagedCache

#: Arguments of a forward that this integration understands; any other that is not None bypasses the cache.
_UNDERSTOOD = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "return_dict"}
)
_FORBIDDEN_WHEN_TRUE = frozenset({"output_attentions", "output_hidden_states", "output_router_logits"})
_KNOWN = _UNDERSTOOD | _FORBIDDEN_WHEN_TRUE


class Request(NamedTuple):
    """The arguments of a forward that the cache serves."""

    input_ids: torch.Tensor  # [batch, columns]
    starts: npt.NDArray[np.int64]  # [batch]: columns of left padding
    kept: npt.NDArray[np.int64]  # columns whose logits are asked for
    media: Media | None = None  # of a prompt, where the model reads media


class Piece(NamedTuple):
    """Columns ``[start, stop)`` of one row of a request."""

    row: int
    start: int
    stop: int


def read_request(
    cache: PromptCache, model: PreTrainedModel, kwargs: dict[str, Any], paged: PagedCache
) -> Request | None:
    """The arguments as the cache serves them, or None where they ask for something that it does not."""
    ids, config = kwargs.get("input_ids"), text_config(model)
    known = _KNOWN | of_media if (of_media := arguments_of(model)) else _KNOWN
    if (
        ids is None
        or ids.ndim != 2
        or ids.numel() == 0
        or model.training
        or torch.is_autocast_enabled(ids.device.type)
        or model.dtype != cache.layout.dtype
        or model.device != cache.device
        or torch.is_grad_enabled()
        or not attention_is_served(config)
        or config.num_hidden_layers != cache.layout.num_layers
        or paged.dense is not None
        or paged.rows not in (0, len(ids))
        or not _first_of(kwargs.get("use_cache"), config.use_cache)
        or not _first_of(kwargs.get("return_dict"), model.config.return_dict)
        or any(value is not None for name, value in kwargs.items() if name not in known)
        or any(_is_asked(name, kwargs, config, model.config) for name in _FORBIDDEN_WHEN_TRUE)
    ):
        return None
    batch, columns = ids.shape
    past = paged.get_seq_length()
    starts: npt.NDArray[np.int64] = np.zeros(batch, np.int64)
    media: Media | None = None
    if past == 0 or not paged.is_continued_by_generate:
        padding = _left_padding(kwargs.get("attention_mask"), batch, past, columns, paged)
        if padding is None or (past and of_media and has_media(model, kwargs)):
            return None
        if past == 0:
            starts = padding
            if of_media and (media := read_media(model, kwargs, starts, paged.in_generate)) is None:
                return None
        offsets = paged.offsets if media is None else media.offsets
        is_read = media is not None and media.positions is not None
        if not is_read and not _positions_are_natural(kwargs.get("position_ids"), padding, past, columns, offsets):
            return None
    kept = _kept_columns(kwargs.get("logits_to_keep", 0), columns)
    if kept is None or not paged.rotary.serves(paged.longest_after(columns, paged.starts if past else starts)):
        return None
    return Request(ids, starts, kept, media)


def _first_of(given: Any, default: Any) -> Any:
    return default if given is None else given


def _is_asked(name: str, kwargs: dict[str, Any], *configs: PreTrainedConfig) -> bool:
    return bool(_first_of(kwargs.get(name), any(getattr(config, name, None) for config in configs)))


def _left_padding(
    mask: torch.Tensor | None, batch: int, past: int, columns: int, paged: PagedCache
) -> npt.NDArray[np.int64] | None:
    """Columns of left padding of each row, or None where the mask is anything else than left padding."""
    known = paged.starts if past else None
    if mask is None:
        # Without a mask the model attends to padding that the cache holds, and has its reasons.
        return None if known is not None and known.any() else np.zeros(batch, np.int64)
    if mask.ndim != 2 or tuple(mask.shape) != (batch, past + columns):
        return None
    seen = (mask != 0).numpy(force=True)
    starts = (past + columns - seen.sum(axis=1)).astype(np.int64)
    is_left_padding = bool((seen == (np.arange(past + columns) >= starts[:, None])).all())
    fits = bool((starts == known).all()) if known is not None else bool((starts < columns).all())
    return starts if is_left_padding and fits else None


def _positions_are_natural(
    positions: torch.Tensor | None,
    starts: npt.NDArray[np.int64],
    past: int,
    columns: int,
    offsets: npt.NDArray[np.int64] | None,
) -> bool:
    """True where each row counts its own tokens from 0, or from its offset in a model that has offsets.

    Such a model takes more positions than one for each token, and may be given the number of the token before them.
    """
    if positions is None:
        # The model would count columns, padding included: the same only where there is none.
        return not starts.any()
    if positions.shape[-1] != columns or positions.ndim not in ((2,) if offsets is None else (2, 3)):
        return False
    at = np.arange(past, past + columns) - starts[:, None]
    given = positions.numpy(force=True)
    if offsets is None:
        return _are(at, given, at)
    if given.ndim == 3 and len(given) == 4:
        return _are(at, given[0], at) and _are(at + offsets[:, None], given[1:], at)
    return _are(at + offsets[:, None], given, at)


def _are(expected: npt.NDArray[np.int64], given: npt.NDArray[np.int64], at: npt.NDArray[np.int64]) -> bool:
    """Whether these are given, but for padding."""
    return bool(((given == expected) | (at < 0)).all())


def _kept_columns(keep: object, columns: int) -> npt.NDArray[np.int64] | None:
    """Columns whose logits are asked for, or None where they are asked for in a way that is not served."""
    if type(keep) is int and keep >= 0:
        return np.arange(0 if keep == 0 else max(columns - keep, 0), columns)
    if not isinstance(keep, torch.Tensor) or keep.ndim != 1 or keep.numel() == 0:
        return None
    if keep.dtype not in (torch.int32, torch.int64):
        return None
    kept: npt.NDArray[np.int64] = keep.numpy(force=True).astype(np.int64)
    kept = np.where(kept < 0, kept + columns, kept)
    return kept if bool(((kept >= 0) & (kept < columns)).all()) else None


def packed_ids(request: Request, pieces: list[Piece]) -> torch.Tensor:
    """The tokens of the pieces, ``[1, tokens]``."""
    return torch.cat([request.input_ids[row, start:stop] for row, start, stop in pieces]).unsqueeze(0)


def packed_positions(batch: PagedBatch) -> npt.NDArray[np.int64]:
    """The position of each new token in its own sequence, ``[1, tokens]``."""
    positions = [np.arange(sequence.kv_length - sequence.tokens, sequence.kv_length) for sequence in batch.sequences]
    return np.concatenate(positions)[None]


def kept_places(request: Request, pieces: list[Piece]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Where the logits asked for are in the packed row of the pieces, and where among all that are asked for.

    The latter in ``[batch * kept]``. Equally many of both; but where no logits of the pieces are asked for, the place
    of the last: operators need not take empty tensors.
    """
    rows, starts, stops = np.array(pieces).T
    ends = np.cumsum(stops - starts)
    piece, kept = np.nonzero((request.kept >= starts[:, None]) & (request.kept < stops[:, None]))
    places = request.kept[kept] + (ends - stops)[piece]
    return places if len(places) else ends[-1:] - 1, rows[piece] * len(request.kept) + kept


def unpack(parts: list[tuple[torch.Tensor, npt.NDArray[np.int64]]], request: Request) -> torch.Tensor:
    """Logits as ``[batch, kept, vocabulary]``; those of padding are 0.

    Args:
        parts: of each forward its logits ``[1, n, vocabulary]``, and ``[n]`` their places in ``[batch * kept]`` (none
            where none were asked for).
        request: what was asked for.
    """
    shape = len(request.starts), len(request.kept), -1
    for logits, places in parts:
        if len(places) == shape[0] * shape[1]:
            return logits.view(shape)
    first, _ = parts[0]
    together = first.new_zeros(shape[0] * shape[1], first.shape[2])
    for logits, places in parts:
        if len(places):
            together.index_copy_(0, torch.from_numpy(places).to(first.device), logits[0])
    return together.view(shape)
