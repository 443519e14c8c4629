"""Random numbers of the simulated device: the CPU's, for the same seed and the same calls.

An npu generator's state is a seed and an offset. Right after seeding the offset is 0, and the CPU generator that
stands in for it is seeded alike. After every use, the offset becomes a digest of the CPU generator's state, which
is kept under it; so whoever saves and restores the npu generator's state, by whatever call, continues in the same
sequence. The most recent states are kept; a state that is not (of another process, say) starts a sequence that
depends on seed and offset alone.
"""

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator

import torch

__all__ = ["borrowed", "borrowed_default"]

_KEPT_STATES = 4096  # of 5 KiB each
_lock = threading.RLock()  # held while a state is borrowed, as torch's generators hold theirs
_states: OrderedDict[int, torch.Tensor] = OrderedDict()  # CPU generator state by its digest, oldest use first


def _digest(state: torch.Tensor) -> int:
    digest = int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=8).digest(), "little")
    return digest & ((1 << 62) - 4) | 1 << 61  # a multiple of 4, as offsets must be; not 0; fits an int64


def _load(generator: torch.Generator) -> torch.Generator:
    seed, offset = generator.initial_seed(), generator.get_offset()
    cpu = torch.Generator()
    if offset == 0:
        return cpu.manual_seed(seed)
    state = _states.get(offset)
    if state is None:
        mixed = hashlib.blake2b(seed.to_bytes(8, "little") + offset.to_bytes(8, "little"), digest_size=8)
        return cpu.manual_seed(int.from_bytes(mixed.digest(), "little"))
    cpu.set_state(state)
    return cpu


def _store(generator: torch.Generator, cpu: torch.Generator) -> None:
    state = cpu.get_state()
    offset = _digest(state)
    _states[offset] = state
    _states.move_to_end(offset)
    if len(_states) > _KEPT_STATES:
        _states.popitem(last=False)
    generator.set_offset(offset)


@contextlib.contextmanager
def borrowed(generator: torch.Generator) -> Iterator[torch.Generator]:
    """A CPU generator in the state of an npu generator, which it advances when the block ends."""
    with _lock:
        cpu = _load(generator)
        before = cpu.get_state()
        yield cpu
        if not torch.equal(before, cpu.get_state()):
            _store(generator, cpu)


@contextlib.contextmanager
def borrowed_default(generator: torch.Generator) -> Iterator[None]:
    """The same for code that takes no generator: it finds that state in torch's default CPU generator."""
    with borrowed(generator) as cpu:
        default = torch.default_generator
        saved = default.get_state()
        default.set_state(cpu.get_state())
        try:
            yield
        finally:
            cpu.set_state(default.get_state())
            default.set_state(saved)
