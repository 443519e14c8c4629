"""Images and videos of a request: the numbers that stand for what they are, and encoding them when they are needed.

The prefix tree is keyed by token ids, and every image has the same placeholder ids. In the key of a request each
placeholder token has, instead, a number that stands for the content of its medium: every distinct SHA-256 of all that
the medium's embeddings and positions depend on has its own, above every token id. The tokens of one medium are told
apart by their order, so that the keys of a prefix are what its K/V depend on, as they are for text.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from npu_prompt_cache.integrations.transformers.models import SUPPORTED_MEDIA_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


class Modality(NamedTuple):
    """A kind of media, by the arguments of a forward that have them."""

    name: str
    pixels: str
    #: Where media differ in size: patches of each, ``[media, 3]`` (time, height, width). Else they all have one size.
    grid: str | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those of the arguments that there are."""
        return (self.pixels,) if self.grid is None else (self.pixels, self.grid)


_PATCHES = (
    Modality("image", "pixel_values", "image_grid_thw"),
    Modality("video", "pixel_values_videos", "video_grid_thw"),
)
_MODALITIES = dict.fromkeys(SUPPORTED_MEDIA_TYPES, _PATCHES) | {"llava": (Modality("image", "pixel_values"),)}
#: Seconds between the pictures of each video, and models in which positions depend on them.
SECONDS = "second_per_grid_ts"
_TIMED = frozenset({"qwen2_5_vl"})
#: Arguments of the encoders that change what they make of a medium, and are not served.
_OPTIONS = ("vision_feature_layer", "vision_feature_select_strategy", "image_sizes")
_OUTPUTS = ("image_outputs", "video_outputs")
ENCODED, KINDS = "mm_encoder_outputs", "mm_token_type_ids"

#: Numbers of media are this or more, token ids are less.
LOWEST_NUMBER = 2**30
#: Contents whose numbers are remembered. One that is forgotten gets a new number: no hit, but no wrong one.
_REMEMBERED = 1 << 16


def modalities_of(model: PreTrainedModel) -> tuple[Modality, ...]:
    """Kinds of media that a supported model reads; none where it reads nothing but text."""
    return _MODALITIES.get(model.config.model_type, ())


def arguments_of(model: PreTrainedModel) -> frozenset[str]:
    """Arguments of a forward that have to do with media, and are understood."""
    found = [name for modality in modalities_of(model) for name in modality.arguments]
    if model.config.model_type in _TIMED:
        found.append(SECONDS)
    return frozenset((*found, ENCODED, KINDS) if found else ())


