// The runtime, devices and contexts.
#include <unistd.h>

#include "sim/call.h"

namespace npc::sim {
namespace {

constexpr char kSocName[] = "Ascend910B1";
// aclDeviceInfo: cube cores, vector cores, bytes of L2 cache, of that part.
constexpr int64_t kCapabilities[] = {24, 48, int64_t{192} << 20};
constexpr int kCapabilityCount = 3;

Status WantPointer(const void* pointer) {
  return pointer != nullptr ? Status{}
                            : Fail(acl::kInvalidParam, "the pointer to return the result in is null");
}

}  // namespace

NPC_SIM_API acl::Error aclInit(const char*) {
  return Serve(Function::aclInit, Needs::kNothing, [](const Call& call) -> Status {
    if (!call.state.environment.ok()) return call.state.environment;
    if (call.state.initialized) return Fail(acl::kRepeatInitialize, "the runtime is initialised already");
    call.state.initialized = true;
    return {};
  });
}

NPC_SIM_API acl::Error aclFinalize() {
  return Serve(Function::aclFinalize, Needs::kNothing, [](const Call& call) -> Status {
    if (!call.state.initialized && call.state.finalized) return Fail(kRepeatFinalize, "finalised already");
    if (!call.state.initialized) return Fail(acl::kUninitialized, "aclInit was not called");
    call.state.Finalize();
    return {};
  });
}

// Can be asked before aclInit: programs do, to find out whether there is a device at all.
NPC_SIM_API acl::Error aclrtGetDeviceCount(uint32_t* count) {
  return Serve(Function::aclrtGetDeviceCount, Needs::kNothing, [=](const Call& call) {
    Status status = WantPointer(count);
    if (status.ok()) status = call.state.environment;
    if (status.ok()) *count = static_cast<uint32_t>(call.state.devices.size());
    return status;
  });
}

NPC_SIM_API acl::Error aclrtSetDevice(int32_t device) {
  return Serve(Function::aclrtSetDevice, Needs::kInit,
               [=](const Call& call) { return call.state.SetDevice(device, &CurrentContext()); });
}

NPC_SIM_API acl::Error aclrtGetDevice(int32_t* device) {
  return Serve(Function::aclrtGetDevice, Needs::kContext, [=](const Call& call) {
    Status status = WantPointer(device);
    if (status.ok()) *device = call.device;
    return status;
  });
}

NPC_SIM_API acl::Error aclrtResetDevice(int32_t device) {
  return Serve(Function::aclrtResetDevice, Needs::kInit,
               [=](const Call& call) { return call.state.ResetDevice(device); });
}

NPC_SIM_API acl::Error aclrtSynchronizeDevice() {
  return Serve(Function::aclrtSynchronizeDevice, Needs::kContext,
               [](const Call& call) { return call.state.timeline.SynchronizeDevice(call.device); });
}

NPC_SIM_API acl::Error aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  return Serve(Function::aclrtSynchronizeDeviceWithTimeout, Needs::kContext, [=](const Call& call) {
    Status status = CheckTimeout(timeout_ms);
    return status.ok() ? call.state.timeline.SynchronizeDevice(call.device) : status;
  });
}

NPC_SIM_API acl::Error aclrtGetMemInfo(int attr, size_t* free_bytes, size_t* total_bytes) {
  return Serve(Function::aclrtGetMemInfo, Needs::kContext, [=](const Call& call) {
    Status status = WantPointer(free_bytes);
    if (status.ok()) status = WantPointer(total_bytes);
    if (!status.ok()) return status;
    bool hbm = attr == acl::kHbmMem || attr == acl::kHbmMemHuge || attr == acl::kHbmMemNormal;
    const Memory& memory = call.state.memory;
    *total_bytes = hbm ? memory.hbm_bytes : 0;
    *free_bytes = hbm ? memory.hbm_bytes - memory.devices[static_cast<size_t>(call.device)].used_bytes : 0;
    return status;
  });
}

