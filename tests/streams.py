"""Streams of the simulated runtime that are not the cache's own."""

from __future__ import annotations

import ctypes

import torch

from npu_prompt_cache import sim


class Stream:
    """A stream of the caller's own, in the context of device 0."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(sim.library_path())
        self.lib.aclrtSetDevice(0)
        handle = ctypes.c_void_p()
        assert self.lib.aclrtCreateStream(ctypes.byref(handle)) == 0
        self.handle = handle.value

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        size = to.numel() * to.element_size()
        args = (ctypes.c_void_p(to.data_ptr()), ctypes.c_size_t(size), ctypes.c_void_p(source.data_ptr()))
        assert self.lib.aclrtMemcpyAsync(*args, ctypes.c_size_t(size), 3, ctypes.c_void_p(self.handle)) == 0

    def synchronize(self) -> None:
        assert self.lib.aclrtSynchronizeStream(ctypes.c_void_p(self.handle)) == 0

    def destroy(self) -> None:
        assert self.lib.aclrtDestroyStream(ctypes.c_void_p(self.handle)) == 0
