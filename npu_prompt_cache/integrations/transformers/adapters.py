"""The adapter layers of peft inside a model: which of them are served, and how they are switched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import starmap
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    import torch

#: Layers whose code was read: what they compute of a token depends on that token, on tensors, and on these attributes.
_SWITCHES = {
    "peft.tuners.lora.layer.Linear": ("_active_adapter", "_disable_adapters", "scaling", "lora_variant"),
    "peft.tuners.lora.layer.Embedding": ("_active_adapter", "_disable_adapters", "scaling", "lora_variant"),
    "peft.tuners.ia3.layer.Linear": ("_active_adapter", "_disable_adapters"),
    "peft.utils.other.ModulesToSaveWrapper": ("_active_adapter", "_disable_adapters", "_adapters"),
}
#: What may stand inside them and has no switches of its own.
_PARTS = ("peft.tuners.lora.dora.DoraLinearLayer", "peft.tuners.lora.dora.DoraEmbeddingLayer")
#: Kinds of LoRA that look at nothing but their own token.
_LORA_VARIANTS = ("DoraLinearVariant", "DoraEmbeddingVariant")
_MERGED = "merged_adapters"


def refusal(module: torch.nn.Module) -> str | None:
    """Why a model that has this layer cannot be served, or None."""
    kind, parts = _kind(module), module.__dict__
    if kind in _SWITCHES:
        variants = {type(variant).__name__ for variant in parts.get("lora_variant", {}).values()}
        if unknown := sorted(variants.difference(_LORA_VARIANTS)):
            return f"its adapters are of a kind that is not served ({', '.join(unknown)})"
        if any(map(_is_of_peft, parts["_forward_pre_hooks"].values())):
            return "its adapter layers are told what to do for each row of this batch (adapter_names)"
        return f"the forward of an adapter layer ({kind}) was replaced" if "forward" in parts else None
    if kind.startswith("peft.") and kind not in _PARTS:
        return f"it has adapter layers of a kind that is not served ({kind})"
    if "base_layer" in parts["_modules"]:
        return f"it has adapter layers ({type(module).__name__}), whose being switched on and off cannot be seen"
    return None


def _kind(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_of_peft(hook: Callable[..., Any]) -> bool:
    return isinstance(hook, functools.partial) and hook.func.__module__.startswith("peft.")


class Switches:
    """How the adapters of a model are switched: which are active in which layer, by how much they count, and so on.

    Merging writes to ``weight.data``, of which torch keeps no count, and unmerging leaves weights that are rounded
    otherwise than before. So the list that peft writes the merged adapters' names to is replaced by one that counts.
    """

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        #: Attributes of layers. Whoever holds them holds the layers' weights: empty the lists when a layer has died.
        self.held: list[list[dict[str, Any]]] = []
        self._readers = []
        for names in sorted(set(_SWITCHES.values())):
            layers = [module.__dict__ for module in modules if _SWITCHES.get(_kind(module)) == names]
            self._readers.append((itemgetter(*names), layers))
            self.held.append(layers)
        self._mergeable = [layer for layers in self.held for layer in layers if _MERGED in layer]
        self.held.append(self._mergeable)
        for layer in self._mergeable:
            if type(layer[_MERGED]) is not _CountingList:
                layer[_MERGED] = _CountingList(layer[_MERGED])
        self._merged: list[_CountingList] = [layer[_MERGED] for layer in self._mergeable]
        self._merges = self._count_merges()
        self._rows: list[tuple[Any, ...]] | None = None
        self._seen: list[tuple[Any, ...]] = []

    @property
    def weights_are_as_before(self) -> bool:
        """False once something was merged into the base weights, or taken out of them."""
        merged = map(itemgetter(_MERGED), self._mergeable)
        return all(map(is_, merged, self._merged)) and self._count_merges() == self._merges

    def _count_merges(self) -> int:
        return sum(map(attrgetter("changes"), self._merged))

    def look(self) -> bool:
        """True where anything was switched since the last look, or an adapter was chosen that is chosen again now."""
        before, self._rows = self._rows, [row for read, layers in self._readers for row in map(read, layers)]
        if before is not None and self._rows == self._seen and _are_the_same_choices(before, self._rows):
            return False
        self._seen = [tuple(map(_copied, row)) for row in self._rows]
        return True

    def key(self) -> tuple[Any, ...]:
        """What every layer does, as it was switched at the last look; hashable."""
        return tuple(starmap(_effect, self._seen))


_CHOSEN: Callable[[tuple[Any, ...]], Any] = itemgetter(0)


def _are_the_same_choices(before: list[tuple[Any, ...]], now: list[tuple[Any, ...]]) -> bool:
    """peft makes a new list whenever an adapter is chosen."""
    return all(map(is_, map(_CHOSEN, before), map(_CHOSEN, now)))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict, set)) else value


def _effect(active: str | list[str], is_disabled: bool, *by_adapter: Any) -> tuple[Any, ...] | None:
    """What an adapter layer does: nothing, or what its active adapters do, one after another."""
    if is_disabled:
        return None
    names = (active,) if isinstance(active, str) else tuple(active)
    return names, *(
        tuple(map(of.get, names)) if isinstance(of, dict) else tuple(name in of for name in names) for of in by_adapter
    )


class _CountingList(list[str]):
    """A list that counts how often names were put on it or taken off it; a copy of it is an ordinary list."""

    changes = 0

    def append(self, name: str) -> None:
        self.changes += 1
        super().append(name)

    def pop(self, at: SupportsIndex = -1) -> str:
        self.changes += 1
        return super().pop(at)

    def __reduce__(self) -> tuple[type[list[str]], tuple[list[str]]]:
        return list, (self[:],)


def adapted_model(model: Any) -> Any:
    """The model that a wrapper of peft hands its work to, or `model` itself."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    peft = sys.modules.get("peft")
    if tuners is None or peft is None:
        return model
    if isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model.get_base_model()
    return model.model if isinstance(model, tuners.BaseTuner) else model


def virtual_tokens(model: Any) -> str | None:
    """Names the adapter of a wrapper of peft that puts tokens of its own before the prompt; None without one."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    kinds = {name: config for name, config in model.peft_config.items() if config.is_prompt_learning}
    return next((f"{name!r} ({config.peft_type.value})" for name, config in kinds.items()), None)
