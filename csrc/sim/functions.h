// The functions of the Ascend runtime that the simulator has and that return an error code: the one list that
// call counters and injected faults are indexed by. Order is of no meaning to callers; names are.
// Besides these, the library exports what returns no error code, or names no device (api_descriptor.cpp,
// api_profiling.cpp, aclrtGetSocName, aclGetRecentErrMsg, aclGetCompileoptSize).
#pragma once

#include <cstddef>

namespace npc::sim {

// clang-format off
// What would compute: always refused (api_operator.cpp).
#define NPC_SIM_REFUSED_FUNCTIONS(X)                                                                       \
  X(aclopCompileAndExecute) X(aclopSetAttrBool) X(aclopSetAttrDataType) X(aclopSetAttrFloat)               \
  X(aclopSetAttrInt) X(aclopSetAttrListBool) X(aclopSetAttrListFloat) X(aclopSetAttrListInt)               \
  X(aclopSetAttrListListInt) X(aclopSetAttrString)                                                         \
  X(aclrtBinaryLoadFromData) X(aclrtBinaryGetFunction) X(aclrtGetFunctionAddr) X(rtDevBinaryRegister)      \
  X(rtFunctionRegister) X(rtKernelLaunch) X(rtGetC2cCtrlAddr)                                              \
  X(aclmdlInitDump) X(aclmdlSetDump) X(aclmdlFinalizeDump) X(aclrtProcessReport)                           \
  X(aclrtMemExportToShareableHandle) X(aclrtMemImportFromShareableHandle)                                  \
  X(aclrtMemSetPidToShareableHandle)

#define NPC_SIM_FUNCTIONS(X)                                                                               \
  X(aclInit) X(aclFinalize)                                                                                \
  X(aclrtSetDevice) X(aclrtGetDevice) X(aclrtGetDeviceCount) X(aclrtResetDevice) X(aclrtGetMemInfo)        \
  X(aclrtSynchronizeDevice) X(aclrtSynchronizeDeviceWithTimeout) X(aclGetDeviceCapability)                 \
  X(aclrtDeviceGetBareTgid) X(aclrtDeviceCanAccessPeer) X(aclrtDeviceEnablePeerAccess)                     \
  X(aclrtGetCurrentContext) X(aclrtSetCurrentContext) X(aclrtCreateContext) X(aclrtDestroyContext)         \
  X(aclrtGetPrimaryCtxState)                                                                               \
  X(aclrtMalloc) X(aclrtMallocAlign32) X(aclrtFree) X(aclrtMallocHost) X(aclrtFreeHost)                    \
  X(aclrtReserveMemAddress) X(aclrtReleaseMemAddress) X(aclrtMallocPhysical) X(aclrtFreePhysical)          \
  X(aclrtMapMem) X(aclrtUnmapMem)                                                                          \
  X(aclrtMemcpy) X(aclrtMemcpyAsync) X(aclrtMemset) X(aclrtMemsetAsync)                                    \
  X(aclrtCreateStream) X(aclrtCreateStreamWithConfig) X(aclrtDestroyStream) X(aclrtDestroyStreamForce)     \
  X(aclrtSynchronizeStream) X(aclrtSynchronizeStreamWithTimeout) X(aclrtStreamWaitEvent)                   \
  X(aclrtStreamQuery)                                                                                      \
  X(aclrtCreateEvent) X(aclrtCreateEventWithFlag) X(aclrtCreateEventExWithFlag) X(aclrtRecordEvent)        \
  X(aclrtResetEvent) X(aclrtQueryEventStatus) X(aclrtSynchronizeEvent) X(aclrtEventElapsedTime)            \
  X(aclrtDestroyEvent)                                                                                     \
  X(aclrtSetDeviceSatMode) X(aclrtSetOpWaitTimeout) X(aclrtSetOpExecuteTimeOut) X(aclSetCompileopt)        \
  X(aclGetCompileopt) X(aclrtSetSysParamOpt) X(aclrtCtxSetSysParamOpt) X(aclrtGetSysParamOpt)              \
  NPC_SIM_REFUSED_FUNCTIONS(X)
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
