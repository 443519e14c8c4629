// The whole simulated machine, one per process: devices, contexts, memory, streams, events, faults.
//
// One mutex guards all of it; every call holds it from entry to return, copies included. The state is never
// destroyed: destructors of other libraries, Python's among them, may still call the runtime while the
// process exits, and no order of static destruction could serve them all.
#pragma once

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sim/faults.h"
#include "sim/memory.h"
#include "sim/timeline.h"
#include "sim/virtual_memory.h"

namespace npc::sim {

constexpr uint32_t kMaxDevices = 1024;
constexpr int kSysParams = 3;  // aclSysParamOpt: 0 to ACL_OPT_STRONG_CONSISTENCY

struct ContextState {
  int32_t device;
  bool is_default;
  void* default_stream;
};

struct Device {
  void* default_context = nullptr;  // null while no aclrtSetDevice is in force
  uint64_t set_count = 0;           // aclrtSetDevice calls not yet undone by aclrtResetDevice
};

class State {
 public:
  std::mutex mutex;
  Status environment;  // what is wrong with the variables that the machine is made by
  bool initialized = false;
  bool finalized = false;
  Memory memory;
  VirtualMemory virtual_memory{memory};
  Timeline timeline{memory};
  Faults faults;
  std::vector<Device> devices;
  std::array<int64_t, kSysParams> sys_params{};  // aclrtSetSysParamOpt
  std::map<int, std::string> compile_options;    // aclSetCompileopt, by aclCompileOpt

  State();  // as the environment says: see control.h
  void Resize(size_t device_count);
  bool InUse(size_t device) const;  // has a context or live memory

  Status CheckDevice(int32_t device) const;
  Status SetDevice(int32_t device, void** context);
  Status ResetDevice(int32_t device);
  void* CreateContext(int32_t device, bool is_default);
  Status DestroyContext(void* context);
  void Finalize();

  const ContextState* FindContext(void* context) const;  // null: no such context, or none any more

 private:
  void RemoveContext(void* context);

  std::map<void*, ContextState> contexts_;
  uint64_t last_context_ = 0;
};

// The process's state.
State& TheState();

// Whether this process was forked from one that had initialised the runtime. Takes no lock.
bool Forked();

}  // namespace npc::sim