def has_media(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """True where a forward is given media, or anything that tells of them."""
    raw = (name for modality in modalities_of(model) for name in modality.arguments)
    return bool(arguments.get(ENCODED)) or any(arguments.get(name) is not None for name in raw)


class _Numbers:
    """A number for each content, counted down from the largest that the tree takes; never given to another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: OrderedDict[bytes, int] = OrderedDict()
        self._next = 2**31 - 1

    def of(self, digest: bytes) -> int | None:
        """None when there are none left."""
        with self._lock:
            number = self._of.pop(digest, None)
            if number is None:
                if self._next < LOWEST_NUMBER:
                    return None
                number, self._next = self._next, self._next - 1
            self._of[digest] = number
            if len(self._of) > _REMEMBERED:
                self._of.popitem(last=False)
            return number


_numbers = _Numbers()


class Medium:
    """One image or video. Its length is the number of its placeholder tokens.

    Args:
        modality: what it is.
        arguments: of the encoder, for this one alone.
        tokens: how many placeholders it has.
        depends_on: what else its embeddings or positions depend on.
    """

    def __init__(
        self, modality: Modality, arguments: dict[str, torch.Tensor], tokens: int, depends_on: tuple[object, ...]
    ) -> None:
        self.modality = modality
        self.arguments = arguments
        self.depends_on = depends_on
        self._tokens = tokens

    def __len__(self) -> int:
        return self._tokens

    @functools.cached_property
    def number(self) -> int | None:
        """Stands for the content in keys; None when numbers have run out."""
        return _numbers.of(self.digest())

    def digest(self) -> bytes:
        """SHA-256 of what it is, of its tensors' shapes and dtypes, and of their bytes."""
        shapes = [(name, str(given.dtype), tuple(given.shape)) for name, given in self.arguments.items()]
        sha = hashlib.sha256(repr((self.modality.name, self._tokens, self.depends_on, shapes)).encode())
        for given in self.arguments.values():
            sha.update(given.detach().contiguous().view(torch.uint8).numpy(force=True).data)
        return sha.digest()


class Unencoded:
    """Stands in ``mm_encoder_outputs`` for what generate() would have encoded before it is known what is cached.

    When rows of a batch are repeated, transformers repeats `pooler_output`, by the lengths of what is in it.
    """

    def __init__(self, model: PreTrainedModel, media: list[Medium]) -> None:
        self._model = model
        self.pooler_output = media

    def encoded(self) -> Any:
        """What generate() would have made of them."""
        return _encode(self._model, self.pooler_output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unencoded:
        return self  # a model that drafts is handed a copy of the arguments, and not one of the model


class PutOff(dict[str, Any]):
    """The ``mm_encoder_outputs`` of a generate(): `Unencoded` media of each kind, until a forward needs them all."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # for a set that does not keep it alive

    def encode(self) -> None:
        """For forwards that know nothing of this. In place: where nothing is cached, every one of them is given it."""
        for name, output in self.items():
            if isinstance(output, Unencoded):
                self[name] = output.encoded()


def prepare(model: PreTrainedModel) -> None:
    """Has transformers put its hooks on a tower that it collects hidden states from, as at the tower's first call.

    They are part of what K/V depend on, as any hook is: in the middle of a request that call would make it another
    model, and nothing would be cached of the request.
    """
    tower = getattr(model.base_model, "vision_tower", None)
    if modalities_of(model) and tower is not None:
        maybe_install_capturing_hooks(tower)


def put_off_encoding(model: PreTrainedModel, ids: torch.Tensor | None, arguments: dict[str, Any]) -> PutOff | None:
    """Replaces the media among the arguments of a generate() by what it returns; None where they are not served."""
    if ids is None or arguments.get(ENCODED) or any(arguments.get(name) is not None for name in _OPTIONS):
        return None
    media = {modality: _split(model, modality, ids, arguments) for modality in modalities_of(model)}
    if any(found is None for found in media.values()):
        return None
    for modality in media:
        for name in modality.arguments:
            arguments.pop(name, None)
    put_off = PutOff({modality.name: Unencoded(model, found) for modality, found in media.items() if found})
    arguments[ENCODED] = put_off
    return put_off


def encode_now(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a forward, as a model takes them that nothing is cached of."""
    if isinstance(given := arguments.get(ENCODED), PutOff):
        given.encode()
    return arguments


def given_media(model: PreTrainedModel, modality: Modality, arguments: Mapping[str, Any]) -> list[Medium] | None:
    """The media of one kind that a forward is given; None where the arguments do not have the form that is served."""
    encoded = (arguments.get(ENCODED) or {}).get(modality.name)
    if encoded is None:
        return _split(model, modality, arguments["input_ids"], arguments)
    # Of embeddings that the caller made it is not known what they are made of.
    return encoded.pooler_output if isinstance(encoded, Unencoded) else None


def _split(
    model: PreTrainedModel, modality: Modality, ids: torch.Tensor, arguments: Mapping[str, Any]
) -> list[Medium] | None:
    pixels, grid = arguments.get(modality.pixels), arguments.get(modality.grid or "")
    if pixels is None:
        return [] if grid is None else None
    if not isinstance(pixels, torch.Tensor) or len(pixels) == 0:
        return None
    if modality.grid is not None:
        return _split_by_grid(model, modality, pixels, grid, arguments.get(SECONDS))
    placeholders = int((ids == model.config.image_token_id).sum())
    if pixels.ndim != 4 or placeholders % len(pixels):
        return None
    how = (repr(model.config.vision_feature_layer), model.config.vision_feature_select_strategy)
    tokens = placeholders // len(pixels)
    return [Medium(modality, {modality.pixels: one}, tokens, how) for one in torch.split(pixels, 1)]


def _split_by_grid(
    model: PreTrainedModel, modality: Modality, pixels: torch.Tensor, grid: Any, seconds: Any
) -> list[Medium] | None:
    if not isinstance(grid, torch.Tensor) or grid.ndim != 2 or grid.shape[1] != 3 or pixels.ndim != 2:
        return None
    patches = grid.prod(dim=1).tolist()
    if sum(patches) != len(pixels):
        return None
    if modality.name != "video" or seconds is None:
        apart: list[tuple[float, ...]] = [()] * len(grid)
    elif len(seconds) == len(grid):
        apart = [(float(one),) for one in seconds]
    else:
        return None
    each = model.config.vision_config.spatial_merge_size**2
    assert modality.grid is not None
    return [
        Medium(modality, {modality.pixels: rows, modality.grid: size}, count // each, depends_on)
        for rows, size, count, depends_on in zip(
            torch.split(pixels, patches), torch.split(grid, 1), patches, apart, strict=True
        )
    ]


def _encode(model: PreTrainedModel, media: list[Medium]) -> Any:
    """The encoder's output for media of one kind: in ``pooler_output`` the embeddings of each, ``[tokens, hidden]``."""
    once = list(dict.fromkeys(media))
    arguments = {name: torch.cat([medium.arguments[name] for medium in once]) for name in once[0].arguments}
    output = getattr(model.base_model, f"get_{once[0].modality.name}_features")(**arguments, return_dict=True)
    if len(once) < len(media):
        place = {medium: at for at, medium in enumerate(once)}
        _replace_features(output, lambda features: [features[place[medium]] for medium in media])
    return output


def _replace_features(output: Any, change: Any) -> None:
    """Puts `change` of what the encoder has for each medium in its place; some models take more than one such list."""
    output.pooler_output = change(output.pooler_output)
    if (deep := getattr(output, "deepstack_features", None)) is not None:
        output.deepstack_features = [change(features) for features in deep]


def encode_parts(model: PreTrainedModel, parts: list[tuple[Medium, int, int]]) -> Any:
    """The encoder's output for embeddings ``[first, last)`` of each of these media of one kind.

    Raises:
        ValueError: there are not as many embeddings as placeholders.
    """
    output = _encode(model, [medium for medium, _, _ in parts])
    for (medium, _, _), features in zip(parts, output.pooler_output, strict=True):
        if len(features) != len(medium):
            raise ValueError(
                f"the prompt has {len(medium)} placeholder tokens for an {medium.modality.name} that is encoded as "
                f"{len(features)}"
            )
    cuts = [(first, last) for _, first, last in parts]
    _replace_features(
        output, lambda features: [each[first:last] for each, (first, last) in zip(features, cuts, strict=True)]
    )
    return output


def without_encodings(output: Any) -> Any:
    """A forward's output without what the encoders gave: of what is cached there is none."""
    return type(output)(**{name: value for name, value in output.items() if name not in _OUTPUTS})
