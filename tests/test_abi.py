"""Our ABI header against the vendor's own, where it is installed (scripts/test.sh installs it)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from npu_prompt_cache import sim

INCLUDE = os.environ.get("NPU_PROMPT_CACHE_ACL_INCLUDE", "")
CSRC = Path(__file__).parent.parent / "csrc"

needs_headers = pytest.mark.skipif(
    not INCLUDE, reason="the vendor's headers are not installed; scripts/test.sh installs them"
)

VENDOR_CONSTANTS = {
    "kSuccess": "ACL_SUCCESS",
    "kInvalidParam": "ACL_ERROR_INVALID_PARAM",
    "kUninitialized": "ACL_ERROR_UNINITIALIZE",
    "kRepeatInitialize": "ACL_ERROR_REPEAT_INITIALIZE",
    "kRtParamInvalid": "ACL_ERROR_RT_PARAM_INVALID",
    "kRtContextNull": "ACL_ERROR_RT_CONTEXT_NULL",
    "kRtStreamContext": "ACL_ERROR_RT_STREAM_CONTEXT",
    "kRtFeatureNotSupported": "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    "kRtMemoryAllocation": "ACL_ERROR_RT_MEMORY_ALLOCATION",
    "kRtDeviceOom": "ACL_ERROR_RT_DEVICE_OOM",
    "kInternalError": "ACL_ERROR_INTERNAL_ERROR",
    "kDriverInternalError": "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
    "kHugeFirst": "ACL_MEM_MALLOC_HUGE_FIRST",
    "kHugeOnly": "ACL_MEM_MALLOC_HUGE_ONLY",
    "kNormalOnly": "ACL_MEM_MALLOC_NORMAL_ONLY",
    "kHugeFirstP2p": "ACL_MEM_MALLOC_HUGE_FIRST_P2P",
    "kHugeOnlyP2p": "ACL_MEM_MALLOC_HUGE_ONLY_P2P",
    "kNormalOnlyP2p": "ACL_MEM_MALLOC_NORMAL_ONLY_P2P",
    "kHuge1gOnly": "ACL_MEM_MALLOC_HUGE1G_ONLY",
    "kHuge1gOnlyP2p": "ACL_MEM_MALLOC_HUGE1G_ONLY_P2P",
    "kHostToHost": "ACL_MEMCPY_HOST_TO_HOST",
    "kHostToDevice": "ACL_MEMCPY_HOST_TO_DEVICE",
    "kDeviceToHost": "ACL_MEMCPY_DEVICE_TO_HOST",
    "kDeviceToDevice": "ACL_MEMCPY_DEVICE_TO_DEVICE",
    "kMemcpyDefault": "ACL_MEMCPY_DEFAULT",
    "kHostBufToDevice": "ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE",
    "kInnerDeviceToDevice": "ACL_MEMCPY_INNER_DEVICE_TO_DEVICE",
    "kInterDeviceToDevice": "ACL_MEMCPY_INTER_DEVICE_TO_DEVICE",
    "kDdrMem": "ACL_DDR_MEM",
    "kHbmMem": "ACL_HBM_MEM",
    "kHbmMemHuge": "ACL_HBM_MEM_HUGE",
    "kHbmMemNormal": "ACL_HBM_MEM_NORMAL",
    "kEventNotReady": "ACL_EVENT_RECORDED_STATUS_NOT_READY",
    "kEventComplete": "ACL_EVENT_RECORDED_STATUS_COMPLETE",
    "kEventWaitComplete": "ACL_EVENT_WAIT_STATUS_COMPLETE",
    "kEventWaitNotReady": "ACL_EVENT_WAIT_STATUS_NOT_READY",
    "kStreamComplete": "ACL_STREAM_STATUS_COMPLETE",
    "kStreamNotReady": "ACL_STREAM_STATUS_NOT_READY",
    "kEventSync": "ACL_EVENT_SYNC",
}


def test_every_constant_of_ours_is_compared() -> None:
    header = (CSRC / "acl" / "abi.h").read_text()
    assert set(re.findall(r"\b(k[A-Z]\w*)(?= =)", header)) == set(VENDOR_CONSTANTS)


# Constants of the simulator's own sources, by the folder's file, and what they are the vendor's.
SIMULATOR_CONSTANTS = {
    "status.h": {
        "kRepeatFinalize": "ACL_ERROR_REPEAT_FINALIZE",
        "kInvalidDevice": "ACL_ERROR_RT_INVALID_DEVICEID",
        "kAddressUnaligned": "ACL_ERROR_RT_ADDR_UNALIGNED",
        "kNoEventResource": "ACL_ERROR_RT_NO_EVENT_RESOURCE",
        "kSystemDma": "ACL_ERROR_RT_SYS_DMA",
    },
    "state.h": {"kSysParams": "ACL_OPT_STRONG_CONSISTENCY + 1"},
    "api_settings.cpp": {
        "kSatModes": "ACL_RT_OVERFLOW_MODE_UNDEF",
        "kCompileOptions": "ACL_OP_DEBUG_OPTION + 1",
        "kJitCompile": "ACL_OP_JIT_COMPILE",
    },
    "api_virtual_memory.cpp": {"kOnDevice": "ACL_MEM_LOCATION_TYPE_DEVICE", "kHuge1g": "ACL_HBM_MEM_HUGE1G"},
    "api_device.cpp": {"kCapabilityCount": "ACL_DEVICE_INFO_L2_SIZE + 1"},
    "api_descriptor.cpp": {"kUndefined": "ACL_DT_UNDEFINED"},
}

# Comparable forms of types: an enumeration is an int (it is passed as one), a pointer to something opaque void*.
PLAIN = """
template <typename T, typename = void> struct Plain { using type = T; };
template <typename T> struct Plain<T, std::enable_if_t<std::is_enum_v<T>>> {
  static_assert(sizeof(T) == sizeof(int));
  using type = int;
};
template <typename T, bool Constant> using Void = std::conditional_t<Constant, const void, void>;
template <typename T> struct Plain<T*, std::enable_if_t<std::is_class_v<T> || std::is_void_v<T>>> {
  using type = Void<T, std::is_const_v<T>>*;
};
template <typename T> struct Plain<T*, std::enable_if_t<std::is_function_v<T>>> { using type = void*; };
template <typename T> struct Plain<T*, std::enable_if_t<std::is_enum_v<T>>> {
  using type = std::conditional_t<std::is_const_v<T>, const int, int>*;
};
template <typename T> struct Plain<T*, std::enable_if_t<std::is_pointer_v<T>>> {
  using type = typename Plain<std::remove_const_t<T>>::type*;
};
template <typename F> struct Signature;
template <typename R, typename... A> struct Signature<R(A...)> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};
template <typename R, typename... A> struct Signature<R(A..., ...)> {
  using type = typename Plain<R>::type(typename Plain<A>::type..., ...);
};
"""


def compile_against_the_vendors(lines: list[str], folder: Path) -> None:
    source = folder / "abi.cpp"
    headers = ["acl/acl.h", "acl/acl_op_compiler.h", "profiling/aprof_pub.h", "torch_npu/csrc/inductor/mlir/hacl_rt.h"]
    start = [*(f"#include <{header}>" for header in headers), "#include <cstddef>", "#include <type_traits>"]
    source.write_text("\n".join(start + lines) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{CSRC}", f"-I{INCLUDE}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def simulator_declarations() -> dict[str, str]:
    """The C functions that the simulator defines with arguments: name to declaration."""
    text = "\n".join(path.read_text() for path in sorted((CSRC / "sim").glob("api_*.cpp")))
    found = re.findall(
        r"^NPC_SIM_API (?:__attribute__\(\(.*?\)\)\) )?([^(#]*?)\b(\w+)\(([^{;]*?)\) \{", text, re.M | re.S
    )
    return {name: f"{returned.strip()} {name}({arguments})" for returned, name, arguments in found if "##" not in name}


def refused_functions() -> list[str]:
    text = (CSRC / "sim" / "functions.h").read_text()
    return re.findall(r"X\((\w+)\)", text[text.index("NPC_SIM_REFUSED_FUNCTIONS(X)") :].split("\n\n")[0])


@needs_headers
def test_constants_and_prototypes_are_the_vendors(tmp_path: Path) -> None:
    functions = re.findall(r"\(\*(acl\w+)\)\(", (CSRC / "acl" / "loader.h").read_text())
    assert len(functions) == 18
    lines = ['#include "acl/loader.h"', PLAIN]
    for ours, theirs in VENDOR_CONSTANTS.items():
        lines.append(f"static_assert(static_cast<long>(npc::acl::{ours}) == static_cast<long>({theirs}));")
    for function in functions:
        lines.append(
            f"static_assert(std::is_same_v<Signature<decltype(::{function})>::type, "
            f'Signature<std::remove_pointer_t<decltype(npc::acl::Api::{function})>>::type>, "{function}");'
        )
    compile_against_the_vendors(lines, tmp_path)


@needs_headers
def test_the_simulators_constants_are_the_vendors(tmp_path: Path) -> None:
    lines = []
    for file, constants in SIMULATOR_CONSTANTS.items():
        text = (CSRC / "sim" / file).read_text()
        for ours, theirs in constants.items():
            value = re.search(rf"constexpr [\w:]+ {ours} = (-?\w+);", text)
            assert value is not None, f"{file} has no {ours}"
            lines.append(f'static_assert({value[1]} == static_cast<long>({theirs}), "{file}: {ours}");')
    compile_against_the_vendors(lines, tmp_path)


@needs_headers
def test_the_simulators_prototypes_are_the_vendors(tmp_path: Path) -> None:
    declarations = simulator_declarations()
    served = set(sim.functions()) - set(refused_functions())
    assert served < set(declarations)
    lines = ['#include "acl/abi.h"', PLAIN, "namespace npc::sim {", "struct PhysicalProperties;"]
    lines += [f"{declaration};" for declaration in declarations.values()]
    lines.append("}")
    for name in declarations:
        lines.append(
            f"static_assert(std::is_same_v<Signature<decltype(::{name})>::type, "
            f'Signature<decltype(npc::sim::{name})>::type>, "{name}");'
        )
    # What is refused is declared without arguments: there only has to be such a function.
    lines += [f"constexpr auto refused_{name} = &::{name};" for name in refused_functions()]
    compile_against_the_vendors(lines, tmp_path)


@needs_headers
def test_the_properties_of_physical_memory_lie_as_the_vendors(tmp_path: Path) -> None:
    text = (CSRC / "sim" / "api_virtual_memory.cpp").read_text()
    ours = re.search(r"struct PhysicalProperties \{.*?\n\};", text, re.S)
    assert ours is not None
    lines = [ours[0], "static_assert(sizeof(PhysicalProperties) == sizeof(aclrtPhysicalMemProp));"]
    for mine, theirs in [
        ("handle_type", "handleType"),
        ("allocation_type", "allocationType"),
        ("attribute", "memAttr"),
        ("device", "location.id"),
        ("location_type", "location.type"),
        ("reserved", "reserve"),
    ]:
        lines.append(
            f"static_assert(offsetof(PhysicalProperties, {mine}) == offsetof(aclrtPhysicalMemProp, {theirs}));"
        )
    compile_against_the_vendors(lines, tmp_path)
