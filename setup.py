"""Builds the C++ core (a pybind11 extension) and the simulated Ascend runtime (a plain shared library)."""

import os
from pathlib import Path

from pybind11 import get_include
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
SIMULATOR = "npu_prompt_cache.sim.libascendcl"
# NPU_PROMPT_CACHE_CFLAGS lets scripts/sanitize.sh build the same sources with sanitizers.
EXTRA = os.environ.get("NPU_PROMPT_CACHE_CFLAGS", "").split()
COMPILE = ["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", *EXTRA]


def sources(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / "csrc" / room).glob("*.cpp"))


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] == SIMULATOR.rpartition(".")[2]:
            # No Python module: what torch_npu and the loader look for is a file of exactly this name.
            return str(Path(*fullname.split("."))) + ".so"
        return str(super().get_ext_filename(fullname))


setup(
    ext_modules=[
        Extension(
            "npu_prompt_cache._core",
            [*sources("acl", "cache", "device"), "csrc/bindings.cpp"],
            include_dirs=["csrc", get_include()],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
            extra_compile_args=COMPILE,
            extra_link_args=["-ldl", "-pthread", *EXTRA],
            language="c++",
        ),
        Extension(
            SIMULATOR,
            sources("sim"),
            include_dirs=["csrc"],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
            extra_compile_args=COMPILE,
            # Another soname than the file's name: a simulator that was loaded privately must not pass for the
            # "libascendcl.so this process loaded before" (no silent fallback).
            extra_link_args=["-pthread", "-Wl,-soname,libnpu_prompt_cache_sim.so", *EXTRA],
            language="c++",
        ),
    ],
    cmdclass={"build_ext": BuildExt},
)
