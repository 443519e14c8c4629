"""The prompt cache: what a program acquires, computes into and commits."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from npu_prompt_cache import _core, sim
from npu_prompt_cache.config import CacheConfig
from npu_prompt_cache.errors import CacheClosed
from npu_prompt_cache.layout import MAX_PLANE_ELEMENTS, KVLayout

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel

    from npu_prompt_cache.attention.npu import QueuedStream
    from npu_prompt_cache.integrations.transformers import Attachment, PagedCache
    from npu_prompt_cache.integrations.transformers.warm import Warmed

#: Token ids, 0 ... 2**31 - 1, one sequence. A list, a tuple, an integer array or a 1-D torch tensor.
TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer] | torch.Tensor"

_T = TypeVar("_T")
#: What is set for which cache (its `_key`), the innermost last.
_Set: TypeAlias = tuple[tuple[object, _T], ...]

DEFAULT_PRIORITY = 1

_DL_CPU, _DL_EXT_DEV = 1, 12
_H2D, _D2D = 1, 3

atexit.register(_core.process_is_exiting)


@dataclass(frozen=True)
class Stats:
    """Counters since the cache was made, and what is where now. Bytes are of whole blocks in all planes.

    ``free_bytes + leased_bytes + cached_bytes + fenced_bytes == pool_bytes`` always.

    Attributes:
        lookups: calls of ``acquire`` and ``lookup``.
        hits: of these, with at least one cached token.
        lookup_tokens: tokens they asked for.
        hit_tokens: of these, found.
        computed_tokens: tokens that ``acquire`` was asked for and did not find, nor in an earlier row of the same
            batch: what had to be prefilled.
        committed_blocks: entries published.
        evicted_blocks: entries evicted for room, or by `PromptCache.clear`.
        superseded_blocks: entries dropped because a longer one covers them: a conversation that went on.
        entries: entries now.
        pinned_entries: of these, held by a lease or a pin.
        pinned_bytes: held by pins; what several pins hold counts once.
        leases: leases now, those of pins included.
        free_bytes: ready to be leased.
        leased_bytes: private to a lease and its forks, not published.
        cached_bytes: published.
        fenced_bytes: given back, waiting for the device to finish with them.
        pool_bytes: all of these together.
        copies: copies the cache made, by kind (``"H2H"``, ``"H2D"``, ``"D2H"``, ``"D2D"``).
        copy_bytes: their bytes.
        runtime: file of the Ascend runtime in use.
        runtime_found: how it was found.
    """

    lookups: int
    hits: int
    lookup_tokens: int
    hit_tokens: int
    computed_tokens: int
    committed_blocks: int
    evicted_blocks: int
    superseded_blocks: int
    entries: int
    pinned_entries: int
    pinned_bytes: int
    leases: int
    free_bytes: int
    leased_bytes: int
    cached_bytes: int
    fenced_bytes: int
    pool_bytes: int
    copies: dict[str, int]
    copy_bytes: dict[str, int]
    runtime: str
    runtime_found: str

    @property
    def hit_rate(self) -> float:
        """Share of the tokens asked for that was found, 0 ... 1."""
        return self.hit_tokens / self.lookup_tokens if self.lookup_tokens else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{field.name:>16}  {getattr(self, field.name)}" for field in fields(self))


class Match(NamedTuple):
    """What `PromptCache.lookup` found. Nothing is pinned: it holds until the next call of the cache."""

    #: Tokens ``[0, cached_tokens)`` of the prompt are cached.
    cached_tokens: int
    #: int32 ``[ceil(cached_tokens / block_size)]``: ids of their blocks.
    block_table: npt.NDArray[np.int32]
    #: Bytes of one block in each plane.
    plane_block_bytes: tuple[int, ...]
    #: Device address of each plane, K and V of layer 0, then of layer 1, ...
    plane_addresses: tuple[int, ...]

    def offsets(self, plane: int) -> npt.NDArray[np.int64]:
        """int64 ``[blocks]``: byte offset of each block from the start of `plane` (``plane_addresses[plane]``)."""
        if not 0 <= plane < len(self.plane_addresses):
            raise ValueError(f"plane={plane} is not in [0, {len(self.plane_addresses)})")
        return self.block_table.astype(np.int64) * self.plane_block_bytes[plane]


class Lease:
    """What a request holds: tokens ``[0, cached_tokens)`` to read, ``[cached_tokens, length)`` to compute and write.

    A context manager: leaving the block releases the lease; only `commit` publishes, so an error publishes nothing.
    Every method raises `LeaseReleased` after the release and `CacheClosed` after the cache's close.
    """

    __slots__ = ("_core", "_stream", "cached_tokens")

    def __init__(self, core: _core.Lease, stream: QueuedStream | None) -> None:
        self._core = core
        self._stream = stream  # what torch was asked for there is handed on before a copy or a fence; None on the CPU
        #: Tokens of the prompt that were found, and are not truncated: compute the others.
        self.cached_tokens: int = core.cached_tokens

    @property
    def length(self) -> int:
        """Tokens that the lease has slots for: those acquired and those extended by."""
        return self._core.length

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """int32 ``[ceil(length / block_size)]``: block i holds tokens ``[i * block_size, (i + 1) * block_size)``."""
        return self._core.block_table()

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 ``[stop - start]``: slot ``block * block_size + offset`` of each token in ``[start, stop)``."""
        return self._core.slots(start, stop)

    def extend(self, count: int) -> None:
        """Slots for `count` more tokens.

        Raises:
            PoolExhausted: the pool has no block left; the lease is as it was.
        """
        if count < 0:
            raise ValueError(f"extend({count}): at least 0 tokens")
        self._core.extend(count)

    def fork(self, length: int) -> Lease:
        """A new lease with tokens ``[0, length)`` of this one, committed or not, at most `length` of this one.

        Whole blocks are shared; the rows of a block that `length` ends in are copied on the device. Both leases are
        extended, committed, truncated and released as if there were no other, on the stream of this one.

        Raises:
            ValueError: this lease has no such tokens.
            PoolExhausted: the pool has no block left for the copy; this lease is as it was.
        """
        self._hand_on()
        return Lease(self._core.fork(length), self._stream)

    def truncate(self, length: int) -> None:
        """Drops the slots of tokens from `length` on, cached and committed ones too; `extend` gives new ones.

        What was published stays published. Where `length` ends inside a block that others may read, its first rows are
        copied on the device to a block of this lease's own.

        Raises:
            ValueError: the lease is shorter already.
            PoolExhausted: the pool has no block left for the copy; the lease is as it was.
        """
        self._hand_on()
        self._core.truncate(length)
        self.cached_tokens = self._core.cached_tokens

    def commit(self, token_ids: TokenIds) -> int:
        """Publishes the K/V of `token_ids`: the whole sequence from its first token, as far as it was computed.

        May be called again with a longer sequence. Returns the number of tokens that were not cached before
        and are now.

        Raises:
            ValueError: other tokens than were acquired, fewer than were cached or committed, or more than `length`.
        """
        ids = _ids(token_ids)
        self._hand_on()
        return self._core.commit(ids)

    def _hand_on(self) -> None:
        if self._stream is not None:
            self._stream.hand_on()

    def release(self) -> None:
        """Ends the lease. What it did not commit is lost.

        Raises:
            LeaseReleased: it was released before.
        """
        try:
            if not self._core.released:  # raises in a forked child, where nothing can be handed on
                self._hand_on()
        finally:
            self._core.release()

    @property
    def released(self) -> bool:
        """True after `release`."""
        return self._core.released

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._core.released:
            return
        try:
            self.release()
        except Exception:
            if error is None:  # else the body's own error says more
                raise

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # The core releases a lease that nobody holds any more, but knows nothing of torch's queue. At the
        # interpreter's end this module's names are gone, and so is the use of it.
        if is_finalizing():
            return
        with contextlib.suppress(CacheClosed):
            if not self._core.released:
                self._hand_on()

    def __repr__(self) -> str:
        return f"Lease(cached_tokens={self.cached_tokens}{', released' if self._core.released else ''})"


