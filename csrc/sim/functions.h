// The functions of the Ascend runtime that the simulator serves and that return an error code: the one list
// that call counters and injected faults are indexed by. Order is of no meaning to callers; names are.
// Besides these, the library exports aclrtGetSocName and aclGetRecentErrMsg, which return text and cannot
// fail.
#pragma once

#include <cstddef>

namespace npc::sim {

// clang-format off
#define NPC_SIM_FUNCTIONS(X)                                                                          \
  X(aclInit) X(aclFinalize)                                                                           \
  X(aclrtSetDevice) X(aclrtGetDevice) X(aclrtGetDeviceCount) X(aclrtResetDevice)                      \
  X(aclrtSynchronizeDevice) X(aclrtGetMemInfo)                                                        \
  X(aclrtGetCurrentContext) X(aclrtSetCurrentContext) X(aclrtCreateContext) X(aclrtDestroyContext)    \
  X(aclrtMalloc) X(aclrtMallocAlign32) X(aclrtFree) X(aclrtMallocHost) X(aclrtFreeHost)               \
  X(aclrtMemcpy) X(aclrtMemcpyAsync) X(aclrtMemset) X(aclrtMemsetAsync)                               \
  X(aclrtCreateStream) X(aclrtCreateStreamWithConfig) X(aclrtDestroyStream) X(aclrtDestroyStreamForce) \
  X(aclrtSynchronizeStream) X(aclrtStreamWaitEvent) X(aclrtStreamQuery)                               \
  X(aclrtCreateEvent) X(aclrtCreateEventWithFlag) X(aclrtCreateEventExWithFlag) X(aclrtRecordEvent)   \
  X(aclrtResetEvent) X(aclrtQueryEventStatus) X(aclrtSynchronizeEvent) X(aclrtDestroyEvent)
// clang-format on

enum class Function : size_t {
#define NPC_SIM_ENUMERATOR(name) name,
  NPC_SIM_FUNCTIONS(NPC_SIM_ENUMERATOR)
#undef NPC_SIM_ENUMERATOR
};

constexpr const char* kFunctionNames[] = {
#define NPC_SIM_NAME(name) #name,
    NPC_SIM_FUNCTIONS(NPC_SIM_NAME)
#undef NPC_SIM_NAME
};

constexpr size_t kFunctionCount = sizeof(kFunctionNames) / sizeof(kFunctionNames[0]);

inline const char* NameOf(Function function) { return kFunctionNames[static_cast<size_t>(function)]; }

}  // namespace npc::sim
