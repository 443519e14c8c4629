// The part of the Ascend runtime's C interface that this project calls (and that its simulator serves):
// types, constants and prototypes, as published in CANN's acl_base_rt.h and acl_rt.h. No other file declares
// any of them. tests/test_abi.py compiles this header against the vendor's own where that is installed.
//
// Rules of the interface
//   - every call returns 0 (kSuccess) or an error code; aclGetRecentErrMsg() explains the last one of this
//   thread
//   - a thread must have a context (aclrtSetDevice or aclrtSetCurrentContext) before any device call: 107002
//   - a stream belongs to the context it was created in: 107003 from another
//   - sizes are bytes; device pointers are opaque to the host
#pragma once

#include <cstddef>
#include <cstdint>

namespace npc::acl {

using Error = int;
using Stream = void*;
using Event = void*;
using Context = void*;

constexpr Error kSuccess = 0;
constexpr Error kInvalidParam = 100000;
constexpr Error kUninitialized = 100001;
constexpr Error kRepeatInitialize = 100002;
constexpr Error kRtParamInvalid = 107000;
constexpr Error kRtContextNull = 107002;
constexpr Error kRtStreamContext = 107003;
constexpr Error kRtFeatureNotSupported = 207000;
constexpr Error kRtMemoryAllocation = 207001;
constexpr Error kRtDeviceOom = 207018;
constexpr Error kInternalError = 500000;
constexpr Error kDriverInternalError = 507899;

enum MallocPolicy : int {
  kHugeFirst = 0,
  kHugeOnly = 1,
  kNormalOnly = 2,
  kHugeFirstP2p = 3,
  kHugeOnlyP2p = 4,
  kNormalOnlyP2p = 5,
  kHuge1gOnly = 6,
  kHuge1gOnlyP2p = 7,
};

enum MemcpyKind : int {
  kHostToHost = 0,
  kHostToDevice = 1,
  kDeviceToHost = 2,
  kDeviceToDevice = 3,
  kMemcpyDefault = 4,  // the runtime infers the kind from the two pointers
  kHostBufToDevice = 5,
  kInnerDeviceToDevice = 6,
  kInterDeviceToDevice = 7,
};

enum MemAttr : int { kDdrMem = 0, kHbmMem = 1, kHbmMemHuge = 4, kHbmMemNormal = 5 };

enum EventRecordedStatus : int { kEventNotReady = 0, kEventComplete = 1 };
enum EventWaitStatus : int { kEventWaitComplete = 0, kEventWaitNotReady = 1 };
enum StreamStatus : int { kStreamComplete = 0, kStreamNotReady = 1 };

constexpr uint32_t kEventSync = 0x1U;  // aclrtCreateEventExWithFlag: orders streams, can be queried

}  // namespace npc::acl
