"""The cache inside transformers models: `attach` makes ``generate`` and ``model(...)`` use it.

How it works. An attached model has three instance attributes over its class's methods, and the name of an attention
function of ours (a registry entry that falls through to the model's own) in its config:

* ``generate`` is the scope of a request: when it ends well, what was computed is published; however it ends, its
  leases are released.
* ``_prepare_cache_for_generation`` gives greedy and sampled generation a `PagedCache` instead of a ``DynamicCache``.
* ``forward`` looks the prompt up, packs the tokens that are not cached, without padding, into one row, and runs the
  model's own forward on it; its layers write K/V into the pool and attend over it.

What cannot be cached runs the model's own code untouched: training, gradients, ``inputs_embeds``, a cache of the
user's own, beams, masks that are not left padding, outputs of hidden states or attention weights.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from npu_prompt_cache.attention.cpu import PagedBatch, Sequence
from npu_prompt_cache.errors import PromptCacheError, UnsupportedModel
from npu_prompt_cache.layout import KVLayout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from npu_prompt_cache.cache import Lease, PromptCache

#: Model types whose attention is known to be: rotary positions from ``position_ids``, full causal attention over
#: ``cache.update``'s keys, through the attention registry. Each is tested against its uncached self.
SUPPORTED_MODEL_TYPES = (
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
#: Rotary scalings under which a token's key depends on nothing but the token's position.
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
#: What the original attention may be; ours is registered once for each.
SUPPORTED_ATTENTION = ("sdpa", "eager")

_NAME = "npu_prompt_cache"
#: Arguments of a forward that this integration understands; any other that is not None bypasses the cache.
_UNDERSTOOD = frozenset(
    {"input_ids", "attention_mask", "position_ids", "cache", "use_cache", "logits_to_keep", "return_dict"}
)
_FORBIDDEN_WHEN_TRUE = frozenset({"output_attentions", "output_hidden_states"})


class CacheBypassWarning(RuntimeWarning):
    """A request ran uncached because the pool could not hold it, or the runtime failed."""


# ---- which models ----


def layout_of(model: PreTrainedModel, block_size: int = 128) -> KVLayout:
    """The K/V geometry of a supported model.

    Raises:
        UnsupportedModel: its K/V cannot be cached correctly; the message names the model and the reason.
    """
    config = check_supported(model)
    heads = config.num_attention_heads
    return KVLayout(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=model.dtype,
        block_size=block_size,
    )


def check_supported(model: PreTrainedModel) -> PreTrainedConfig:
    """Returns the model's config, or raises `UnsupportedModel` with the reason."""
    name = type(model).__name__

    def refuse(reason: str) -> None:
        raise UnsupportedModel(f"{name} cannot use the prompt cache: {reason}")

    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        refuse("it is not a transformers model with generate() (attach the ...ForCausalLM class)")
    config = model.config
    if config.is_encoder_decoder:
        refuse("it is an encoder-decoder: its decoder's K/V depend on the encoder's input, not on token ids alone")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        refuse(f"it has layers of type {', '.join(sorted(kinds - {'full_attention'}))}; only full attention is served")
    if getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None:
        refuse(f"it attends over a sliding window (sliding_window={config.sliding_window})")
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        refuse(f"model_type {config.model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in SUPPORTED_ROPE_TYPES:
        refuse(f"rope_type {rope!r} makes keys depend on the length of the sequence")
    if getattr(model, "_hf_peft_config_loaded", False):
        refuse("it has adapters loaded, which change what K/V depend on")
    own = _original_attention(config._attn_implementation)
    if own not in SUPPORTED_ATTENTION:
        refuse(f"attn_implementation {own!r} is not one of {', '.join(SUPPORTED_ATTENTION)}")
    return config


# ---- attention through the registries ----


def _original_attention(name: str | None) -> str:
    """The model's own attention implementation, also while ours is set."""
    return (name or "eager").removeprefix(f"{_NAME}|")


def _attention(
    own: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged_forward: _PagedForward | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Over the pool inside a cached forward, else the model's own."""
    if paged_forward is None:
        function = (
            sys.modules[type(module).__module__].eager_attention_forward
            if own == "eager"
            else ALL_ATTENTION_FUNCTIONS[own]
        )
        return function(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]
    return paged_forward.attend(module.layer_idx, query, scaling), None  # type: ignore[arg-type]


for _own in SUPPORTED_ATTENTION:
    AttentionInterface.register(f"{_NAME}|{_own}", functools.partial(_attention, _own))
    AttentionMaskInterface.register(f"{_NAME}|{_own}", ALL_MASK_ATTENTION_FUNCTIONS[_own])


# ---- one forward ----


class _Request(NamedTuple):
    """The arguments of a forward that the cache serves."""

    input_ids: torch.Tensor  # [batch, columns]
    starts: npt.NDArray[np.int64]  # [batch]: columns of left padding
    kept: npt.NDArray[np.int64]  # columns whose logits are asked for


class _PagedForward:
    """One forward over the pool: the packed batch, and which layers have written and read it."""

    def __init__(self, cache: PromptCache, batch: PagedBatch) -> None:
        self._cache = cache
        self._batch = batch
        self._attended = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._batch.write(self._cache.key(layer), keys)
        self._batch.write(self._cache.value(layer), values)

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        self._attended += 1
        return self._batch.attend(query, self._cache.key(layer), self._cache.value(layer), scale)

    def check_complete(self, model: PreTrainedModel) -> None:
        """A model that passed a layer by our attention computed something else."""
        if self._attended != self._cache.layout.num_layers:
            raise UnsupportedModel(
                f"{type(model).__name__}: {self._attended} of {self._cache.layout.num_layers} layers attended over "
                "the pool; its attention does not go through the registry"
            )


class PagedCache(Cache):
    """The `Cache` that an attached model is given: its K/V lie in the pool, held by one lease a row.

    To code that only passes it on it looks like a ``DynamicCache``. Code that reaches into it (``layers``, ``crop``,
    ``reorder_cache``, …) gets one: the K/V are copied out and the request goes on uncached, with right results.
    """

    layer_class_to_replicate = None
    offloading = False

    def __init__(self, attachment: Attachment, in_generate: bool, pad_token_id: int | None = None) -> None:
        self._attachment = attachment
        #: Made by a generate() that is still running: it publishes at its end, and its masks need no look.
        self.in_generate = in_generate
        self._pad_token_id = pad_token_id
        self._leases: list[Lease] = []
        self._starts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._prompts: list[npt.NDArray[np.int64]] = []  # token ids of each row, as far as the first forward saw
        self._later: list[torch.Tensor] = []  # ids [batch, n] of each later forward, on the model's device
        self._columns = 0  # padding and tokens so far, the same for all rows
        self._forward: _PagedForward | None = None
        self._dense: DynamicCache | None = None

    # -- as a transformers Cache

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of the dense cache that this one becomes when it is asked for them."""
        return self.to_dense().layers  # type: ignore[no-any-return]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens' K/V into the pool (inside a cached forward) or into the dense cache."""
        if self._forward is None:
            return self.to_dense().update(key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
        self._forward.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far: what the longest row holds."""
        return self._columns if self._dense is None else int(self._dense.get_seq_length(layer_idx))

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows as long as the pool has room, and goes on outside the pool then."""
        return -1

    def __len__(self) -> int:
        return self._attachment.cache.layout.num_layers

    @property
    def is_compileable(self) -> bool:
        """False: its shapes grow."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """No layer has a recurrent state."""
        return [False] * len(self)

    is_sliding = is_dummy = is_linear

    def __repr__(self) -> str:
        where = "dense" if self._dense is not None else "in the pool"
        return f"PagedCache(rows={len(self._leases)}, length={self.get_seq_length()}, {where})"

    # -- as the integration's

    @property
    def dense(self) -> DynamicCache | None:
        """What this cache became when it left the pool; None before."""
        return self._dense

    @property
    def is_empty(self) -> bool:
        """True before the first forward."""
        return self._columns == 0

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Columns of left padding of each row."""
        return self._starts

    def begin(self, request: _Request) -> list[int]:
        """Makes room for a forward of the request's columns. Returns, for each row, its new tokens that are cached.

        Raises:
            PromptCacheError: the pool cannot hold it; the cache is as it was.
        """
        columns = request.input_ids.shape[1]
        if not self.is_empty:
            self._extend(columns)
            return [0] * len(self._leases)
        cache, leases = self._attachment.cache, self._leases
        ids = request.input_ids.numpy(force=True)
        namespace = self._attachment.namespace()
        prompts = [row[start:] for row, start in zip(ids, request.starts, strict=True)]
        try:
            for prompt, start in zip(prompts, request.starts, strict=True):
                first_kept = max(int(request.kept.min()) - int(start), 0)
                leases.append(cache._acquire(namespace, prompt, first_kept, None))
        except BaseException:
            self.release()
            raise
        self._prompts, self._starts = prompts, request.starts
        return [lease.cached_tokens for lease in leases]

    def _extend(self, columns: int) -> None:
        for lease, start in zip(self._leases, self._starts, strict=True):
            # A row that was extended before another one failed keeps its slots.
            lease.extend(max(0, self._columns - int(start) + columns - lease.length))

    def batch(self, request: _Request, skips: list[int]) -> PagedBatch:
        """The packed batch of the request's columns, without `skips` tokens at the beginning of each row."""
        columns = request.input_ids.shape[1]
        sequences, slots, at = [], [], 0
        layout = self._attachment.cache.layout
        for lease, start, skip in zip(self._leases, self._starts, skips, strict=True):
            length = self._columns - int(start) + columns
            first = max(self._columns - int(start), 0) + skip
            slots.append(lease.slots(first, length))
            sequences.append(Sequence(at, at + length - first, length, lease.block_table))
            at += length - first
        return PagedBatch(sequences, np.concatenate(slots), layout.block_size, layout.dtype)

    @contextmanager
    def running(self, forward: _PagedForward) -> Iterator[None]:
        """The model's forward runs: `update` writes into the pool."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def advance(self, input_ids: torch.Tensor) -> None:
        """The forward went well: its tokens' K/V are in the pool."""
        if not self.is_empty:
            self._later.append(input_ids)
        self._columns += input_ids.shape[1]
        if not self.in_generate:
            self.publish()

    def publish(self) -> None:
        """Commits every row as far as it was computed."""
        if self._dense is not None or self.is_empty:
            return
        later = torch.cat(self._later, dim=1).numpy(force=True) if self._later else None
        for row, lease in enumerate(self._leases):
            ids = self._prompts[row]
            if later is not None:
                ids = np.concatenate([ids, _without_padding(later[row], self._pad_token_id)])
            lease.commit(ids)

    def release(self) -> None:
        """Gives the leases back; what was not published is lost."""
        leases, self._leases = self._leases, []
        for lease in leases:
            if not lease.released:
                lease.release()

    def to_dense(self) -> DynamicCache:
        """Copies the K/V out of the pool, left-padded, into the `DynamicCache` that this cache is from now on."""
        if self._dense is None:
            cache, dense = self._attachment.cache, DynamicCache(config=self._attachment.model.config)
            lengths = [self._columns - int(start) for start in self._starts]
            if not self.is_empty:
                slots = [torch.from_numpy(lease.slots(0, n)) for lease, n in zip(self._leases, lengths, strict=True)]
                for layer in range(len(self)):
                    dense.update(self._rows(cache.key(layer), slots), self._rows(cache.value(layer), slots), layer)
            self._dense = dense
            self.release()
        return self._dense

    def _rows(self, plane: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        flat = plane.view(-1, *plane.shape[2:])
        rows = plane.new_zeros(len(slots), self._columns, *plane.shape[2:])
        for row, of_row in enumerate(slots):
            rows[row, self._columns - len(of_row) :] = flat[of_row.to(plane.device)]
        return rows.transpose(1, 2).contiguous()


def _without_padding(ids: npt.NDArray[np.int64], pad_token_id: int | None) -> npt.NDArray[np.int64]:
    """Generated ids without the padding that follows a row's end; one is left: it may be the end-of-sequence token."""
    if pad_token_id is None or len(ids) == 0 or ids[-1] != pad_token_id:
        return ids
    others = np.flatnonzero(ids != pad_token_id)
    return ids[: (others[-1] + 2 if len(others) else 1)]


# ---- the attachment ----


class Attachment:
    """A cache attached to a model; made by `PromptCache.attach`. A context manager that detaches."""

    def __init__(self, cache: PromptCache, model: PreTrainedModel) -> None:
        self.cache = cache
        self.model = model
        #: True where closing the cache is up to `npu_prompt_cache.disable`.
        self.owns_cache = False
        self._own_attention = _original_attention(model.config._attn_implementation)
        self._parameters = [module._parameters for module in model.modules() if module._parameters]
        self._weights: list[tuple[int, int]] = []
        self._weights_version = 0
        self._weights_lock = threading.Lock()
        self._scopes = threading.local()
        self._requires_grad = any(p.requires_grad for p in model.parameters())
        self._replaced: dict[str, Any] = {}
        self._installed = False
        self._install()

    def detach(self) -> None:
        """Restores the model exactly. May be called again."""
        if not self._installed:
            return
        self._installed = False
        for name, before in self._replaced.items():
            if before is None:
                del self.model.__dict__[name]
            else:
                self.model.__dict__[name] = before
        self.model.set_attn_implementation(self._own_attention)
        self.cache._attachments.remove(self)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.detach()

    def _install(self) -> None:
        methods = {
            "forward": self._forward,
            "generate": self._generate,
            "_prepare_cache_for_generation": self._prepare_cache,
        }
        self.model.set_attn_implementation(f"{_NAME}|{self._own_attention}")
        for name, replacement in methods.items():
            self._replaced[name] = self.model.__dict__.get(name)
            self.model.__dict__[name] = _Method(self, name, getattr(self.model, name), replacement)
        self.cache._attachments.append(self)
        self._installed = True

    # -- namespace

    def namespace(self) -> bytes:
        """What K/V of this model depend on besides tokens: the model object, and its weights as they are now.

        Weights that were updated in place, replaced or moved since the last request make a new namespace, so that
        nothing computed with the old ones is hit. (``parameter.data.add_()`` leaves no trace; `PromptCache.clear`
        after such an update.)
        """
        with self._weights_lock:
            now = [_identity(p) for group in self._parameters for p in group.values() if p is not None]
            if now != self._weights:
                self._weights = now
                self._weights_version = _next_version(self.model)
            return b"model" + model_id(self.model) + self._weights_version.to_bytes(8, "little")

    # -- generate: the scope of a request

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        outer = getattr(self._scopes, "caches", None)
        caches: list[PagedCache] = []
        self._scopes.caches = caches
        kept: Cache | None = None
        try:
            result = original(*args, **kwargs)
            kept = getattr(result, "cache", None)
            for cache in caches:
                cache.publish()
            return result
        finally:
            self._scopes.caches = outer
            for cache in caches:
                cache.in_generate = False
                if cache is not kept:
                    cache.release()

    def _prepare_cache(
        self,
        original: Callable[..., Any],
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        caches: list[PagedCache] | None = getattr(self._scopes, "caches", None)
        serves = (
            caches is not None
            and model_kwargs.get("cache") is None
            and generation_config.use_cache is not False
            and generation_config.cache_implementation is None
            and generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
            and not generation_config.is_assistant
        )
        if not serves or caches is None:
            original(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            return
        pad = generation_config._pad_token_tensor
        paged = PagedCache(self, in_generate=True, pad_token_id=None if pad is None else int(pad))
        caches.append(paged)
        model_kwargs["cache"] = paged

    # -- forward

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        names = _positional_names(type(self.model))
        kwargs.update(zip(names, args, strict=False))
        if "past_key_values" in kwargs and kwargs.get("cache") is None:
            kwargs["cache"] = kwargs.pop("past_key_values")
        cache = kwargs.get("cache")
        paged = cache if isinstance(cache, PagedCache) and cache._attachment is self else None
        request = self._request(kwargs, paged)
        if request is not None:
            is_new = paged is None
            if paged is None:
                paged = PagedCache(self, in_generate=False)
            try:
                skips = paged.begin(request)
            except PromptCacheError as error:
                warnings.warn(f"running uncached: {error}", CacheBypassWarning, stacklevel=2)
                if is_new:
                    paged = None
            else:
                return self._run(original, kwargs, paged, request, skips)
        if isinstance(cache, PagedCache):
            kwargs["cache"] = cache.to_dense()
        return original(**kwargs)

    def _run(
        self,
        original: Callable[..., Any],
        kwargs: dict[str, Any],
        paged: PagedCache,
        request: _Request,
        skips: list[int],
    ) -> CausalLMOutputWithPast:
        first = paged.is_empty
        try:
            batch = paged.batch(request, skips)
            rows, positions = _pack(request, batch, skips)
            forward = _PagedForward(self.cache, batch)
            with paged.running(forward):
                output = original(
                    input_ids=rows,
                    position_ids=positions,
                    attention_mask=_NO_MASK,
                    cache=paged,
                    use_cache=True,
                    logits_to_keep=_kept_rows(request, batch, skips),
                    return_dict=True,
                    paged_forward=forward,
                )
            forward.check_complete(self.model)
            paged.advance(request.input_ids)
        except BaseException:
            if first:  # nobody else can give these back
                paged.release()
            raise
        output.logits = _unpack(output.logits, request)
        return output  # type: ignore[no-any-return]

    def _request(self, kwargs: dict[str, Any], paged: PagedCache | None) -> _Request | None:
        """The arguments as the cache serves them, or None where they ask for something that it does not."""
        model, ids = self.model, kwargs.get("input_ids")
        if (
            ids is None
            or ids.ndim != 2
            or ids.numel() == 0
            or model.training
            or (torch.is_grad_enabled() and self._requires_grad)
            or (kwargs.get("cache") is not None and (paged is None or paged.dense is not None))
            or not _first_of(kwargs.get("use_cache"), model.config.use_cache)
            or not _first_of(kwargs.get("return_dict"), model.config.return_dict)
            or any(value is not None for name, value in kwargs.items() if name not in _UNDERSTOOD | _FORBIDDEN_WHEN_TRUE)
            or any(_first_of(kwargs.get(name), getattr(model.config, name, None)) for name in _FORBIDDEN_WHEN_TRUE)
            or getattr(model, "_hf_peft_config_loaded", False)
        ):
            return None
        batch, columns = ids.shape
        past = 0 if paged is None else paged.get_seq_length()
        if past and paged is not None and paged.in_generate:
            starts = np.zeros(batch, np.int64)  # generate() only adds a column of ones
        else:
            checked = _left_padding(kwargs.get("attention_mask"), batch, past, columns, paged)
            if checked is None or not _positions_are_natural(kwargs.get("position_ids"), checked, past, columns):
                return None
            starts = checked if past == 0 else np.zeros(batch, np.int64)
        kept = _kept_columns(kwargs.get("logits_to_keep", 0), columns)
        return None if kept is None else _Request(ids, starts, kept)


class _Method:
    """An instance attribute over a method of the model; a copy of the model gets the plain method."""

    def __init__(
        self, attachment: Attachment, name: str, original: Callable[..., Any], replacement: Callable[..., Any]
    ) -> None:
        self.attachment = attachment
        self._name = name
        self._original = original
        self._replacement = replacement
        functools.update_wrapper(self, original)  # generate() reads the signature of forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self._replacement(self._original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> types.MethodType:
        copied_model = memo[id(self.attachment.model)]
        return types.MethodType(getattr(type(copied_model), self._name), copied_model)


def attach(cache: PromptCache, model: PreTrainedModel) -> Attachment:
    """Attaches `cache` to `model`; see `PromptCache.attach`."""
    if _attached(model) is not None:
        raise ValueError(f"{type(model).__name__} has a cache attached already; detach it first")
    layout = layout_of(model, cache.layout.block_size)
    if layout != cache.layout:
        raise ValueError(f"the cache's layout {cache.layout} does not fit {type(model).__name__}, which has {layout}")
    if cache.config.device_type != "cpu" or model.device.type != "cpu":
        raise UnsupportedModel(
            f"{type(model).__name__} is on {model.device}, the cache on {cache.config.device}: this version attends "
            "over the pool on the CPU only"
        )
    return Attachment(cache, model)


def attachment_of(model: PreTrainedModel) -> Attachment:
    """The attachment of a model.

    Raises:
        ValueError: it has none.
    """
    attachment = _attached(model)
    if attachment is None:
        raise ValueError(f"{type(model).__name__} has no cache attached")
    return attachment


def _attached(model: PreTrainedModel) -> Attachment | None:
    method = getattr(model, "__dict__", {}).get("forward")
    return method.attachment if isinstance(method, _Method) else None


# ---- small parts ----

#: A mask that is 4-D already is passed through by the models' mask functions: the batch knows what attends to what.
_NO_MASK = torch.empty(1, 1, 0, 0)

_model_ids: weakref.WeakKeyDictionary[PreTrainedModel, bytes] = weakref.WeakKeyDictionary()
_weight_versions: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def model_id(model: PreTrainedModel) -> bytes:
    """16 random bytes that stand for this model object in this process."""
    return _model_ids.setdefault(model, os.urandom(16))


def _next_version(model: PreTrainedModel) -> int:
    """Counts on over attachments: a model may be trained while it is detached."""
    _weight_versions[model] = _weight_versions.get(model, 0) + 1
    return _weight_versions[model]


def _identity(parameter: torch.Tensor) -> tuple[int, int]:
    """Where a parameter's data lie and how often they were written."""
    return parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version


@functools.cache
def _positional_names(model_class: type[PreTrainedModel]) -> tuple[str, ...]:
    return tuple(inspect.signature(model_class.forward).parameters)[1:]


def _first_of(given: Any, default: Any) -> Any:  # noqa: ANN401
    return default if given is None else given


def _left_padding(
    mask: torch.Tensor | None, batch: int, past: int, columns: int, paged: PagedCache | None
) -> npt.NDArray[np.int64] | None:
    """Columns of left padding of each row, or None where the mask is anything else than left padding."""
    known = paged.starts if paged is not None and past else None
    if mask is None:
        # Without a mask the model attends to padding that the cache holds, and has its reasons.
        return None if known is not None and known.any() else np.zeros(batch, np.int64)
    if mask.ndim != 2 or tuple(mask.shape) != (batch, past + columns):
        return None
    seen = mask.numpy(force=True) != 0
    starts = (past + columns - seen.sum(axis=1)).astype(np.int64)
    is_left_padding = bool((seen == (np.arange(past + columns) >= starts[:, None])).all())
    fits = bool((starts == known).all()) if known is not None else bool((starts < columns).all())
    return starts if is_left_padding and fits else None


def _positions_are_natural(
    positions: torch.Tensor | None, starts: npt.NDArray[np.int64], past: int, columns: int
) -> bool:
    """True where each row counts its own tokens from 0."""
    if positions is None:
        # The model would count columns, padding included: the same only where there is none.
        return not starts.any()
    if positions.ndim != 2 or positions.shape[1] != columns:
        return False
    at = np.arange(past, past + columns) - starts[:, None]
    given = np.broadcast_to(positions.numpy(force=True), at.shape)
    return bool(((given == at) | (at < 0)).all())


def _kept_columns(keep: int | torch.Tensor, columns: int) -> npt.NDArray[np.int64] | None:
    """Columns whose logits are asked for, or None where they are asked for in a way that is not served."""
    if isinstance(keep, int):
        return np.arange(0 if keep == 0 else max(columns - keep, 0), columns)
    if keep.ndim != 1 or keep.numel() == 0 or keep.dtype == torch.bool:
        return None
    kept: npt.NDArray[np.int64] = keep.numpy(force=True).astype(np.int64)
    kept = np.where(kept < 0, kept + columns, kept)
    return kept if bool(((kept >= 0) & (kept < columns)).all()) else None


def _pack(request: _Request, batch: PagedBatch, skips: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The new tokens of all rows, and their positions, each ``[1, tokens]``."""
    rows = [
        row[int(start) + skip :] for row, start, skip in zip(request.input_ids, request.starts, skips, strict=True)
    ]
    positions = [
        torch.arange(sequence.kv_length - (sequence.stop - sequence.start), sequence.kv_length)
        for sequence in batch.sequences
    ]
    device = request.input_ids.device
    return torch.cat(rows).unsqueeze(0), torch.cat(positions).unsqueeze(0).to(device)


def _packed_places(request: _Request, batch: PagedBatch, skips: list[int]) -> npt.NDArray[np.int64]:
    """``[batch, kept]``: where each column asked for stands in the packed row; -1 for padding."""
    first = np.array([sequence.start for sequence in batch.sequences]) - request.starts - np.array(skips)
    return np.where(request.kept >= request.starts[:, None], request.kept + first[:, None], -1)


def _kept_rows(request: _Request, batch: PagedBatch, skips: list[int]) -> torch.Tensor:
    """Places in the packed row whose logits are asked for; padding asks for place 0, and gets no use of it."""
    places = _packed_places(request, batch, skips).clip(min=0)
    return torch.from_numpy(places.reshape(-1)).to(request.input_ids.device)


def _unpack(logits: torch.Tensor, request: _Request) -> torch.Tensor:
    """Logits ``[1, batch * kept, vocabulary]`` as ``[batch, kept, vocabulary]``; those of padding are 0."""
    shaped = logits.view(len(request.starts), len(request.kept), -1)
    padding = request.kept < request.starts[:, None]
    if padding.any():
        shaped[torch.from_numpy(padding).to(logits.device)] = 0
    return shaped
