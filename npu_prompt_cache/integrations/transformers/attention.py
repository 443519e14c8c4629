"""Our attention and mask functions in transformers' registries, and the forward that they serve.

A model makes a mask for each kind of its layers through the registry and hands it on to their attention. Inside a
cached forward the masks are empty tensors that stand for what they would hide: what a layer's queries see is told by
the mask that its attention is given, and by nothing else, as it is without a cache.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from npu_prompt_cache.attention.kind import EVERYTHING, AttentionKind, Span
from npu_prompt_cache.errors import UnsupportedModel
from npu_prompt_cache.integrations.transformers.models import ATTENTION_PREFIX, SUPPORTED_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig, PreTrainedModel

    from npu_prompt_cache.attention import PagedBatch
    from npu_prompt_cache.cache import PromptCache


#: What models tell their attention that says nothing about who attends to what, or how: the batch knows where tokens
#: stand. False and None say nothing either; whatever else is said must not be left out, and is refused.
_SAYS_NOTHING = frozenset({"position_ids", "use_cache"})


class PagedForward:
    """One forward over the pool: the packed batch, the masks, and which layers have written and read it.

    Args:
        cache: the pool.
        batch: where its tokens go.
        reach: `kept_tokens` of the model.
    """

    #: False where the model's own attention runs.
    attends = True

    def __init__(self, cache: PromptCache, batch: PagedBatch, reach: list[int | None]) -> None:
        self._cache = cache
        self._batch = batch
        self._reach = reach
        self._attended: set[int] = set()
        self._masks: list[tuple[torch.Tensor, Span]] = []
        self._written: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens' K/V, each ``[1, kv_heads, tokens, head_dim]``, into their slots; returns them."""
        planes = self._cache.key(layer), self._cache.value(layer)
        if layer in self._written:
            raise UnsupportedModel(f"layer {layer} caches twice in one forward")
        try:
            self._batch.write(*planes, keys, values)
        except RuntimeError:
            for name, plane, states in zip("KV", planes, (keys, values), strict=True):
                _check_geometry(layer, name, plane, states)
            raise
        self._written[layer] = weakref.ref(keys), weakref.ref(values)
        return keys, values

    def layer_of(self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor) -> int:
        """The layer that has cached what is attended over: the module's own, or an earlier one whose K/V it shares.

        A model that attends over anything else than what it has cached in this forward computes something else.
        """
        for layer, (keys, values) in reversed(self._written.items()):
            if key is keys() and value is values():
                return layer
        raise UnsupportedModel(f"{type(module).__name__} attends over other keys or values than it caches")

    def mask(self, span: Span, device: torch.device) -> torch.Tensor:
        """A tensor that stands for the mask of layers whose queries see so much."""
        mask = torch.empty(1, 1, 0, 0, device=device)
        self._masks.append((mask, span))
        return mask

    def span_of(self, module: torch.nn.Module, mask: torch.Tensor | None) -> Span:
        """What the mask that a layer's attention is given stands for."""
        name = type(module).__name__
        span = next((span for ours, span in self._masks if ours is mask), None)
        if span is None:
            raise UnsupportedModel(f"{name} attends by a mask that transformers' mask functions have not made")
        # Without the cache a layer sees no more than transformers' own cache keeps for it.
        reach = span.window if span.chunk is None else span.chunk
        kept = self._reach[module.layer_idx]  # type: ignore[index]
        if reach != kept:
            raise UnsupportedModel(f"{name} hides all but {reach} tokens, where its config has {kept} kept")
        return span

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kind: AttentionKind,
    ) -> torch.Tensor:
        """Of packed queries ``[1, heads, tokens, head_dim]``; returns ``[1, tokens, heads, head_dim]``."""
        layer = self.layer_of(module, key, value)
        self._attended.add(layer)
        return self._batch.attend(query, self._cache.key(layer), self._cache.value(layer), kind)

    def mask_to_give(self, model: PreTrainedModel) -> torch.Tensor | None:
        """What the model is given as ``attention_mask``: None where it makes those of `mask` itself."""
        return None

    def check_complete(self, model: PreTrainedModel) -> None:
        """A model that passed a layer by our attention, or its cache, computed something else."""
        layers = self._cache.layout.num_layers
        if len(self._attended) != layers or len(self._written) != layers:
            raise UnsupportedModel(
                f"{type(model).__name__}: of {layers} layers {len(self._written)} cached in the pool and "
                f"{len(self._attended)} attended over it; its attention does not go through the registry"
            )


def _check_geometry(layer: int, name: str, plane: torch.Tensor, states: torch.Tensor) -> None:
    _, _, heads, head_dim = plane.shape
    if states.shape[1::2] != (heads, head_dim) or states.dtype != plane.dtype:
        raise UnsupportedModel(
            f"layer {layer} computes {name} of {tuple(states.shape)} {states.dtype}; its config promises "
            f"[1, {heads}, tokens, {head_dim}] {plane.dtype}"
        )


