"""An attached model: methods of the instance, and the scope of a request."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from npu_prompt_cache.errors import LeaseReleased, PromptCacheError, UnsupportedModel
from npu_prompt_cache.integrations.transformers import media, prompt_media
from npu_prompt_cache.integrations.transformers.attention import attending, kept_tokens, uncompiled
from npu_prompt_cache.integrations.transformers.gathered import forward_of
from npu_prompt_cache.integrations.transformers.models import (
    ATTENTION_PREFIX,
    Way,
    inner_model,
    is_ours,
    layout_of,
    original_attention,
    set_attention,
    text_config,
    way_of,
)
from npu_prompt_cache.integrations.transformers.paged_cache import (
    CacheBypassWarning,
    PagedCache,
    attention_of,
    itself,
)
from npu_prompt_cache.integrations.transformers.request import (
    Piece,
    Request,
    kept_places,
    packed_ids,
    packed_positions,
    read_request,
    unpack,
)
from npu_prompt_cache.integrations.transformers.rotary import rotary_lengths

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from npu_prompt_cache.cache import PromptCache


class Attachment:
    """A cache attached to a model; made by `PromptCache.attach`. A context manager that detaches."""

    def __init__(self, cache: PromptCache, model: PreTrainedModel) -> None:
        self.cache = cache
        self.model = model
        #: True where closing the cache is up to `npu_prompt_cache.disable`.
        self.owns_cache = False
        self.installed = False
        self._positional = tuple(inspect.signature(model.forward).parameters)
        self._reach = kept_tokens(text_config(model))
        self._put_off: weakref.WeakSet[media.PutOff] = weakref.WeakSet()
        self._rotary = rotary_lengths(model)
        # Its forwards set buffers that others read.
        self._alone: AbstractContextManager[object] = nullcontext() if self._rotary.are_fixed else threading.RLock()
        self._replaced: dict[str, Any] = {}
        self._has_said = False  # that a cache_implementation is asked for
        self._install()

    def detach(self) -> None:
        """Restores the model exactly. May be called again, and while other threads run the model."""
        with _AttentionUse.lock:
            if not self.installed:
                return
            self.installed = False
            for put_off in list(self._put_off):  # a generate() that goes on will not know of it
                put_off.encode()
            for name, before in self._replaced.items():
                if not isinstance(self.model.__dict__.get(name), _Method):
                    continue  # somebody wrapped ours: it falls through to the model's own from now on
                if before is None:
                    del self.model.__dict__[name]
                else:
                    self.model.__dict__[name] = before
            self.cache._attachments.remove(self)
            _attachments.discard(self)
            self._attention.attached -= 1
            self._attention.restore_if_unused()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.detach()

    def _install(self) -> None:
        methods = {
            "forward": self._forward,
            "generate": self._generate,
            "_prepare_cache_for_generation": self._prepare_cache,
            "continuous_batching_context_manager": self._continuous_batching,
            "init_continuous_batching": self._start_continuous_batching,
        }
        if media.modalities_of(self.model):
            methods["_maybe_prepare_encoder_kwargs_for_generation"] = self._prepare_media
        with _AttentionUse.lock:
            self._attention = _AttentionUse.of(self.model)
            self._attention.set_ours()
            for name, replacement in methods.items():
                self._replaced[name] = self.model.__dict__.get(name)
                self.model.__dict__[name] = _Method(self, name, getattr(self.model, name), replacement)
            self.cache._attachments.append(self)
            _attachments.add(self)
            self.installed = True

    # -- generate: the scope of a request

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = _Scope(self, _thread.scope, kwargs.get("custom_generate") is None)
        _thread.scope = scope
        try:
            result = original(*args, **kwargs)
            for cache in scope.caches:
                cache.publish()
            return result
        except BaseException:
            for cache in scope.caches:  # a traceback may hold them for long
                cache.release()
            raise
        finally:
            _thread.scope = scope.outer
            for cache in scope.caches:
                cache.in_generate = cache.is_continued_by_generate = False

    def _prepare_cache(
        self,
        original: Callable[..., Any],
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        scope, implementation = _thread.scope, generation_config.cache_implementation
        serves = (
            scope is not None
            and scope.attachment is self
            and model_kwargs.get("cache") is None
            and generation_config.use_cache is not False
            and generation_mode in _SERVED_MODES
        )
        if serves and implementation not in (None, "dynamic"):
            self._say_uncached(implementation)
            serves = False
        if not serves or scope is None:
            original(generation_config, model_kwargs, generation_mode, *args, **kwargs)
            return
        pad = generation_config._pad_token_tensor
        paged = self._new_cache(in_generate=True, pad_token_id=None if pad is None else int(pad))
        paged.is_continued_by_generate = (
            scope.is_standard
            and generation_mode in _TRUSTED_MODES
            and not generation_config.is_assistant
            and generation_config.prefill_chunk_size is None  # later chunks have masks of the caller's
            and generates_by_the_book(self.model)
        )
        if generation_config.is_assistant:
            paged.activate_past_recording()
        scope.keep(paged, generation_config.is_assistant)
        model_kwargs["cache"] = paged

    def _say_uncached(self, implementation: str) -> None:
        if not self._has_said:
            self._has_said = True
            warnings.warn(
                f"running uncached: cache_implementation={implementation!r} asks for another cache than the prompt "
                "cache; leave it out to use this one (said once)",
                CacheBypassWarning,
                stacklevel=2,
            )

    @contextmanager
    def _continuous_batching(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """It has a paged cache of its own, and wants an attention that it knows by name."""
        with self._attention.set_aside(), original(*args, **kwargs) as manager:
            yield manager

    def _start_continuous_batching(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._attention.is_set_aside_here():
            raise PromptCacheError(
                f"{type(self.model).__name__} has a prompt cache attached, and init_continuous_batching() starts what "
                "nobody tells the end of: detach first (npc.disable(model), handle.detach()), or use generate_batch() "
                "or continuous_batching_context_manager(), which set the cache aside while they run"
            )
        return original(*args, **kwargs)

    def _prepare_media(
        self,
        original: Callable[..., Any],
        inputs_tensor: torch.Tensor,
        model_kwargs: dict[str, Any],
        model_input_name: str | None,
        generation_config: GenerationConfig,
    ) -> dict[str, Any]:
        """Has images and videos encoded when it is known which of them are cached, not before."""
        ids = inputs_tensor if model_input_name == "input_ids" else model_kwargs.get("input_ids")
        scope, put_off = _thread.scope, None
        is_standard = scope is not None and scope.attachment is self and scope.is_standard
        if is_standard and generation_config.prefill_chunk_size is None:  # chunks are cut out of what is encoded
            put_off = media.put_off_encoding(self.model, ids, model_kwargs)
        if put_off is None:
            return original(inputs_tensor, model_kwargs, model_input_name, generation_config)  # type: ignore[no-any-return]
        with _AttentionUse.lock:
            if self.installed:
                self._put_off.add(put_off)
            else:
                put_off.encode()
        return model_kwargs

    # -- forward

    def _new_cache(self, in_generate: bool, pad_token_id: int | None = None) -> PagedCache:
        return PagedCache(self.cache, self.model, self._rotary, in_generate, pad_token_id)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.update(zip(self._positional, args, strict=False))
        if "past_key_values" in kwargs and kwargs.get("cache") is None:
            kwargs["cache"] = kwargs.pop("past_key_values")
        cache = kwargs.get("cache")
        if torch.compiler.is_compiling() and (
            torch.is_grad_enabled() or not (cache is None or isinstance(cache, PagedCache))
        ):
            return original(**kwargs)  # not to be served: it is compiled whole
        return self._forward_uncompiled(original, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_uncompiled(self, original: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("cache")
        paged = self._new_cache(in_generate=False) if cache is None else cache
        if not isinstance(paged, PagedCache) or not paged.is_of(self.cache, self.model):
            with self._alone, attending(None):
                return original(**media.encode_now(kwargs))
        # A close or a detach in another thread waits for, or leaves its rest to, the forward that runs.
        with self._attention.running() as is_ours_to_use, self._alone, paged.lock:
            request = read_request(self.cache, self.model, kwargs, paged) if is_ours_to_use else None
            return self._serve(original, kwargs, paged, request)

    def _serve(
        self, original: Callable[..., Any], kwargs: dict[str, Any], paged: PagedCache, request: Request | None
    ) -> Any:
        if request is not None:
            try:
                skips = paged.begin(request)
            except LeaseReleased:
                raise
            except PromptCacheError as error:
                warnings.warn(f"running uncached: {error}", CacheBypassWarning, stacklevel=2)
            else:
                return self._run(original, paged, request, skips)
        if kwargs.get("cache") is not None:
            if request is None:
                paged.publish()  # what is computed from here on is not in the pool
            kwargs["cache"] = paged.to_dense()
        prompt_media.go_on_uncached(self.model, paged.offsets)
        with attending(None):
            return original(**media.encode_now(kwargs))

    def _run(
        self,
        original: Callable[..., Any],
        paged: PagedCache,
        request: Request,
        skips: list[int],
    ) -> CausalLMOutputWithPast:
        first = paged.is_empty
        try:
            with paged.in_order():
                parts = [self._compute(original, paged, request, pieces) for pieces in paged.forwards(request, skips)]
            paged.advance(request.input_ids)
        except BaseException:
            if first:  # nobody else can give these back
                paged.release()
            raise
        output, _ = parts[-1]
        output.logits = unpack([(part.logits, wanted) for part, wanted in parts], request)  # type: ignore[misc]
        return output

    def _compute(
        self, original: Callable[..., Any], paged: PagedCache, request: Request, pieces: list[Piece]
    ) -> tuple[CausalLMOutputWithPast, npt.NDArray[np.int64]]:
        """One forward of the model: its output, and the places of its logits among all that are asked for."""
        batch = paged.batch(pieces)
        places, wanted = kept_places(request, pieces)
        positions, media_inputs = packed_positions(batch), {}
        if request.media is not None or paged.offsets is not None:
            positions = prompt_media.packed_positions(positions, request.media, pieces, paged.offsets)
            media_inputs = prompt_media.encoded_for(self.model, request.media, pieces)
        forward = forward_of(self.model)(self.cache, batch, self._reach)
        with paged.running(forward), attending(forward), uncompiled():
            output = original(
                input_ids=packed_ids(request, pieces),
                position_ids=paged.upload(positions),
                attention_mask=forward.mask_to_give(self.model),
                cache=paged,
                use_cache=True,
                logits_to_keep=paged.upload(places),
                return_dict=True,
                **media_inputs,
            )
        forward.check_complete(self.model)
        return media.without_encodings(output) if media_inputs else output, wanted


class _Scope:
    """A generate() of an attached model that runs in this thread."""

    def __init__(self, attachment: Attachment, outer: _Scope | None, is_standard: bool) -> None:
        self.attachment = attachment
        self.outer = outer  # the generate() that this one runs inside
        self.is_standard = is_standard  # its loop is none of the user's
        #: Published when it ends well, given back when it fails.
        self.caches: list[PagedCache] = []

    def keep(self, cache: PagedCache, is_assistants: bool) -> None:
        """An assistant's cache goes on over many of its generate() calls, to the end of the one that it assists."""
        scope = self.outer if is_assistants and self.outer is not None else self
        scope.caches.append(cache)


