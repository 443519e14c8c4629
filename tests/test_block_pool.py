"""The block pool beside a plain model of it: states, users, and blocks that wait for tickets in any order (P5, P10)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("block_pool") / "block_pool"
    sources = [ROOT / "tests" / "block_pool.cpp", ROOT / "csrc" / "cache" / "block_pool.cpp"]
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-o", str(program)]
    subprocess.run(["g++", *options, *map(str, sources)], check=True)
    return program


@pytest.mark.parametrize("seed", range(4))
def test_random_transitions_agree_with_a_model(program: Path, seed: int) -> None:
    done = subprocess.run([str(program), str(seed)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
