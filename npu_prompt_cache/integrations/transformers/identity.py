"""What a model's K/V depend on besides tokens: which model it is, and its modules and weights as they are now."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import StorageWeakRef

from npu_prompt_cache.errors import UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class ModelIdentity:
    """Names one model object, and counts the states it was seen in.

    A state is every module (and the hooks on it), and for every parameter and buffer where its data lie and how often
    they were written (torch's version counters). Weak references keep an address from passing for an old one. Two
    things leave no trace: ``parameter.data.add_()``, and attributes of modules that are no tensors. Clear the cache
    after such a change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._id = os.urandom(16)
        self._state: list[Any] = []
        self._alive: list[weakref.ref[torch.nn.Module]] = []
        self._storages: list[StorageWeakRef] = []
        self._version = 0

    def namespace(self, model: PreTrainedModel) -> bytes:
        """The same bytes as long as nothing that K/V depend on was written, replaced, moved or hooked.

        Raises:
            UnsupportedModel: the model has parts whose state cannot be told.
        """
        state, modules, tensors = _walk(model)
        with self._lock:
            if state != self._state or any(ref() is None for ref in self._alive):
                self._state = state
                self._alive = [weakref.ref(module) for module in modules]
                self._storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]  # type: ignore[no-untyped-call]
                self._version += 1
            return b"model" + self._id + self._version.to_bytes(8, "little")


def _walk(model: PreTrainedModel) -> tuple[list[Any], list[torch.nn.Module], list[torch.Tensor]]:
    """The state, and what must stay alive for its addresses to mean the same: in the request's path, so bare loops."""
    state: list[Any] = []
    modules: list[torch.nn.Module] = [model]
    tensors: list[torch.Tensor] = []
    for module in modules:  # grows while it is walked
        parts = module.__dict__
        children = parts["_modules"]
        state.append(id(module))
        if parts["_forward_hooks"] or parts["_forward_pre_hooks"]:
            state.append((*parts["_forward_pre_hooks"], None, *parts["_forward_hooks"]))
        for kind in ("_parameters", "_buffers"):
            for tensor in parts[kind].values():
                if tensor is not None:
                    tensors.append(tensor)
        if "base_layer" in children:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot use the prompt cache: it has adapter layers "
                f"({type(module).__name__}), whose being switched on and off cannot be seen"
            )
        modules.extend(child for child in children.values() if child is not None)
    for tensor in tensors:
        if tensor.is_inference():
            raise UnsupportedModel(
                f"{type(model).__name__} cannot use the prompt cache: its weights were made under inference_mode, "
                "where torch does not count their changes"
            )
        state.append((tensor.untyped_storage()._cdata, tensor.data_ptr(), tensor._version, tensor.dtype))
    return state, modules, tensors


_identities: weakref.WeakKeyDictionary[PreTrainedModel, ModelIdentity] = weakref.WeakKeyDictionary()


def namespace_of(model: PreTrainedModel) -> bytes:
    """Names the model and its present state; the same in all its attachments.

    Raises:
        UnsupportedModel: the model has parts whose state cannot be told.
    """
    return _identities.setdefault(model, ModelIdentity()).namespace(model)