class _Thread(threading.local):
    scope: _Scope | None = None


_thread = _Thread()


class _AttentionUse:
    """Who needs our attention function to be the one that a config names: attachments, and forwards that run.

    Models may share a config, and a forward that runs while its model is detached needs the function to its end: the
    model's own is named again when nobody is left. Every attribute is guarded by `lock`.
    """

    lock = threading.RLock()
    _changed = threading.Condition(lock)
    _of_config: ClassVar[dict[int, _AttentionUse]] = {}

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config  # the model may be given another; this one's id is its own as long as it is held
        self._own = original_attention(text_config(model)._attn_implementation)
        self.attached = 0
        self._running_in: list[int] = []  # threads
        self._set_aside_by: list[int] = []  # threads
        self._is_due = False  # ours is to be named when it is set aside no more

    @classmethod
    def of(cls, model: PreTrainedModel) -> _AttentionUse:
        with cls.lock:
            return cls._of_config.setdefault(id(model.config), cls(model))

    def set_ours(self) -> None:
        self._is_due = way_of(text_config(self._model)) is not Way.MASKED  # that one reads the name, and knows its own
        self.attached += 1
        self._name_ours_if_due()

    def restore_if_unused(self) -> None:
        if self.attached or self._running_in or self._set_aside_by:
            return
        self._name_own()
        self._of_config.pop(id(self._config), None)

    @contextmanager
    def running(self) -> Iterator[bool]:
        """A forward runs, served where it is told True."""
        thread = threading.get_ident()
        with self.lock:
            # Where nobody is left, the model was detached since its forward was called, and may be attached anew.
            serves = bool(self.attached or self._running_in) and not self._set_aside_by
            if serves:
                self._running_in.append(thread)
        try:
            yield serves
        finally:
            if serves:
                with self.lock:
                    self._running_in.remove(thread)
                    self.restore_if_unused()
                    self._changed.notify_all()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """The config names the model's own attention: forwards that are served end before, none begins inside.

        Raises:
            PromptCacheError: this thread is inside a forward that is served, and would wait for itself.
        """
        with self.lock:
            if threading.get_ident() in self._running_in:
                raise PromptCacheError(
                    f"continuous batching was begun inside a forward of {type(self._model).__name__} that the prompt "
                    "cache serves, and whose end it has to wait for: begin it outside of forwards"
                )
            self._set_aside_by.append(threading.get_ident())
        try:
            with self.lock:
                self._changed.wait_for(lambda: not self._running_in)
                self._is_due |= is_ours(text_config(self._model)._attn_implementation)
                self._name_own()
            yield
        finally:
            with self.lock:
                self._set_aside_by.remove(threading.get_ident())
                self._name_ours_if_due()
                self.restore_if_unused()

    def _name_own(self) -> None:
        if is_ours(text_config(self._model)._attn_implementation):
            set_attention(self._model, self._own)

    def _name_ours_if_due(self) -> None:
        if self._is_due and self.attached and not self._set_aside_by:
            set_attention(self._model, f"{ATTENTION_PREFIX}{self._own}")
            self._is_due = False

    def is_set_aside_here(self) -> bool:
        with self.lock:
            return threading.get_ident() in self._set_aside_by


