"""The media in a prompt: the key of the prompt, the positions of its tokens, and what a forward needs of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from npu_prompt_cache.integrations.transformers.media import (
    ENCODED,
    KINDS,
    LOWEST_NUMBER,
    SECONDS,
    Medium,
    encode_parts,
    given_media,
    modalities_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedModel

    from npu_prompt_cache.integrations.transformers.request import Piece


class _Placed(NamedTuple):
    """A medium, and where its placeholders are."""

    medium: Medium
    row: int
    columns: npt.NDArray[np.int64]


class Media:
    """What a prompt of a model that reads media is keyed by, and what of its media a forward needs.

    Attributes:
        keys: int64 ``[batch, columns]``: token ids, and numbers of media in the places of theirs.
        positions: int64 ``[3, batch, columns]`` where the model has three for each token and they are not all the
            number of the token, else None.
        offsets: int64 ``[batch]``: what to add to the number of each later token for its position; None where the
            model has one position for each token.
    """

    def __init__(self, keys: npt.NDArray[np.int64], placed: list[_Placed]) -> None:
        self.keys = keys
        self.positions: npt.NDArray[np.int64] | None = None
        self.offsets: npt.NDArray[np.int64] | None = None
        self._placed = placed

    def parts(self, pieces: Iterable[Piece]) -> dict[str, list[tuple[Medium, int, int]]]:
        """Of each kind, the media that have placeholders ``[first, last)`` in those pieces, in their order."""
        found: dict[str, list[tuple[Medium, int, int]]] = {}
        for row, start, stop in pieces:
            for medium, of_row, columns in self._placed:
                first, last = np.searchsorted(columns, (start, stop)) if of_row == row else (0, 0)
                if first < last:
                    found.setdefault(medium.modality.name, []).append((medium, int(first), int(last)))
        return found


def encoded_for(model: PreTrainedModel, media: Media | None, pieces: Iterable[Piece]) -> dict[str, Any]:
    """The argument that gives a forward over those pieces the embeddings of their placeholders, and of no other.

    Media that have none in them are not encoded.
    """
    parts = {} if media is None else media.parts(pieces)
    return {ENCODED: {name: encode_parts(model, of_kind) for name, of_kind in parts.items()}} if parts else {}


def read_media(
    model: PreTrainedModel, arguments: Mapping[str, Any], starts: npt.NDArray[np.int64], in_generate: bool
) -> Media | None:
    """Media of a prompt's forward; None where they are not as the cache serves them, and the model's own code runs.

    Args:
        model: one that reads media.
        arguments: of its forward.
        starts: int64 ``[batch]``: columns of left padding.
        in_generate: whether later tokens get their positions from transformers' generate().
    """
    ids = arguments["input_ids"].numpy(force=True)
    found = [given_media(model, modality, arguments) for modality in modalities_of(model)]
    if ids.max() >= LOWEST_NUMBER or any(media is None for media in found):
        return None
    keys = ids.astype(np.int64)  # a copy: the caller may write to its own
    kinds, placed = np.zeros_like(keys), []
    for kind, media in enumerate(found, start=1):
        if media:
            token = getattr(model.config, f"{media[0].modality.name}_token_id")
            of_kind = _place(media, ids == token, starts)
            if of_kind is None:
                return None
            placed += of_kind
            for medium, row, columns in of_kind:
                keys[row, columns], kinds[row, columns] = medium.number, kind
    result = Media(keys, placed)
    if not hasattr(model.base_model, "rope_deltas"):
        return result
    result.offsets = np.zeros(len(keys), np.int64)
    if placed and not _set_positions(result, model, arguments, kinds, starts, in_generate):
        return None
    return result


def _place(
    media: list[Medium], is_placeholder: npt.NDArray[np.bool_], starts: npt.NDArray[np.int64]
) -> list[_Placed] | None:
    """Models give placeholders the embeddings of all media one after another, row after row."""
    rows, columns = np.nonzero(is_placeholder)
    ends = np.cumsum([len(medium) for medium in media])
    if ends[-1] != len(rows) or (columns < starts[rows]).any() or any(medium.number is None for medium in media):
        return None
    placed = []
    by_content: dict[int | None, Medium] = {}  # what is shown twice is encoded once
    for medium, end in zip(media, ends, strict=True):
        first = end - len(medium)
        if first == end or rows[first] != rows[end - 1]:
            return None
        medium = by_content.setdefault(medium.number, medium)
        placed.append(_Placed(medium, int(rows[first]), columns[first:end]))
    return placed


def _set_positions(
    media: Media,
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    kinds: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    in_generate: bool,
) -> bool:
    """Positions that the model computes from the tokens and the media. False where those of the request are others."""
    given, said = arguments.get("position_ids"), arguments.get(KINDS)
    is_token = np.arange(kinds.shape[1]) >= starts[:, None]
    if said is None and given is None:
        return False
    if said is not None and (said.shape != kinds.shape or (said.numpy(force=True) != kinds)[is_token].any()):
        return False
    positions, deltas = _rope_index(model, arguments, kinds, is_token, media)
    lengths = kinds.shape[1] - starts
    offsets = positions[:, :, -1] + 1 - lengths
    # generate() goes on from the last token's, in each of the three; a forward without positions, from the deltas.
    if (offsets != offsets[0]).any() or (not in_generate and (offsets[0] != deltas[:, 0]).any()):
        return False
    if given is None:
        model.base_model.rope_deltas = torch.from_numpy(deltas).to(model.device)  # as its own forward does
    elif not _are_given(positions, given.numpy(force=True), starts, is_token):
        return False
    media.positions, media.offsets = positions, offsets[0]
    return True


def _rope_index(
    model: PreTrainedModel,
    arguments: Mapping[str, Any],
    kinds: npt.NDArray[np.int64],
    is_token: npt.NDArray[np.bool_],
    media: Media,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions ``[3, batch, columns]`` and deltas ``[batch, 1]``, computed on the host by the model's own function."""
    options: dict[str, Any] = {}
    for modality in modalities_of(model):
        of_kind = [medium for medium, _, _ in media._placed if medium.modality == modality]
        if of_kind and modality.grid is not None:
            options[modality.grid] = torch.cat([medium.arguments[modality.grid].cpu() for medium in of_kind])
            if of_kind[0].depends_on:
                options[SECONDS] = [medium.depends_on[0] for medium in of_kind]
    rope_index: Any = model.base_model.get_rope_index
    positions, deltas = rope_index(
        torch.from_numpy(arguments["input_ids"].numpy(force=True)),
        mm_token_type_ids=torch.from_numpy(kinds),
        attention_mask=torch.from_numpy(is_token.astype(np.int64)),
        **options,
    )
    return positions.numpy(), deltas.numpy()


