"""Rotary positions whose frequencies depend on how long a sequence is, in transformers' `dynamic_rope_update`.

Two scalings look at the largest position of a forward, and with it at its longest sequence:

* LongRoPE has two sets of frequencies, and turns all of a forward by the second one where it is longer than the model
  was first trained for. Keys of both regimes are cached, apart from one another: a request finds those that it would
  compute.
* Dynamic NTK computes frequencies for each length beyond the model's own, and keeps them for later forwards that are
  not shorter than that. Below, frequencies are fixed; what is longer is not served. The first that is longer makes the
  model keep its own frequencies in another tensor: what was cached before that is not found again.

A sequence that becomes longer while it is decoded keeps the keys that it has, with the cache as without: those after
the change are not published.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LONG, DYNAMIC = "longrope", "dynamic"


class RotaryLengths(NamedTuple):
    """Where a model's keys depend on the tokens of the longest sequence of a forward."""

    #: LongRoPE: longer ones have other keys.
    switches: tuple[int, ...]
    #: Dynamic NTK: keys of so many, and of more, are not served. None where there is no such length.
    limit: int | None

    @property
    def are_fixed(self) -> bool:
        """True where keys depend on no length."""
        return not self.switches and self.limit is None

    def serves(self, length: int) -> bool:
        """True where the keys of such a forward depend on nothing but `regime`."""
        return self.limit is None or length < self.limit

    def regime(self, length: int) -> bytes:
        """The same bytes for lengths that have the same keys; empty where there is only one regime."""
        if not self.serves(length):
            return b"not served"
        return b"regime%d" % sum(length > switch for switch in self.switches) if self.switches else b""


def rotary_lengths(model: PreTrainedModel) -> RotaryLengths:
    """Of all rotary modules of the model."""
    switches: set[int] = set()
    limits: list[int] = []
    for module, layer_type, kind in rotary_kinds(model):
        if kind == LONG:
            parameters: dict[str, Any] = module.config.rope_parameters  # type: ignore[union-attr, assignment]
            of_layers = parameters if layer_type is None else parameters[layer_type]
            switches.add(of_layers["original_max_position_embeddings"])
        elif kind == DYNAMIC:
            limits.append(module.original_max_seq_len)  # type: ignore[arg-type]
    return RotaryLengths(tuple(sorted(switches)), min(limits, default=None))


def rotary_kinds(model: PreTrainedModel) -> Iterator[tuple[torch.nn.Module, str | None, str]]:
    """Each rotary module, the layers it is of (None: of all), and how it scales: it may know better than the config."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str):
            yield module, None, kind
        elif isinstance(kind, dict):
            for layer_type, of_layers in kind.items():
                yield module, layer_type, of_layers


def is_recomputed(parts: dict[str, Any]) -> bool:
    """True of a module, by its ``__dict__``, that may set its own buffers in a forward."""
    kind = parts.get("rope_type")
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(of_layers in (LONG, DYNAMIC) for of_layers in kinds)


def recomputed_buffers(parts: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Buffers of a rotary module that a served forward sets before it reads them, and what it sets them to.

    None where that follows from buffers that it does not set.

    Args:
        parts: the module's ``__dict__``.
    """
    found: dict[str, torch.Tensor | None] = {}
    kind, buffers = parts["rope_type"], parts["_buffers"]
    kinds = {"": kind} if isinstance(kind, str) else {f"{name}_": of_layers for name, of_layers in kind.items()}
    for prefix, of_layers in kinds.items():
        if of_layers == LONG:
            found[f"{prefix}inv_freq"] = None
        elif of_layers == DYNAMIC:
            longest = parts.get(f"{prefix}max_seq_len_cached", parts["max_seq_len_cached"])
            if longest > parts["original_max_seq_len"]:
                found[f"{prefix}inv_freq"] = buffers[f"{prefix}original_inv_freq"]
    return found
