"""One sequence of a packed batch.

Sequences of a batch are packed: their new tokens stand one after another in one row, without padding. A sequence
attends to its own tokens ``[0, kv_length)``, which lie in the blocks of its table; its new tokens are the last ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Sequence:
    """One sequence of a packed batch.

    Args:
        start: its first new token's place in the packed row.
        stop: the place after its last new token.
        kv_length: tokens it attends to, the new ones included.
        block_table: int32 ``[>= ceil(kv_length / block_size)]``: its blocks in the pool.
    """

    start: int
    stop: int
    kv_length: int
    block_table: npt.NDArray[np.int32]

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self.stop - self.start