class Pin:
    """Keeps what is cached of a prompt from being evicted, until `release`. A context manager, which releases."""

    __slots__ = ("_core", "cached_tokens")

    def __init__(self, core: _core.Lease) -> None:
        self._core = core
        #: Tokens ``[0, cached_tokens)`` of the prompt are pinned.
        self.cached_tokens: int = core.cached_tokens

    def release(self) -> None:
        """Lets them be evicted again.

        Raises:
            LeaseReleased: they were released before.
        """
        self._core.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self._core.released:
            self._core.release()

    def __repr__(self) -> str:
        return f"Pin(cached_tokens={self.cached_tokens}{', released' if self._core.released else ''})"


class Batch(NamedTuple):
    """The leases of one batch. Rows share what an earlier row computes, in the forward that they are for.

    In each layer of that forward every row's writes come before any row's reads. Until it is done, the leases stand and
    fall together: none of them may be truncated, forked or committed, and if it fails, all are released.

    New tokens are numbered as they lie packed: tokens ``[starts[r], length of prompt r)``, row after row.
    """

    #: One a prompt. ``cached_tokens`` of each counts what was cached, not what another row computes.
    leases: list[Lease]
    #: int64 ``[rows]``: tokens of each row that it does not compute.
    starts: npt.NDArray[np.int64]
    #: int64 ``[n]``: the K/V of new token ``copy_sources[i]`` ...
    copy_sources: npt.NDArray[np.int64]
    #: int64 ``[n]``: ... are to be written to slot ``copy_slots[i]`` too, besides its own.
    copy_slots: npt.NDArray[np.int64]


