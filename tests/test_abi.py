"""Our ABI header against the vendor's own, where it is installed (scripts/test.sh installs it)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

INCLUDE = os.environ.get("NPU_PROMPT_CACHE_ACL_INCLUDE", "")
CSRC = Path(__file__).parent.parent / "csrc"

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


@pytest.mark.skipif(not INCLUDE, reason="the vendor's headers are not installed; scripts/test.sh installs them")
def test_constants_and_prototypes_are_the_vendors(tmp_path: Path) -> None:
    table = (CSRC / "acl" / "loader.h").read_text()
    functions = re.findall(r"\(\*(acl\w+)\)\(", table)
    assert len(functions) == 18
    lines = ["#include <acl/acl.h>", '#include "acl/loader.h"', "#include <type_traits>"]
    for ours, theirs in VENDOR_CONSTANTS.items():
        lines.append(f"static_assert(static_cast<long>(npc::acl::{ours}) == static_cast<long>({theirs}));")
    # Enumerations of the vendor's are passed as what they are: of int's size.
    lines += [
        "template <typename T> struct Plain { using type = T; };",
        "template <> struct Plain<aclrtMemMallocPolicy> { using type = npc::acl::MallocPolicy; };",
        "template <> struct Plain<aclrtMemcpyKind> { using type = npc::acl::MemcpyKind; };",
        "template <> struct Plain<aclrtMemAttr> { using type = npc::acl::MemAttr; };",
        "template <> struct Plain<aclrtEventRecordedStatus*> { using type = npc::acl::EventRecordedStatus*; };",
        "template <typename F> struct Signature;",
        "template <typename R, typename... A> struct Signature<R(A...)> {",
        "  using type = R (*)(typename Plain<A>::type...);",
        "};",
    ]
    for function in functions:
        lines.append(
            f"static_assert(std::is_same_v<Signature<decltype(::{function})>::type, "
            f'decltype(npc::acl::Api::{function})>, "{function}");'
        )
    for ours, theirs in [
        ("MallocPolicy", "aclrtMemMallocPolicy"),
        ("MemcpyKind", "aclrtMemcpyKind"),
        ("MemAttr", "aclrtMemAttr"),
        ("EventRecordedStatus", "aclrtEventRecordedStatus"),
    ]:
        lines.append(f"static_assert(sizeof(npc::acl::{ours}) == sizeof({theirs}));")
    source = tmp_path / "abi.cpp"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{CSRC}", f"-I{INCLUDE}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
