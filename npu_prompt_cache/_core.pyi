"""
The C++ core of npu_prompt_cache. Use the classes of the package, which document and type it.
"""

from __future__ import annotations
import collections.abc
import numpy
import numpy.typing
import typing
import typing_extensions

__all__: list[str] = [
    "DECODE_LANES",
    "Lease",
    "PRIORITIES",
    "PromptCache",
    "decode_attention",
    "process_is_exiting",
    "tokens",
    "write_rows",
]

class Lease:
    def block_table(self) -> numpy.typing.NDArray[numpy.int32]: ...
    def commit(self, token_ids: typing.Any) -> int: ...
    def extend(self, count: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def fork(self, length: typing.SupportsInt | typing.SupportsIndex) -> Lease: ...
    def release(self) -> None: ...
    def slots(
        self, start: typing.SupportsInt | typing.SupportsIndex, stop: typing.SupportsInt | typing.SupportsIndex
    ) -> numpy.typing.NDArray[numpy.int64]: ...
    def truncate(self, length: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def released(self) -> bool: ...

class PromptCache:
    def __init__(
        self,
        *,
        acl_lib: str,
        device: typing.SupportsInt | typing.SupportsIndex,
        pool_bytes: typing.SupportsInt | typing.SupportsIndex,
        watermark_bytes: typing.SupportsInt | typing.SupportsIndex,
        plane_block_bytes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        block_size: typing.SupportsInt | typing.SupportsIndex,
        whole_blocks: bool = False,
        max_pinned_bytes: typing.SupportsInt | typing.SupportsIndex | None = None,
        lfu: bool = False,
        second_sighting: bool = False,
        priority_bits: typing.SupportsInt | typing.SupportsIndex = 32,
        fenced: bool = True,
    ) -> None: ...
    def acquire(
        self,
        namespace: bytes,
        token_ids: typing.Any,
        limit: typing.SupportsInt | typing.SupportsIndex | None = None,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
        priority: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> Lease: ...
    def acquire_batch(
        self,
        namespace: bytes,
        prompts: collections.abc.Sequence[typing.Any],
        limits: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
        priority: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> tuple[
        list[Lease],
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.int64],
        numpy.typing.NDArray[numpy.int64],
    ]: ...
    def check_integrity(self) -> None: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...
    def eviction_order(self) -> list[list[int]]:
        """
        Unpinned entries, the next to be evicted first, each as the tokens from the root to its last.
        """
    def insert(
        self,
        namespace: bytes,
        token_ids: typing.Any,
        planes: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        kind: typing.SupportsInt | typing.SupportsIndex,
        stream: typing.SupportsInt | typing.SupportsIndex = 0,
        priority: typing.SupportsInt | typing.SupportsIndex = 1,
    ) -> int: ...
    def lookup(self, namespace: bytes, token_ids: typing.Any) -> tuple[int, numpy.typing.NDArray[numpy.int32]]: ...
    def pin(self, namespace: bytes, token_ids: typing.Any) -> Lease: ...
    def plane_address(self, arg0: typing.SupportsInt | typing.SupportsIndex) -> int: ...
    def plane_capsule(
        self,
        plane: typing.SupportsInt | typing.SupportsIndex,
        shape: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex],
        code: typing.SupportsInt | typing.SupportsIndex,
        bits: typing.SupportsInt | typing.SupportsIndex,
        device_type: typing.SupportsInt | typing.SupportsIndex,
        device_id: typing.SupportsInt | typing.SupportsIndex,
    ) -> typing_extensions.CapsuleType: ...
    def stats(self) -> dict[str, typing.Any]: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def block_count(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def runtime_how(self) -> str: ...
    @property
    def runtime_path(self) -> str: ...

def decode_attention(
    query: typing.SupportsInt | typing.SupportsIndex,
    keys: typing.SupportsInt | typing.SupportsIndex,
    values: typing.SupportsInt | typing.SupportsIndex,
    out: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.Annotated[numpy.typing.ArrayLike, numpy.int32],
    first: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
    last: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
    heads: typing.SupportsInt | typing.SupportsIndex,
    kv_heads: typing.SupportsInt | typing.SupportsIndex,
    key_dim: typing.SupportsInt | typing.SupportsIndex,
    value_dim: typing.SupportsInt | typing.SupportsIndex,
    block_size: typing.SupportsInt | typing.SupportsIndex,
    scale: typing.SupportsFloat | typing.SupportsIndex,
    threads: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Attention of one new token a sequence, float32; tensors by their addresses. See csrc/cpu/decode_attention.h.
    """

def process_is_exiting() -> None:
    """
    From here on no destructor calls the Ascend runtime, which may be gone.
    """

def tokens(token_ids: typing.Any) -> numpy.typing.NDArray[numpy.int32]:
    """
    Token ids checked and copied to an int32 array.
    """

def write_rows(
    states: typing.SupportsInt | typing.SupportsIndex,
    plane: typing.SupportsInt | typing.SupportsIndex,
    slots: typing.Annotated[numpy.typing.ArrayLike, numpy.int64],
    row_bytes: typing.SupportsInt | typing.SupportsIndex,
) -> None:
    """
    Copies rows of one tensor to given rows of another, by their addresses.
    """

DECODE_LANES: int = 16
PRIORITIES: int = 4
