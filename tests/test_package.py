"""What is shipped: the stub of the extension, and the names of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import npu_prompt_cache as npc

ROOT = Path(__file__).parent.parent


def test_the_committed_stub_is_the_extensions(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pybind11_stubgen", "npu_prompt_cache._core", "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    made = tmp_path / "npu_prompt_cache" / "_core.pyi"
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", "--config", str(ROOT / "pyproject.toml"), made])
    assert made.read_text() == (ROOT / "npu_prompt_cache" / "_core.pyi").read_text(), (
        "regenerate it: python -m pybind11_stubgen npu_prompt_cache._core -o . && ruff format"
    )


def test_public_names_exist_and_are_documented() -> None:
    for name in npc.__all__:
        assert getattr(npc, name).__doc__, name


def test_errors_are_one_family() -> None:
    for error in (npc.AclError, npc.RuntimeNotFound, npc.UnsupportedModel, npc.PoolExhausted, npc.CacheClosed):
        assert issubclass(error, npc.PromptCacheError)


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, npu_prompt_cache; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
