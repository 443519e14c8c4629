"""Random numbers of the simulated device: each call's are a function of its generator's seed and offset.

An npu generator's state is a seed and an offset, and nothing is kept beside it: a call that draws takes its numbers
from a CPU generator made of the two, and then moves the offset on. So whoever saves and restores the npu generator's
state, by whatever call and in whatever process, continues in the same sequence. Right after seeding the offset is 0,
and the first call's numbers are those of the CPU for that seed; those of later calls are not the CPU's.

The CPU's own default generator is never used, so programs that draw on both devices, in whatever threads, do not
disturb each other. An operator that torch_npu leaves to the host by its own fallback, such as rrelu, draws there.
"""

import contextlib
import hashlib
import threading
from collections.abc import Iterator

import torch

__all__ = ["borrowed"]

_STEP = 4  # offsets must be multiples of it
_WORDS = slice(24, 24 + 624 * 8)  # where a CPU generator's state holds the Mersenne twister's, 32 bits in 8 bytes
_lock = threading.RLock()  # held while a state is borrowed, as torch's generators hold theirs


def _made_of(seed: int, offset: int) -> torch.Generator:
    """A CPU generator; of any offset but 0 with a state of its own: a CPU generator's seed has 32 bits only."""
    cpu = torch.Generator().manual_seed(seed)
    if offset:
        source = seed.to_bytes(8, "little") + offset.to_bytes(8, "little")
        words = torch.frombuffer(bytearray(hashlib.shake_128(source).digest(624 * 4)), dtype=torch.uint32)
        state = cpu.get_state()
        state[_WORDS].view(torch.int64).copy_(words)
        cpu.set_state(state)
    return cpu


@contextlib.contextmanager
def borrowed(generator: torch.Generator) -> Iterator[torch.Generator]:
    """A CPU generator for one call; the npu generator moves on when the block ends, if it drew anything."""
    with _lock:
        offset = generator.get_offset()
        cpu = _made_of(generator.initial_seed(), offset)
        before = cpu.get_state()
        yield cpu
        if not torch.equal(before, cpu.get_state()):
            generator.set_offset(offset + _STEP)