NPC_SIM_API acl::Error aclrtGetCurrentContext(acl::Context* context) {
  return Serve(Function::aclrtGetCurrentContext, Needs::kContext, [=](const Call& call) {
    Status status = WantPointer(context);
    if (status.ok()) *context = call.context;
    return status;
  });
}

NPC_SIM_API acl::Error aclrtSetCurrentContext(acl::Context context) {
  return Serve(Function::aclrtSetCurrentContext, Needs::kInit, [=](const Call& call) -> Status {
    if (context == nullptr) return Fail(acl::kInvalidParam, "the context is null");
    if (call.state.FindContext(context) == nullptr) {
      return Fail(acl::kRtParamInvalid, "%p is no live context", context);
    }
    CurrentContext() = context;
    return {};
  });
}

NPC_SIM_API acl::Error aclrtCreateContext(acl::Context* context, int32_t device) {
  return Serve(Function::aclrtCreateContext, Needs::kInit, [=](const Call& call) {
    Status status = WantPointer(context);
    if (status.ok()) status = call.state.CheckDevice(device);
    if (status.ok()) *context = CurrentContext() = call.state.CreateContext(device, false);
    return status;
  });
}

NPC_SIM_API acl::Error aclrtDestroyContext(acl::Context context) {
  return Serve(Function::aclrtDestroyContext, Needs::kInit,
               [=](const Call& call) { return call.state.DestroyContext(context); });
}

// Active from the first aclrtSetDevice to the aclrtResetDevice that undoes the last.
NPC_SIM_API acl::Error aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  return Serve(Function::aclrtGetPrimaryCtxState, Needs::kInit, [=](const Call& call) {
    Status status = WantPointer(active);
    if (status.ok()) status = call.state.CheckDevice(device);
    if (!status.ok()) return status;
    if (flags != nullptr) return Fail(acl::kInvalidParam, "flags is not null: it is reserved");
    *active = call.state.devices[static_cast<size_t>(device)].default_context != nullptr ? 1 : 0;
    return status;
  });
}

NPC_SIM_API acl::Error aclGetDeviceCapability(uint32_t device, int what, int64_t* value) {
  return Serve(Function::aclGetDeviceCapability, Needs::kInit, [=](const Call& call) -> Status {
    Status status = WantPointer(value);
    if (status.ok()) status = call.state.CheckDevice(static_cast<int32_t>(device));
    if (!status.ok()) return status;
    if (what < 0 || what >= kCapabilityCount) {
      return Fail(acl::kInvalidParam, "capability %d is none of 0 to %d", what, kCapabilityCount - 1);
    }
    *value = kCapabilities[what];
    return {};
  });
}

// Every device reaches every other one: copies between devices need no more than the two addresses.
NPC_SIM_API acl::Error aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  return Serve(Function::aclrtDeviceCanAccessPeer, Needs::kInit, [=](const Call& call) {
    Status status = WantPointer(can);
    if (status.ok()) status = call.state.CheckDevice(device);
    if (status.ok()) status = call.state.CheckDevice(peer);
    if (status.ok()) *can = device != peer ? 1 : 0;
    return status;
  });
}

NPC_SIM_API acl::Error aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
  return Serve(Function::aclrtDeviceEnablePeerAccess, Needs::kContext, [=](const Call& call) {
    if (flags != 0) return Fail(acl::kInvalidParam, "flags are 0x%x, which have to be 0", flags);
    return call.state.CheckDevice(peer);
  });
}

NPC_SIM_API acl::Error aclrtDeviceGetBareTgid(int32_t* process) {
  return Serve(Function::aclrtDeviceGetBareTgid, Needs::kInit, [=](const Call&) {
    Status status = WantPointer(process);
    if (status.ok()) *process = getpid();
    return status;
  });
}

NPC_SIM_API const char* aclrtGetSocName() { return kSocName; }

NPC_SIM_API const char* aclGetRecentErrMsg() { return RecentMessage(); }

}  // namespace npc::sim
