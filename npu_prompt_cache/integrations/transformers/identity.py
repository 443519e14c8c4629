"""What a model's K/V depend on besides tokens: which model it is, and its modules, weights and adapters as they are."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from itertools import chain, repeat
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd

from npu_prompt_cache.integrations.transformers import adapters
from npu_prompt_cache.integrations.transformers.models import unsupported
from npu_prompt_cache.integrations.transformers.rotary import (
    RotaryLengths,
    is_recomputed,
    recomputed_buffers,
    rotary_lengths,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

#: Ways of switching adapters that are remembered; one that was forgotten is a new one.
_MAX_SWITCHED = 4096


class ModelState(NamedTuple):
    """A model as it was seen once."""

    #: The same bytes whenever K/V depend on the same things.
    namespace: bytes
    #: Changes seen so far, those that were undone included.
    changes: int
    rotary: RotaryLengths


class ModelIdentity:
    """Names one model object, and counts the states of its modules and weights, and the ways its adapters are switched.

    Modules and weights never return to an earlier state: torch's version counters only grow. Adapters that are
    switched back do, and find what was cached before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._id = os.urandom(16)
        self._snapshot: _Snapshot | None = None
        self._version = 0
        self._changes = 0
        self._switched: dict[tuple[Any, ...], bytes] = {}
        self._numbers = itertools.count()
        self._namespace = b""

    def state(self, model: PreTrainedModel) -> ModelState:
        """The model as it is now.

        Raises:
            UnsupportedModel: the model has parts whose state cannot be told.
        """
        with self._lock:
            if self._snapshot is None or not self._snapshot.holds():
                self._snapshot = _Snapshot(model)
                self._version += 1
                self._switched.clear()  # no way of switching leads back to another version
            self._snapshot.check_dropout(model)
            if self._snapshot.switches.look():
                self._changes += 1
                self._namespace = self._named(self._snapshot.switches.key())
            return ModelState(self._namespace, self._changes, self._snapshot.rotary)

    def _named(self, switched: tuple[Any, ...]) -> bytes:
        if len(self._switched) >= _MAX_SWITCHED:
            self._switched.clear()
        if switched not in self._switched:
            self._switched[switched] = next(self._numbers).to_bytes(8, "little")
        return b"model" + self._id + self._version.to_bytes(8, "little") + self._switched[switched]


class _Snapshot:
    """Every module with its hooks, and for every parameter and buffer where its data lie and how often it was written.

    Weak references keep an address from passing for an old one, and nothing here keeps alive what the model drops. Two
    things leave no trace: ``parameter.data.add_()``, and attributes of modules that are no tensors, unless it is
    a ``forward`` or a switch of an adapter. Clear the cache after such a change.

    Looking is in the path of every request: its loops are those of map and filter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        modules = _modules_of(model)
        self._attributes = [module.__dict__ for module in modules]
        self._recomputed = [at for at, parts in enumerate(self._attributes) if is_recomputed(parts)]
        children, tensors, self._hooks = self._read()
        self._children = list(map(id, children))
        _refuse(model, modules, tensors)
        self.switches = adapters.Switches(modules)
        self.rotary = rotary_lengths(model)
        self._facts = _facts(tensors)
        self._forwards = self._own_forwards()
        self._dropouts = [module for module in modules if isinstance(module, _DropoutNd)]
        # A weak reference to a storage keeps its address, not its data.
        self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]
        self._addresses = [storage.cdata for storage in self._storages]
        held = [self._attributes, *self.switches.held]
        self._watched = [weakref.ref(part, lambda _: _empty(held)) for part in (*modules, *tensors)]

    def holds(self) -> bool:
        """True as long as nothing that K/V depend on was written, replaced, moved, merged or hooked."""
        if not self._attributes:
            return False  # a module or a tensor has died
        children, tensors, hooks = self._read()
        return (
            hooks == self._hooks
            and list(map(id, children)) == self._children
            and _facts(tensors) == self._facts
            and not any(map(_has_expired, self._addresses))
            and self._own_forwards() == self._forwards
            and self.switches.weights_are_as_before
        )

    def check_dropout(self, model: PreTrainedModel) -> None:
        """Dropout makes K/V random."""
        if any(dropout.training and dropout.p for dropout in self._dropouts):
            raise unsupported(model, "it has dropout switched on in a layer: call model.eval()")

    def _read(self) -> tuple[list[torch.nn.Module | None], list[torch.Tensor], list[tuple[int, ...]]]:
        """Child modules, parameters and buffers, and the ids of hooks, in the order of modules."""
        modules, parameters, buffers, before, after = zip(*map(_CONTENTS, self._attributes), strict=True)
        if self._recomputed:
            of_modules = dict(enumerate(buffers))
            for at in self._recomputed:
                of_modules[at] = {**of_modules[at], **recomputed_buffers(self._attributes[at])}
            buffers = tuple(of_modules.values())
        children = chain.from_iterable(map(dict.values, filter(None, modules)))
        tensors = chain.from_iterable(map(dict.values, filter(None, chain(parameters, buffers))))
        hooks = filter(None, chain(before, (_GAP,), after, (_GAP,), _HOOKS_OF_ALL))
        return list(children), [tensor for tensor in tensors if tensor is not None], list(map(tuple, hooks))

    def _own_forwards(self) -> list[Any]:
        """What stands over the forward of each module's class; not the model's own, which may be an attachment's."""
        return list(map(dict.get, self._attributes[1:], repeat("forward")))


_CONTENTS = itemgetter("_modules", "_parameters", "_buffers", "_forward_pre_hooks", "_forward_hooks")
#: Torch's hooks on every module there is; the dictionaries are never replaced.
_HOOKS_OF_ALL = (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)
_GAP = (None,)
_WRITTEN = attrgetter("_version", "dtype")
_has_expired = torch.UntypedStorage._expired


def _facts(tensors: list[torch.Tensor]) -> tuple[list[tuple[int, torch.dtype]], list[int]]:
    return list(map(_WRITTEN, tensors)), list(map(torch.Tensor.data_ptr, tensors))


def _empty(lists: list[list[Any]]) -> None:
    for each in lists:
        each.clear()


def _modules_of(model: PreTrainedModel) -> list[torch.nn.Module]:
    """All modules; one that stands in two places comes twice."""
    modules: list[torch.nn.Module] = [model]
    for module in modules:  # grows while it is walked
        modules.extend(child for child in module._modules.values() if child is not None)
    return modules


def _refuse(model: PreTrainedModel, modules: list[torch.nn.Module], tensors: list[torch.Tensor]) -> None:
    for module in modules:
        if reason := adapters.refusal(module):
            raise unsupported(model, reason)
    if any(tensor.is_inference() for tensor in tensors):
        raise unsupported(model, "its weights were made under inference_mode, where torch does not count their changes")


_identities: weakref.WeakKeyDictionary[PreTrainedModel, ModelIdentity] = weakref.WeakKeyDictionary()


def state_of(model: PreTrainedModel) -> ModelState:
    """The model as it is now; the same in all its attachments.

    Raises:
        UnsupportedModel: the model has parts whose state cannot be told.
    """
    return _identities.setdefault(model, ModelIdentity()).state(model)


def namespace_of_prompt(model: PreTrainedModel, length: Callable[[], int]) -> bytes:
    """Names the model, its present state, and what of it depends on the length of a prompt; as `state_of`.

    The length is asked for in models alone whose keys depend on it.
    """
    state = state_of(model)
    return state.namespace if state.rotary.are_fixed else state.namespace + state.rotary.regime(length())
