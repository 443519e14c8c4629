"""What a cache is made with, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEFAULT_POOL_BYTES = 2 << 30
DEFAULT_WATERMARK_BYTES = 256 << 20
MAX_POOL_BYTES = 1 << 48
#: What a device is called.
DEVICE = re.compile(r"cpu|npu(:\d{1,4})?")
POLICIES = ("lru", "lfu")
ADMISSIONS = ("all", "second_sighting")


@dataclass(frozen=True)
class CacheConfig:
    """Device and sizes of a cache.

    Args:
        device: ``"cpu"`` (the simulated runtime on host memory), ``"npu"`` or ``"npu:N"``.
        pool_bytes: bytes of device memory for the pool.
        watermark_bytes: bytes of the pool kept free after every commit; below it, entries are evicted.
        policy: which of them, ``"lru"`` or ``"lfu"``.
        max_pinned_bytes: bytes of the pool that pins may hold together.
        admission: what is published, ``"all"`` or ``"second_sighting"``.
        acl_lib: path of the Ascend runtime library; None searches (see ``RuntimeNotFound``).
    """

    device: str
    pool_bytes: int
    watermark_bytes: int
    policy: str
    max_pinned_bytes: int
    admission: str
    acl_lib: str | None = None

    @classmethod
    def resolve(
        cls,
        device: str = "cpu",
        max_gb: float | None = None,
        pool_bytes: int | None = None,
        watermark_bytes: int | None = None,
        policy: str = "lru",
        max_pinned_bytes: int | None = None,
        admission: str = "all",
        acl_lib: str | None = None,
    ) -> CacheConfig:
        """Checks the values and fills in what is None.

        Raises:
            ValueError, TypeError: naming the value and its limit.
        """
        if not DEVICE.fullmatch(device):
            raise ValueError(f"device={device!r} is not 'cpu', 'npu' or 'npu:N'")
        if pool_bytes is not None and max_gb is not None:
            raise ValueError(f"max_gb={max_gb} and pool_bytes={pool_bytes} both say how large the pool is")
        if max_gb is not None:
            pool_bytes = int(_positive("max_gb", max_gb, (int, float)) * (1 << 30))
        pool_bytes = int(_positive("pool_bytes", DEFAULT_POOL_BYTES if pool_bytes is None else pool_bytes, (int,)))
        if pool_bytes > MAX_POOL_BYTES:
            raise ValueError(f"pool_bytes={pool_bytes} is more than {MAX_POOL_BYTES}")
        if watermark_bytes is None:
            watermark_bytes = min(DEFAULT_WATERMARK_BYTES, pool_bytes // 4)
        _check_integer("watermark_bytes", watermark_bytes)
        if not 0 <= watermark_bytes < pool_bytes:
            raise ValueError(
                f"watermark_bytes={watermark_bytes} is not in [0, pool_bytes={pool_bytes}): "
                "it is the part of the pool that stays free"
            )
        if max_pinned_bytes is None:
            max_pinned_bytes = pool_bytes // 2
        _check_integer("max_pinned_bytes", max_pinned_bytes)
        if not 0 <= max_pinned_bytes <= pool_bytes:
            raise ValueError(f"max_pinned_bytes={max_pinned_bytes} is not in [0, pool_bytes={pool_bytes}]")
        _check_one_of("policy", policy, POLICIES)
        _check_one_of("admission", admission, ADMISSIONS)
        return cls(device, pool_bytes, watermark_bytes, policy, max_pinned_bytes, admission, acl_lib)

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"npu"``."""
        return self.device.partition(":")[0]

    @property
    def device_index(self) -> int:
        """Number of the device, from 0."""
        return int(self.device.partition(":")[2] or 0)


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not an integer")


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, known))}")


def _positive(name: str, value: object, kinds: tuple[type, ...]) -> float:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: a number is needed")
    if not 0 < value < float("inf"):  # type: ignore[operator]
        raise ValueError(f"{name}={value}: a number above 0 is needed")
    return value  # type: ignore[return-value]
