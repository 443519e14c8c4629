"""The transformers `Cache` whose K/V lie in the pool."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import DynamicCache

from npu_prompt_cache.attention import PagedAttention, PagedBatch, paged_attention
from npu_prompt_cache.attention.sequence import Sequence
from npu_prompt_cache.errors import LeaseReleased, PromptCacheError
from npu_prompt_cache.integrations.transformers.identity import ModelState, state_of
from npu_prompt_cache.integrations.transformers.models import Way, text_config, way_of
from npu_prompt_cache.integrations.transformers.request import Piece

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from npu_prompt_cache.cache import Lease, PromptCache
    from npu_prompt_cache.integrations.transformers.attention import PagedForward
    from npu_prompt_cache.integrations.transformers.request import Request
    from npu_prompt_cache.integrations.transformers.rotary import RotaryLengths
    from npu_prompt_cache.layout import KVLayout


_T = TypeVar("_T")
_NONE: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


class CacheBypassWarning(RuntimeWarning):
    """A request ran uncached: the pool could not hold it, the runtime failed, or it asked for another cache."""


class PagedCache(DynamicCache):
    """The `Cache` that an attached model is given: its K/V lie in the pool, held by one lease a row.

    To code that passes it on, crops it or takes its rows apart it looks like a ``DynamicCache``. Code that reaches into
    it (``layers``, iteration, …) gets one: the K/V are copied out and the request goes on uncached, with right results.
    """

    layer_class_to_replicate = None
    offloading = False

    def __init__(
        self,
        prompt_cache: PromptCache,
        model: PreTrainedModel,
        rotary: RotaryLengths,
        in_generate: bool,
        pad_token_id: int | None = None,
    ) -> None:
        self.prompt_cache = prompt_cache
        self._model = model
        self._state: ModelState | None = None  # of the model at the first forward
        self.rotary = rotary
        self._regime = b""  # of the first forward's keys
        self._of_regime = 0  # columns whose keys are of it
        self._given_back = False
        #: Made by a generate() that is still running: it publishes at its end.
        self.in_generate = in_generate
        #: While transformers' own loop makes the arguments of every later forward, they need not be looked at: on a
        #: device that would make the host wait in every step.
        self.is_continued_by_generate = False
        self._pad_token_id = pad_token_id
        self._leases: list[Lease] = []
        self._starts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        #: [batch], of a model with three positions for each token: what to add to the numbers of later tokens.
        self.offsets: npt.NDArray[np.int64] | None = None
        self._prompts: list[npt.NDArray[np.int64]] = []  # token ids of each row, as far as the first forward saw
        self._later: list[torch.Tensor] = []  # ids [batch, n] of each later forward, on the model's device
        self._attention: PagedAttention | None = None  # from the first forward on
        #: Rows that have gone since the last forward, their prompt and later ids: the best beam may be among them.
        self._childless: list[tuple[Lease, npt.NDArray[np.int64], torch.Tensor | None]] = []
        #: Of the first forward: which of its tokens' K/V go to which other slots too, of rows that begin alike.
        self._copies = _NONE
        self._columns = 0  # padding and tokens so far, the same for all rows
        self._forward: PagedForward | None = None
        self._dense: DynamicCache | None = None
        self._records_past = False  # once dense, layers with windows keep what they would drop until they are cropped
        #: Held over a forward, and over whatever moves K/V or gives them back.
        self.lock = threading.RLock()
        prompt_cache._paged_caches[id(self)] = self

    # -- as a transformers Cache

    @property
    def layers(self) -> list[Any]:  # type: ignore[override]
        """The layers of the dense cache that this one becomes when it is asked for them."""
        return self.to_dense().layers

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens' K/V into the pool (inside a cached forward) or into the dense cache.

        Returns what the model's attention is to go on with: the dense cache's K/V; or, in a cached forward, those that
        it was given, or the rows of all tokens, as the model needs them.
        """
        if self._forward is None:
            return self.to_dense().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._forward.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far: what the longest row holds."""
        return self._columns if self._dense is None else int(self._dense.get_seq_length(layer_idx))

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns before the queries."""
        return self._columns if self._dense is None else int(self._dense.get_query_offset(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys of a layer, and the first one's place: in the pool each layer has all of them.

        Masks that are made outside of a forward over the pool are for one that takes the K/V out of it.
        """
        if self._forward is not None:
            return self._columns + query_length, 0
        return self.to_dense().get_mask_sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: it grows as long as the pool has room, and goes on outside the pool then."""
        return -1

    def __len__(self) -> int:
        return self.prompt_cache.layout.num_layers

    @property
    def is_compileable(self) -> bool:
        """False: its shapes grow."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """No layer has a recurrent state."""
        return [False] * len(self)

    is_dummy = is_linear

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers drop what is behind their window: none in the pool; as `get_mask_sizes`."""
        return [False] * len(self) if self._forward is not None else self.to_dense().is_sliding

    @property
    def is_croppable(self) -> bool:
        """True in the pool: `crop` leaves no trace."""
        return self._dense is None or self._dense.is_croppable

    def activate_past_recording(self) -> None:
        """In the pool every past state is there anyway; the dense cache that this one may become is told."""
        self._records_past = True
        if self._dense is not None:
            self._dense.activate_past_recording()  # type: ignore[no-untyped-call]

    def is_recording_past(self, layer_idx: int) -> bool:
        """False in the pool: there is nothing to be recorded."""
        return self._dense is not None and self._dense.is_recording_past(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last ``-tokens_to_remove`` columns, in the pool where every row keeps some of its own."""
        with self.lock:
            columns = self._columns + tokens_to_remove
            if not self._can_change or tokens_to_remove > 0 or columns <= self._starts.max():
                super().crop(tokens_to_remove)
            elif tokens_to_remove:
                self._crop_to(columns)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``: blocks are shared, but for the one that rows part in."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after another; as `reorder_cache`."""
        with self.lock:
            if self._can_change:
                self._take_rows(torch.arange(self.rows).repeat_interleave(repeats))
            else:
                super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The rows `indices`, numbers or a mask, in their order; as `reorder_cache`."""
        with self.lock:
            if not self._can_change:
                super().batch_select_indices(indices)
                return
            parents = torch.arange(self.rows)[indices.cpu()]
            if not torch.equal(parents, torch.arange(self.rows)):
                self._take_rows(parents)

    def __repr__(self) -> str:
        where = "dense" if self._dense is not None else "in the pool"
        return f"PagedCache(rows={len(self._leases)}, length={self.get_seq_length()}, {where})"

    # -- as the integration's

    def is_of(self, prompt_cache: PromptCache, model: PreTrainedModel) -> bool:
        """True where this is the cache of that model in that pool: K/V of another model would be published as its."""
        return self.prompt_cache is prompt_cache and self._model is model

    @property
    def dense(self) -> DynamicCache | None:
        """What this cache became when it left the pool; None before."""
        return self._dense

    @property
    def is_empty(self) -> bool:
        """True before the first forward."""
        return self._columns == 0

    @property
    def rows(self) -> int:
        """Sequences of the batch; 0 before the first forward."""
        return len(self._leases)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """Columns of left padding of each row."""
        return self._starts

    def begin(self, request: Request) -> list[int]:
        """Makes room for a forward of the request's columns.

        Returns, for each row, new tokens that it need not compute: they are cached, or another row computes them.

        Raises:
            PromptCacheError: the pool cannot hold it; the cache is as it was.
        """
        columns = request.input_ids.shape[1]
        if self._given_back:
            raise LeaseReleased("the request that this cache belongs to failed, and its K/V were given back")
        if not self.is_empty:
            self._let_go()
            self._extend(columns)
            return [0] * len(self._leases)
        cache = self.prompt_cache
        # The caller may write to its own ids.
        ids = request.input_ids.numpy(force=True).copy() if request.media is None else request.media.keys
        self._state = state_of(self._model)
        prompts = [row[start:] for row, start in zip(ids, request.starts, strict=True)]
        self._regime = self.rotary.regime(self.longest_after(columns, request.starts))
        root, first_kept = cache._root(None, self._state.namespace + self._regime), int(request.kept.min())
        # Before the leases: it holds the stream that they are fenced on.
        self._attention = attention_of(self._model, cache.layout)
        limits = [max(first_kept - int(start), 0) for start in request.starts]
        batch = cache._acquire_batch(root, prompts, limits)
        self._leases, self._copies = batch.leases, (batch.copy_sources, batch.copy_slots)
        self._prompts, self._starts = prompts, request.starts
        self.offsets = None if request.media is None else request.media.offsets
        skips: list[int] = batch.starts.tolist()
        return skips

    def longest_after(self, columns: int, starts: npt.NDArray[np.int64]) -> int:
        """Tokens of the longest row after so many more columns."""
        return self._columns + columns - int(starts.min())

    def _extend(self, columns: int) -> None:
        for lease, start in zip(self._leases, self._starts, strict=True):
            # A row that was extended before another one failed keeps its slots.
            lease.extend(max(0, self._columns - int(start) + columns - lease.length))

    def forwards(self, request: Request, skips: list[int]) -> list[list[Piece]]:
        """What to run, one forward after another, without `skips` tokens at the beginning of each row.

        All rows are packed into one forward. In deterministic mode each forward takes what one row has in one block:
        kernels round by the shape of their operands, and no other shape is the same whatever is cached.
        """
        columns = request.input_ids.shape[1]
        rows = enumerate(zip(request.starts, skips, strict=True))
        pieces = [Piece(row, int(start) + skip, columns) for row, (start, skip) in rows]
        if not self.prompt_cache.deterministic:
            return [pieces]
        return [[part] for piece in pieces for part in self._by_block(piece)]

    def _by_block(self, piece: Piece) -> Iterator[Piece]:
        size, start = self.prompt_cache.layout.block_size, piece.start
        while start < piece.stop:
            stop = start + size - (self._tokens_before(piece.row) + start) % size
            yield Piece(piece.row, start, min(stop, piece.stop))
            start = stop

    def _tokens_before(self, row: int) -> int:
        """What to add to a column of the next forward for the number of its token; negative where padding is left."""
        return self._columns - int(self._starts[row])

    def batch(self, pieces: list[Piece]) -> PagedBatch:
        """The packed batch of pieces of the next forward's columns."""
        sequences, slots, at = [], [], 0
        for row, start, stop in pieces:
            lease, before = self._leases[row], self._tokens_before(row)
            slots.append(lease.slots(before + start, before + stop))
            sequences.append(Sequence(at, at + stop - start, before + stop, lease.block_table))
            at += stop - start
        sources, more = self._copies  # none in deterministic mode, where rows share nothing
        if not len(sources):
            return self._on_device().batch(sequences, np.concatenate(slots))
        return self._on_device().batch(
            sequences, np.concatenate([*slots, more]), np.concatenate([np.arange(at), sources])
        )

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array on the model's device; the host does not wait for it."""
        return self._on_device().upload(array)

    def in_order(self) -> AbstractContextManager[None]:
        """What is enqueued inside comes after the request's work before, and before its blocks are anybody else's."""
        return nullcontext() if self._attention is None else self._attention.in_order()

    def _on_device(self) -> PagedAttention:
        assert self._attention is not None, "begin() comes first"
        return self._attention

    @contextmanager
    def running(self, forward: PagedForward) -> Iterator[None]:
        """The model's forward runs: `update` writes into the pool."""
        self._forward = forward
        try:
            yield
        finally:
            self._forward = None

    def advance(self, input_ids: torch.Tensor) -> None:
        """The forward went well: its tokens' K/V are in the pool."""
        if not self.is_empty:
            self._later.append(input_ids.clone())
        is_of_regime = self._of_regime == self._columns
        self._columns += input_ids.shape[1]
        self._copies = _NONE
        if is_of_regime and self.rotary.regime(self.longest_after(0, self._starts)) == self._regime:
            self._of_regime = self._columns
        if not self.in_generate:
            self.publish()

    @property
    def _can_change(self) -> bool:
        """Whether rows and columns may be taken away: not while a forward runs over them."""
        return self._dense is None and self._forward is None and not self.is_empty and not self._given_back

    def _crop_to(self, columns: int) -> None:
        removed = self._columns - columns
        later = torch.cat(self._later, dim=1) if self._later else None
        known = 0 if later is None else later.shape[1]
        self._later = [] if later is None or removed >= known else [later[:, : known - removed]]
        if removed > known:
            self._prompts = [prompt[: len(prompt) + known - removed] for prompt in self._prompts]
        self._columns = columns
        self._of_regime = min(self._of_regime, columns)
        self.is_continued_by_generate = False  # its loop knows nothing of this
        try:
            with self.in_order():
                for lease, start in zip(self._leases, self._starts, strict=True):
                    lease.truncate(columns - int(start))
        except PromptCacheError as error:  # some of them are as long as before, which does no harm to a copy
            self._go_on_outside(error)

    def _take_rows(self, parents: torch.Tensor) -> None:
        """The first of a row's children goes on with its lease, the others with forks of it; ids go with the rows."""
        leases: list[Lease] = []
        children: set[int] = set()
        try:
            with self.in_order():
                for parent in parents.tolist():
                    lease = self._leases[parent]
                    length = self._columns - int(self._starts[parent])
                    leases.append(lease.fork(length) if parent in children else lease)
                    children.add(parent)
        except PromptCacheError as error:
            for fork in leases:
                if fork not in self._leases:
                    fork.release()
            self._go_on_outside(error).batch_select_indices(parents)
            return
        self._let_go()
        later, of_regime = torch.cat(self._later, dim=1) if self._later else None, self._later_of_regime()
        childless = [parent for parent in range(self.rows) if parent not in children]
        self._childless = [
            (self._leases[parent], self._prompts[parent], None if of_regime is None else of_regime[parent])
            for parent in childless
        ]
        self._leases = leases
        self._starts = self._starts[parents.numpy()]
        self.offsets = None if self.offsets is None else self.offsets[parents.numpy()]
        self._prompts = [self._prompts[parent] for parent in parents.tolist()]
        self._later = [] if later is None else [later.index_select(0, parents.to(later.device))]
        self.is_continued_by_generate = False  # its loop knows nothing of this

    def _let_go(self) -> None:
        childless, self._childless = self._childless, []
        for lease, _, _ in childless:
            lease.release()

    def _go_on_outside(self, error: PromptCacheError) -> DynamicCache:
        warnings.warn(f"running uncached: {error}", CacheBypassWarning, stacklevel=2)
        return self.to_dense()

    def publish(self) -> None:
        """Commits every row as far as it was computed: not where the model is another now than at the beginning."""
        with self.lock:
            if self._dense is not None or self.is_empty or self._given_back:
                return
            try:
                if state_of(self._model) == self._state:
                    for lease, ids in zip(self._leases, self._computed_ids(), strict=True):
                        lease.commit(ids)
                    for lease, prompt, later in self._childless:
                        lease.commit(self._with_later(prompt, later))
                self._let_go()
            except PromptCacheError as error:
                warnings.warn(f"not cached: {error}", CacheBypassWarning, stacklevel=2)

    def _computed_ids(self) -> list[npt.NDArray[np.int64]]:
        """Token ids of each row, as far as what was computed may be published."""
        later = self._later_of_regime()
        if later is None:
            return self._prompts
        return [self._with_later(prompt, row) for prompt, row in zip(self._prompts, later.cpu(), strict=True)]

    def _later_of_regime(self) -> torch.Tensor | None:
        """Ids of later forwards, as far as their keys are of the first one's regime."""
        if not self._later:
            return None
        later = torch.cat(self._later, dim=1)
        return later[:, : later.shape[1] - (self._columns - self._of_regime)]

    def _with_later(self, prompt: npt.NDArray[np.int64], later: torch.Tensor | None) -> npt.NDArray[np.int64]:
        # Deterministic: what a later forward computed is rounded as that forward's shape has it.
        if later is None or self.prompt_cache.deterministic:
            return prompt
        return np.concatenate([prompt, _without_padding(later.numpy(force=True), self._pad_token_id)])

    def release(self) -> None:
        """Gives the leases back; what was not published is lost, and this cache cannot be used on."""
        with self.lock:
            leases = [*self._leases, *(lease for lease, _, _ in self._childless)]
            self._leases, self._childless = [], []
            self._given_back = self._dense is None and not self.is_empty
            with ExitStack() as releases:  # all of them, whatever one raises
                for lease in leases:
                    if not lease.released:
                        releases.callback(lease.release)

    def leave_pool(self) -> None:
        """Becomes dense because the pool is about to go; not in the middle of a forward, which needs it."""
        with self.lock:
            if self._forward is None and not self._given_back:
                self.to_dense()

    def to_dense(self) -> DynamicCache:
        """Copies the K/V out of the pool, left-padded, into the `DynamicCache` that this cache is from now on.

        In the middle of a forward, which goes on in the pool, only the copy is made.
        """
        with self.lock:
            if self._forward is not None:
                return self._dense_copy()
            if self._dense is None:
                self._dense = self._dense_copy()
                self.release()
            return self._dense

    def _dense_copy(self) -> DynamicCache:
        if self._given_back:
            raise LeaseReleased("the request that this cache belongs to failed, and its K/V were given back")
        cache, dense = self.prompt_cache, DynamicCache(config=self._model.config)
        if self._records_past:
            dense.activate_past_recording()  # type: ignore[no-untyped-call]
        if self.is_empty:
            return dense
        lengths = [self._columns - int(start) for start in self._starts]
        with self.in_order():
            slots = [self.upload(lease.slots(0, n)) for lease, n in zip(self._leases, lengths, strict=True)]
            for layer in range(len(self)):
                dense.update(self._rows(cache.key(layer), slots), self._rows(cache.value(layer), slots), layer)
        return dense

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_dense())

    def __reduce__(self) -> tuple[Callable[..., DynamicCache], tuple[DynamicCache]]:
        # A copy, deep or pickled, is a dense cache of its own; this one stays in the pool.
        with self.lock:
            return itself, (self._dense if self._dense is not None else self._dense_copy(),)

    def _rows(self, plane: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        flat = plane.view(-1, *plane.shape[2:])
        rows = plane.new_zeros(len(slots), self._columns, *plane.shape[2:])
        for row, of_row in enumerate(slots):
            rows[row, self._columns - len(of_row) :] = flat[of_row]
        return rows.transpose(1, 2).contiguous()


def attention_of(model: PreTrainedModel, layout: KVLayout) -> PagedAttention:
    """Attention of one request of a model.

    Raises:
        UnsupportedModel: no operator of the device takes its shapes.
    """
    config = text_config(model)
    return paged_attention(layout, config.num_attention_heads, model.device, way_of(config) is not Way.PAGED)


def itself(value: _T) -> _T:
    """What it is given: a copy by ``__reduce__`` of something that is made already."""
    return value


def _without_padding(ids: npt.NDArray[np.int64], pad_token_id: int | None) -> npt.NDArray[np.int64]:
    """Generated ids without the padding that follows a row's end; one is left: it may be the end-of-sequence token."""
    if pad_token_id is None or len(ids) == 0 or ids[-1] != pad_token_id:
        return ids
    others = np.flatnonzero(ids != pad_token_id)
    return ids[: (others[-1] + 2 if len(others) else 1)]
