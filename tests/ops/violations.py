"""How a test says that a call breaks a documented rule."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from npu_prompt_cache.sim.ops.registry import RuleViolation


def violates(function: Callable[..., object], arguments: Mapping[str, Any], text: str) -> None:
    """The call raises a violation that holds ``text``, and changes none of its arguments."""
    before = {name: value.clone() for name, value in arguments.items() if torch.is_tensor(value)}
    with pytest.raises(RuleViolation, match=re.escape(text)):
        function(**arguments)
    for name, value in before.items():
        assert torch.equal(arguments[name], value)
