"""What a model's K/V depend on besides tokens: which model it is, and its weights as they are now."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class ModelIdentity:
    """Names one model object, and counts the states of its weights.

    A state is told by where each parameter's data lie and how often they were written (torch's version counters).
    Weak references to the storages keep their addresses from being used again, so that no new weight passes for an
    old one. ``parameter.data.add_()`` leaves no trace: clear the cache after such an update.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._id = os.urandom(16)
        self._state: list[tuple[int, int]] = []
        self._storages: list[StorageWeakRef] = []
        self._version = 0

    def namespace(self, parameters: list[torch.Tensor]) -> bytes:
        """The same bytes as long as no parameter was written, replaced or moved."""
        state = [(p.untyped_storage()._cdata, 0 if p.is_inference() else p._version) for p in parameters]
        with self._lock:
            if state != self._state:
                self._state = state
                self._storages = [StorageWeakRef(p.untyped_storage()) for p in parameters]  # type: ignore[no-untyped-call]
                self._version += 1
            return b"model" + self._id + self._version.to_bytes(8, "little")


_identities: weakref.WeakKeyDictionary[PreTrainedModel, ModelIdentity] = weakref.WeakKeyDictionary()


def identity_of(model: PreTrainedModel) -> ModelIdentity:
    """The identity of a model, the same in all its attachments."""
    return _identities.setdefault(model, ModelIdentity())