class _Running(threading.local):
    forward: PagedForward | None = None


_running = _Running()


@contextmanager
def attending(forward: PagedForward | None) -> Iterator[None]:
    """Attention of this thread is over that forward's pool, or the model's own where it is None.

    The thread tells it, and no argument, because some models hand none on to their attention.
    """
    before = _running.forward
    _running.forward = forward
    try:
        yield
    finally:
        _running.forward = before


class _Stance:
    """How many served forwards run. Every attribute is guarded by `lock`."""

    lock = threading.Lock()
    running = 0
    of_users: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Whatever torch.compile made inside the model runs as it was written: a served forward cannot be compiled.

    The compiler's stance is one for all threads: it is the user's again when the last served forward has ended.
    """
    with _Stance.lock:
        _Stance.running += 1
        if _Stance.running == 1:
            _Stance.of_users = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _Stance.lock:
            _Stance.running -= 1
            if _Stance.running == 0:
                _Stance.of_users.__exit__(None, None, None)


def _attention(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Over the pool inside a cached forward, else the model's own."""
    paged = _running.forward  # a constant to a compiler, which sees this only outside of served forwards
    if paged is None or not paged.attends:
        function = (
            sys.modules[type(module).__module__].eager_attention_forward
            if own == "eager"
            else ALL_ATTENTION_FUNCTIONS[own]
        )
        return function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    span = paged.span_of(module, attention_mask)
    kind = _kind(own, module, span, scaling, kwargs)
    _refuse_what_is_not_served(module, kwargs)
    return paged.attend(module, query, key, value, kind), None


def _kind(
    own: str, module: torch.nn.Module, span: Span, scaling: float | None, kwargs: dict[str, Any]
) -> AttentionKind:
    """What the model's own attention would do with these arguments; takes those that it understands out of them."""
    # It hides nothing by this one: the mask does.
    if (window := kwargs.pop("sliding_window", None)) is not None and window != span.window:
        raise UnsupportedModel(
            f"{type(module).__name__} tells its attention of a sliding_window of {window}, where its mask has "
            f"{'none' if span.window is None else span.window}"
        )
    if own != "eager":  # torch's takes neither of the two below
        return AttentionKind(scaling, span)
    return AttentionKind(scaling, span, kwargs.pop("softcap", None), kwargs.pop("s_aux", None))


def _refuse_what_is_not_served(module: torch.nn.Module, kwargs: dict[str, Any]) -> None:
    """Biases, other heads, …: what changes attention reaches it as an argument, by any name."""
    if not kwargs.pop("is_causal", getattr(module, "is_causal", True)):
        raise UnsupportedModel(f"{type(module).__name__} attends to later tokens; only causal attention is served")
    kwargs["dropout"] = kwargs.get("dropout") or None
    for name, said in kwargs.items():
        if said is not None and said is not False and name not in _SAYS_NOTHING:
            raise UnsupportedModel(f"{type(module).__name__} asks its attention for {name}, which is not served")


def _mask(own: str, *args: Any, **kwargs: Any) -> Any:
    """A stand-in inside a cached forward, else the model's own mask."""
    paged = _running.forward
    if paged is None or not paged.attends:
        return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)
    return paged.mask(_span(kwargs["mask_function"], kwargs.get("local_size")), kwargs["device"])


def _span(function: Callable[..., Any], size: int | None) -> Span:
    """What a mask function shows: one that is not what transformers makes for that is refused."""
    if function is causal_mask_function:
        return EVERYTHING
    if size is not None:
        if _same(function, sliding_window_causal_mask_function(size)):
            return Span(window=size)
        if _same(function, chunked_causal_mask_function(size, torch.zeros(1))):
            return Span(chunk=size)
    raise UnsupportedModel("a mask is asked for that is neither causal nor of a sliding window or chunks alone")


def _same(one: Any, other: Any) -> bool:
    """True where two functions have the same code and, all the way down, the same values bound to it."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return True  # columns of left padding: the packed row has none
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return bool(one == other)
    bound = [tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (one, other)]
    return one.__code__ is other.__code__ and _same(*bound)


def kept_tokens(config: PreTrainedConfig) -> list[int | None]:
    """How many of a layer's last tokens transformers' own cache lets a query see, itself among them; None for all."""
    _, options = get_layer_types_and_kwargs(config)
    return [of_layer.get("sliding_window") for of_layer in options]


for _own in SUPPORTED_ATTENTION:
    AttentionInterface.register(f"{ATTENTION_PREFIX}{_own}", functools.partial(_attention, _own))
    AttentionMaskInterface.register(f"{ATTENTION_PREFIX}{_own}", functools.partial(_mask, _own))
