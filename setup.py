"""Builds the C++ core (a pybind11 extension) and the simulated Ascend runtime (plain shared libraries)."""

import os
from pathlib import Path

from pybind11 import get_include
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
LIBRARIES = "npu_prompt_cache.sim.lib."
SIMULATOR = "libnpu_prompt_cache_sim"
# The libraries of CANN that torch_npu is linked against, or opens for its operators. Each is a shell: its name, no
# code, and the simulator as what it depends on, so that whichever of them a program asks, by symbol or by dlsym,
# the simulator answers.
SHELLS = [
    "libascendcl",
    "libacl_op_compiler",
    "libacl_tdt_channel",
    "libatb",
    "libge_runner",
    "libgraph",
    "libhccl",
    "libopapi",
]
# NPU_PROMPT_CACHE_CFLAGS lets scripts/sanitize.sh build the same sources with sanitizers.
EXTRA = os.environ.get("NPU_PROMPT_CACHE_CFLAGS", "").split()
COMPILE = ["-std=c++17", "-O3", "-g0", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", *EXTRA]


def sources(*rooms: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for room in rooms for path in (ROOT / "csrc" / room).glob("*.cpp"))


class BuildExt(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in (SIMULATOR, *SHELLS):
            # No Python module: what torch_npu and the loader look for is a file of exactly this name.
            return str(Path(*fullname.split("."))) + ".so"
        return str(super().get_ext_filename(fullname))

    def copy_extensions_to_source(self) -> None:
        (ROOT / "npu_prompt_cache" / "sim" / "lib").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        if ext.sources:
            super().build_extension(ext)
            return
        # DT_RPATH, not DT_RUNPATH: a shell takes the simulator that lies beside it, whatever the environment says.
        flags = ["-Wl,--no-as-needed", "-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN"]
        self.compiler.link_shared_object(
            [self.get_ext_fullpath(LIBRARIES + SIMULATOR)],
            self.get_ext_fullpath(ext.name),
            extra_preargs=[*flags, f"-Wl,-soname,{Path(self.get_ext_fullpath(ext.name)).name}"],
            target_lang="c",
        )


setup(
    ext_modules=[
        Extension(
            "npu_prompt_cache._core",
            [*sources("acl", "cache", "cpu", "device"), "csrc/bindings.cpp"],
            include_dirs=["csrc", get_include()],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
            extra_compile_args=COMPILE,
            extra_link_args=["-ldl", "-pthread", *EXTRA],
            language="c++",
        ),
        Extension(
            LIBRARIES + SIMULATOR,
            sources("sim"),
            include_dirs=["csrc"],
            depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")],
            extra_compile_args=COMPILE,
            # Not the soname of any library of CANN: a simulator that was loaded privately must not pass for the
            # "libascendcl.so this process loaded before" (no silent fallback).
            extra_link_args=["-pthread", f"-Wl,-soname,{SIMULATOR}.so", *EXTRA],
            language="c++",
        ),
        *(Extension(LIBRARIES + shell, []) for shell in SHELLS),
    ],
    cmdclass={"build_ext": BuildExt},
)