class _Method:
    """An instance attribute over a method of the model; a copy of the model gets the plain method."""

    def __init__(
        self, attachment: Attachment, name: str, original: Callable[..., Any], replacement: Callable[..., Any]
    ) -> None:
        self.attachment = attachment
        self._name = name
        self._original = original
        self._replacement = replacement
        # generate() reads the signature of forward. Not its attributes: they may be those of one of ours.
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attachment.installed:
            return self._original(*args, **kwargs)
        return self._replacement(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # A copy, and what is unpickled elsewhere, has no cache attached. A function of this module, so that unpickling
        # imports it: the config still names our attention function, which falls through to the model's own.
        before = self.attachment._replaced[self._name]
        return (itself, (before,)) if before is not None else (_plain_method, (self.attachment.model, self._name))


def _plain_method(model: PreTrainedModel, name: str) -> types.MethodType:
    return types.MethodType(getattr(type(model), name), model)


def attach(cache: PromptCache, model: PreTrainedModel) -> Attachment:
    """Attaches `cache` to `model`; see `PromptCache.attach`."""
    layout = layout_of(model, cache.layout.block_size)
    model = inner_model(model)
    _check_free(model)
    if layout != cache.layout:
        raise ValueError(f"the cache's layout {cache.layout} does not fit {type(model).__name__}, which has {layout}")
    if model.device != cache.device:
        raise ValueError(
            f"{type(model).__name__} is on {model.device}, the cache on {cache.device}: make the cache where the model "
            "is (PromptCache.for_model does)"
        )
    attention_of(model, layout)  # refuses what it cannot take
    if cache.deterministic and rotary_lengths(model).switches:
        raise UnsupportedModel(
            f"{type(model).__name__} cannot use a deterministic cache: its LongRoPE positions depend on the longest "
            "sequence of a forward, and prompts are run in pieces"
        )
    media.prepare(model)
    with _AttentionUse.lock:
        _check_free(model)  # of two threads that attach, the second is told
        return Attachment(cache, model)


def _check_free(model: PreTrainedModel) -> None:
    if _attached(model) is not None:
        raise ValueError(f"{type(model).__name__} has a cache attached already; detach it first")


def generates_by_the_book(model: PreTrainedModel) -> bool:
    """True where transformers' own code makes the arguments of every forward of generate(), and nothing alters them.

    Told by where the code is, not by its name: a wrapper may bear the name of what it wraps.
    """
    kind = type(model)
    return (
        isinstance(model.__dict__.get("forward"), _Method)  # nobody wrapped ours
        and kind.__module__.startswith("transformers.models.")
        and kind.__call__ is torch.nn.Module.__call__
        and not model._forward_pre_hooks
        and not torch.nn.modules.module._global_forward_pre_hooks
        and all(
            name not in model.__dict__ and _file_of(getattr(kind, name)).startswith(_TRANSFORMERS) for name in _LOOP
        )
    )


def _file_of(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else code.co_filename


#: What generate() may do with a cache of ours.
_SERVED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
#: Those whose loop is `_LOOP`.
_TRUSTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
#: What makes the arguments of the forwards of greedy search and sampling.
_LOOP = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_TRANSFORMERS = f"{Path(transformers.__file__).parent}{os.sep}"


def attachment_of(model: PreTrainedModel) -> Attachment:
    """The attachment of a model.

    Raises:
        ValueError: it has none.
    """
    attachment = _attached(inner_model(model))
    if attachment is None:
        raise ValueError(f"{type(model).__name__} has no cache attached")
    return attachment


def _attached(model: PreTrainedModel) -> Attachment | None:
    with _AttentionUse.lock:
        return next((attachment for attachment in _attachments if attachment.model is model), None)


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()