class PromptCache:
    """A prompt cache over one pool of device memory.

    Args:
        layout: geometry of the K/V.
        device: ``"cpu"``: host memory, managed through the simulated Ascend runtime that ships with the package.
            ``"npu"``, ``"npu:N"``: an NPU, through the runtime found on this machine.
        max_gb: size of the pool in GiB; 2 by default.
        pool_bytes: the same in bytes.
        watermark_bytes: pool bytes kept free after every commit; by default 256 MiB, or a quarter of a smaller pool.
        namespace: everything besides the tokens that the K/V depend on. `for_model` and `attach` make one; a
            program of its own passes what tells its models apart.
        policy: which entries are evicted. ``"lru"``: the least recently used ones. ``"lfu"``: those that fewer requests
            used, aged: an entry that was used twice as often survives two turnovers of the cache's cold part more, and
            what is used no more goes, however often it was. Ends of prompts go before their beginnings.
        max_pinned_bytes: pool bytes that pins may hold together, by default half of the pool.
        admission: ``"all"``: what is committed is published. ``"second_sighting"``: a block is published when an
            earlier request committed it too, with all that comes before it, so that prompts that never repeat
            evict nothing; what repeats is found from the third time on. What the cache remembers of the first time is
            a hash, for the latest four pools' worth of blocks. A part of a block counts as the same
            only where it ends at the same token.
        deterministic: only whole blocks are published and found, and an attached model computes each block of each
            row in a forward of its own: the logits of a hit are those of the cold run bit for bit, and each row of a
            batch is what it is alone, with the same number of torch's threads. A cold prefill takes some 6 % longer,
            up to a block more of a hit is computed, rows are decoded one after another, and what was generated is
            not cached. A program of its own computes by the same rule, and commits nothing that it computed in
            forwards of another shape (such as by decoding).
        acl_lib: path of the Ascend runtime library, instead of the search.

    Raises:
        ValueError, TypeError: naming the value and its limit.
        RuntimeNotFound: no Ascend runtime for an NPU.
        AclError: the runtime refused, such as for lack of device memory.

    Example:
        >>> layout = KVLayout(num_layers=2, num_kv_heads=8, head_dim=64, dtype=torch.float16)
        >>> cache = PromptCache(layout, device="cpu", pool_bytes=64 << 20)
        >>> prompt = list(range(500))
        >>> with cache.acquire(prompt) as lease:
        ...     slots = lease.slots(lease.cached_tokens, len(prompt))  # compute these tokens; write K/V here
        ...     lease.commit(prompt)
        500
        >>> cache.lookup(prompt + [7, 8, 9]).cached_tokens
        500
    """

    def __init__(
        self,
        layout: KVLayout,
        device: str = "cpu",
        max_gb: float | None = None,
        *,
        pool_bytes: int | None = None,
        watermark_bytes: int | None = None,
        namespace: bytes = b"",
        policy: str = "lru",
        max_pinned_bytes: int | None = None,
        admission: str = "all",
        deterministic: bool = False,
        acl_lib: str | None = None,
    ) -> None:
        if not isinstance(namespace, bytes):
            raise TypeError(f"namespace={namespace!r} is a {type(namespace).__name__}: bytes are needed")
        self.layout = layout
        self.namespace = namespace
        self.deterministic = deterministic
        self.config = CacheConfig.resolve(
            device, max_gb, pool_bytes, watermark_bytes, policy, max_pinned_bytes, admission, acl_lib
        )
        if acl_lib is None and self.config.device_type == "cpu":
            acl_lib = sim.library_path()
        self._current_stream()  # torch has a device of its own in this thread before the runtime is given ours
        self._core = _core.PromptCache(
            acl_lib=acl_lib or "",
            device=self.config.device_index,
            pool_bytes=self.config.pool_bytes,
            watermark_bytes=self.config.watermark_bytes,
            plane_block_bytes=list(layout.plane_block_bytes),
            block_size=layout.block_size,
            whole_blocks=deterministic,
            max_pinned_bytes=self.config.max_pinned_bytes,
            lfu=self.config.policy == "lfu",
            second_sighting=self.config.admission == "second_sighting",
        )
        elements = self._core.block_count * max(layout.plane_block_bytes) // layout.dtype.itemsize
        if elements >= MAX_PLANE_ELEMENTS:
            self._core.close()
            raise ValueError(
                f"pool_bytes={self.config.pool_bytes} makes a plane of {elements} elements; operators on the NPU take "
                f"fewer than {MAX_PLANE_ELEMENTS}: make the pool smaller"
            )
        self._plane_addresses = tuple(self._core.plane_address(plane) for plane in range(layout.num_planes))
        self._planes: list[torch.Tensor | None] = [None] * layout.num_planes
        self._attachments: list[Attachment] = []
        #: By their ids. Other threads make more while `close` goes through them, which a WeakSet does not stand.
        self._paged_caches: weakref.WeakValueDictionary[int, PagedCache] = weakref.WeakValueDictionary()
        self._made_for: weakref.ref[PreTrainedModel] | None = None
        self._key = object()

    @functools.cached_property
    def device(self) -> torch.device:
        """Where the planes are."""
        index = self.config.device_index
        return torch.device("cpu") if self.config.device_type == "cpu" else torch.device("npu", index)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        device: str | None = None,
        max_gb: float | None = None,
        *,
        block_size: int = 128,
        pool_bytes: int | None = None,
        watermark_bytes: int | None = None,
        policy: str = "lru",
        max_pinned_bytes: int | None = None,
        admission: str = "all",
        deterministic: bool = False,
        acl_lib: str | None = None,
    ) -> PromptCache:
        """A cache with the layout, the dtype and the device of a transformers model. `attach` it next.

        `lookup` and `acquire` on it see the entries that the model's own requests leave.

        Raises:
            UnsupportedModel: the model's K/V cannot be cached correctly; the message names the reason.
        """
        from npu_prompt_cache.integrations import transformers

        layout = transformers.layout_of(model, block_size)
        cache = cls(
            layout,
            device or str(model.device),
            max_gb,
            pool_bytes=pool_bytes,
            watermark_bytes=watermark_bytes,
            policy=policy,
            max_pinned_bytes=max_pinned_bytes,
            admission=admission,
            deterministic=deterministic,
            acl_lib=acl_lib,
        )
        cache._made_for = weakref.ref(transformers.inner_model(model))
        return cache

    def salted(self, salt: str | bytes) -> AbstractContextManager[None]:
        """Inside, every request of this thread (or asyncio task) has this salt, ``model.generate`` included.

        A thread that is started inside begins without it: enter it in the thread.

        Example:
            >>> with cache.salted("tenant-7"):  # doctest: +SKIP
            ...     model.generate(**inputs)
        """
        return self._setting(_SALT, _salt_bytes(salt))

    def prioritized(self, priority: int) -> AbstractContextManager[None]:
        """Inside, every request of this thread (or asyncio task) has this priority, ``model.generate`` included.

        What a priority does is said at `acquire`.

        Raises:
            ValueError, TypeError: it is no integer from 0 to 3.
        """
        return self._setting(_PRIORITY, _checked_priority(priority))

    @contextlib.contextmanager
    def _setting(self, variable: ContextVar[_Set[_T]], value: _T) -> Iterator[None]:
        token = variable.set((*variable.get(), (self._key, value)))
        try:
            yield
        finally:
            variable.reset(token)

    def _set(self, variable: ContextVar[_Set[_T]]) -> _T | None:
        """What the innermost `_setting` around here set for this cache."""
        return next((value for owner, value in reversed(variable.get()) if owner is self._key), None)

    def _priority(self, priority: int | None) -> int:
        if priority is None:
            priority = self._set(_PRIORITY)
        return DEFAULT_PRIORITY if priority is None else _checked_priority(priority)

    def attach(self, model: PreTrainedModel) -> Attachment:
        """Makes ``model.generate(...)`` and ``model(...)`` use this cache, with the calling code unchanged.

        Returns a handle: ``handle.detach()``, or leaving it as a context manager, restores the model.

        Raises:
            UnsupportedModel: the model's K/V cannot be cached correctly; the message names the reason.
            ValueError: the model does not fit the cache, or has a cache attached.
        """
        from npu_prompt_cache.integrations import transformers

        return transformers.attach(self, model)

    def warm(
        self, prompts: Iterable[Any], tokenizer: Any = None, *, batch_tokens: int = 2048, pin: bool = False
    ) -> Warmed:
        """Runs prompts through the attached model once, so that later requests that begin like them hit.

        What is cached already is not run again, and what prompts have in common is run once. A progress bar shows
        what takes longer than two seconds. A prompt that the pool has no room for is not run; a warning says so.

        Args:
            prompts: strings, sequences of token ids, or `PromptTemplate`s, of which the static part is meant.
            tokenizer: of the model, for strings.
            batch_tokens: most tokens of a forward; a prompt of more goes alone.
            pin: keep the prompts from being evicted until the result is released or dropped.

        Raises:
            ValueError: no model is attached, or several are; a prompt is empty or no prompt.
            PinLimitExceeded: pins would hold more than ``max_pinned_bytes``; what was run stays, nothing is pinned.

        Example:
            >>> with cache.warm([template, system_prompt], tokenizer, pin=True):  # doctest: +SKIP
            ...     serve()
        """
        from npu_prompt_cache.integrations.transformers.warm import warm

        return warm(self, prompts, tokenizer, batch_tokens, pin)

    def lookup(self, token_ids: TokenIds, salt: str | bytes | None = None) -> Match | None:
        """The longest cached prefix of a prompt, or None. Pins nothing and promises nothing past the next call."""
        cached_tokens, table = self._core.lookup(self._root(salt, prompt=token_ids), _ids(token_ids))
        if not cached_tokens:
            return None
        return Match(cached_tokens, table, self.layout.plane_block_bytes, self._plane_addresses)

    def acquire(
        self,
        token_ids: TokenIds,
        salt: str | bytes | None = None,
        *,
        limit: int | None = None,
        stream: int | None = None,
        priority: int | None = None,
    ) -> Lease:
        """A lease for a request: its longest cached prefix, pinned, and slots for the rest.

        At least one token is always left to compute. Where the cached part ends inside a block, that block's rows
        are copied on the device into the lease's own (at most one block).

        Args:
            token_ids: the whole prompt.
            salt: requests with different salts never share entries (tenants).
            limit: take at most so many tokens from the cache.
            stream: handle of the device stream that the request computes on (``npu_stream`` of a torch stream); by
                default torch's current one. On the CPU the copy has been done when this returns.
            priority: 0 to 3; by default that of `prioritized`, or 1. Of what the request finds and publishes: entries
                of a higher priority are evicted when none of a lower one is left. An entry has the highest priority
                of the requests that used it, or one that begins with it, until it is evicted.

        Raises:
            PoolExhausted: the pool cannot hold the request; run it uncached.
        """
        root, ids = self._root(salt, prompt=token_ids), _ids(token_ids)
        handle, torchs = self._enqueue_on(stream)
        return Lease(self._core.acquire(root, ids, limit, handle, self._priority(priority)), torchs)

    def _acquire_batch(
        self, root: bytes, prompts: Sequence[TokenIds], limits: Sequence[int], stream: int | None = None
    ) -> Batch:
        """Leases for the prompts of one batch, all or none; `limits`: most tokens of each that need not be computed."""
        ids = [_ids(prompt) for prompt in prompts]
        handle, torchs = self._enqueue_on(stream)
        cores, starts, sources, slots = self._core.acquire_batch(root, ids, limits, handle, self._priority(None))
        return Batch([Lease(core, torchs) for core in cores], starts, sources, slots)

    def pin(self, token_ids: TokenIds, salt: str | bytes | None = None) -> Pin:
        """Keeps the longest cached prefix of a prompt from being evicted, until the pin is released or dropped.

        Raises:
            PinLimitExceeded: pins would hold more than ``max_pinned_bytes``, counting what several hold once.
        """
        return Pin(self._core.pin(self._root(salt, prompt=token_ids), _ids(token_ids)))

    def _enqueue_on(self, stream: int | None) -> tuple[int, QueuedStream | None]:
        """Handle of the stream to enqueue on, by default torch's, which is handed on either way; and torch's stream."""
        torchs = self._current_stream()
        current = 0 if torchs is None else torchs.hand_on()
        return stream or current, torchs

    def _current_stream(self) -> QueuedStream | None:
        """Torch's on the NPU; None, for the cache's own, where torch computes on the CPU or knows of no NPU."""
        if self.config.device_type == "cpu" or "torch_npu" not in sys.modules:
            return None
        from npu_prompt_cache.attention.npu import QueuedStream

        return QueuedStream(self.config.device_index)

    def insert(
        self,
        token_ids: TokenIds,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor]],
        salt: str | bytes | None = None,
        *,
        stream: int | None = None,
        priority: int | None = None,
    ) -> int:
        """Publishes a prompt whose K/V the program holds itself, by one copy on the device.

        Args:
            token_ids: n tokens.
            kv: for each layer K and V, each contiguous ``[n, heads, head_dim]`` as in the layer's planes, of the
                layout's dtype.
            salt: as for `acquire`.
            stream: handle of the stream that `kv` is computed on; by default torch's current one.
            priority: as for `acquire`.

        Returns:
            The number of tokens that were not cached before and are now.

        Raises:
            ValueError: a tensor of another shape, dtype or device; the message names it.
            PoolExhausted: the pool cannot hold the prompt.
        """
        ids = _core.tokens(_ids(token_ids))
        addresses = self._source_addresses(kv, len(ids))
        # On the CPU the tensors are host memory: the runtime is told so, and counts a copy host to device.
        kind = _H2D if self.config.device_type == "cpu" else _D2D
        handle, _ = self._enqueue_on(stream)
        return self._core.insert(self._root(salt, prompt=ids), ids, addresses, kind, handle, self._priority(priority))

    def key(self, layer: int) -> torch.Tensor:
        """K of a layer over the pool, no copy: ``[blocks, block_size, heads, head_dim]``.

        Write only the slots of your own lease. The tensor keeps the pool's memory alive.
        """
        return self._plane(layer, 0)

    def value(self, layer: int) -> torch.Tensor:
        """V of a layer over the pool; as `key`."""
        return self._plane(layer, 1)

    def stats(self) -> Stats:
        """Counters since the cache was made, and what is where now."""
        return Stats(**self._core.stats(), runtime=self._core.runtime_path, runtime_found=self._core.runtime_how)

    def check_integrity(self) -> bool:
        """Checks every invariant of the cache; True, or an `IntegrityError` that names the broken one."""
        self._core.check_integrity()
        return True

    def clear(self) -> None:
        """Evicts every entry that no lease holds."""
        self._core.clear()

    def close(self) -> None:
        """Detaches from every model and gives the pool back; later calls raise `CacheClosed`. May be called again.

        Tensors from `key` and `value` that are still held keep the memory until they go.
        """
        for attachment in list(self._attachments):
            attachment.detach()
        try:
            if not self._core.closed:
                for reference in self._paged_caches.valuerefs():
                    if (paged := reference()) is not None:
                        paged.leave_pool()
        finally:
            self._planes = [None] * len(self._planes)  # ours hold the memory too: the pool is to go now
            self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._core.closed else f"{self.config.pool_bytes / (1 << 30):.3g} GiB"
        return f"PromptCache({self.layout}, device={self.config.device!r}, {state})"

    def _root(self, salt: str | bytes | None, namespace: bytes | None = None, prompt: TokenIds = ()) -> bytes:
        """Name of the prefix tree; each part is preceded by its length, so that no two pairs give one name.

        Without a namespace it is that of the prompt.
        """
        if namespace is None:
            namespace = self._own_namespace(prompt)
        if salt is None:
            salt = self._set(_SALT)
        tail = b"" if salt is None else b"salt" + _salt_bytes(salt)
        return len(namespace).to_bytes(8, "little") + namespace + tail

    def _own_namespace(self, prompt: TokenIds) -> bytes:
        model = self._made_for() if self._made_for is not None else None
        if model is None:
            return self.namespace
        from npu_prompt_cache.integrations import transformers

        return transformers.namespace_of_prompt(model, lambda: len(_core.tokens(_ids(prompt))))

    def _plane(self, layer: int, value: int) -> torch.Tensor:
        if not 0 <= layer < self.layout.num_layers:
            raise ValueError(f"layer={layer} is not in [0, {self.layout.num_layers})")
        plane = 2 * layer + value
        if self._core.closed or self._planes[plane] is None:
            tensor = self._wrap(plane)  # raises CacheClosed
            self._planes[plane] = tensor
            return tensor
        return self._planes[plane]  # type: ignore[return-value]

    def _wrap(self, plane: int) -> torch.Tensor:
        layout = self.layout
        shape = [self._core.block_count, *layout.plane_shape(plane)]
        device_type = _DL_CPU if self.config.device_type == "cpu" else _DL_EXT_DEV
        capsule = self._core.plane_capsule(
            plane, shape, layout.dlpack_code, layout.dtype.itemsize * 8, device_type, self.config.device_index
        )
        # An ordinary tensor even when asked for under inference_mode: others will write to it outside.
        with torch.inference_mode(False):
            return torch.utils.dlpack.from_dlpack(capsule)

    def _source_addresses(self, kv: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> list[int]:
        layout = self.layout
        if len(kv) != layout.num_layers:
            raise ValueError(f"kv has {len(kv)} layers, the layout has {layout.num_layers}")
        addresses = []
        for layer, pair in enumerate(kv):
            for value, (name, tensor) in enumerate(zip("KV", pair, strict=True)):
                shape = (count, *layout.plane_shape(2 * layer + value)[1:])
                found = (tuple(tensor.shape), tensor.dtype, tensor.device)
                wanted = (shape, layout.dtype, self.device)
                if found != wanted:
                    raise ValueError(f"{name} of layer {layer} is {found}, needed is {wanted}")
                if not tensor.is_contiguous():
                    raise ValueError(f"{name} of layer {layer} is not contiguous")
                addresses.append(tensor.data_ptr())
        return addresses


_SALT: ContextVar[_Set[bytes]] = ContextVar("salt", default=())
_PRIORITY: ContextVar[_Set[int]] = ContextVar("priority", default=())


def _salt_bytes(salt: str | bytes) -> bytes:
    if not isinstance(salt, (str, bytes)):
        raise TypeError(f"salt={salt!r} is a {type(salt).__name__}: a string or bytes are needed")
    return salt.encode() if isinstance(salt, str) else salt


def _checked_priority(priority: int) -> int:
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise TypeError(f"priority={priority!r} is a {type(priority).__name__}: an integer is needed")
    if not 0 <= priority < _core.PRIORITIES:
        raise ValueError(f"priority={priority} is not in [0, {_core.PRIORITIES})")
    return priority


def _ids(token_ids: TokenIds) -> TokenIds:
    """The ids as the core takes them: it checks and copies lists, tuples and integer arrays itself."""
    return token_ids.numpy(force=True) if isinstance(token_ids, torch.Tensor) else token_ids
