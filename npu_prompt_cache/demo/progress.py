"""Progress on the terminal: on stderr, and only where that is a terminal."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from typing import Self


def bar(description: str, total: int, unit: str) -> Any:
    """A tqdm bar that vanishes when it is done."""
    return tqdm(total=total, desc=description, unit=unit, leave=False, disable=None)


class Steps:
    """A bar over a few named steps; a context manager."""

    def __init__(self, description: str, count: int) -> None:
        self._description = description
        self._bar = bar(description, count, "step")
        self._started = 0

    def next(self, name: str) -> None:
        """The step before is done; this one begins."""
        if self._started:
            self._bar.update()
        self._started += 1
        self._bar.set_description(f"{self._description}: {name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self._bar.update()
        self._bar.close()