def _are_given(
    positions: npt.NDArray[np.int64],
    given: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    is_token: npt.NDArray[np.bool_],
) -> bool:
    """Whether the caller gives these positions, in front of which may stand the number of each token."""
    if given.ndim != 3 or given.shape[0] not in (3, 4) or given.shape[1:] != positions.shape[1:]:
        return False
    numbers = np.arange(positions.shape[2]) - starts[:, None]
    is_numbered = given.shape[0] == 3 or bool((given[0] == numbers)[is_token].all())
    return is_numbered and bool((given[-3:] == positions)[:, is_token].all())


def packed_positions(
    numbers: npt.NDArray[np.int64],
    media: Media | None,
    pieces: Iterable[Piece],
    offsets: npt.NDArray[np.int64] | None,
) -> npt.NDArray[np.int64]:
    """Positions of packed tokens: ``[1, tokens]``, or ``[3, 1, tokens]`` where a token has three that differ.

    Args:
        numbers: int64 ``[1, tokens]``: of each token in its own sequence.
        media: of the prompt, in its forward.
        pieces: what is packed.
        offsets: of the rows, from the prompt's `Media`.
    """
    if offsets is None:
        return numbers
    if media is not None and media.positions is not None:
        cut = [media.positions[:, row, start:stop] for row, start, stop in pieces]
        return np.expand_dims(np.concatenate(cut, axis=1), 1)
    later: npt.NDArray[np.int64] = np.concatenate([np.full(stop - start, offsets[row]) for row, start, stop in pieces])
    return numbers + later


def go_on_uncached(model: PreTrainedModel, offsets: npt.NDArray[np.int64] | None) -> None:
    """Tells a model that keeps them what to add to positions after the tokens in its cache."""
    if offsets is not None:
        model.base_model.rope_deltas = torch.from_numpy(offsets[:, None]).to(model.device)
