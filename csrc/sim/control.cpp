#include "sim/control.h"

#include <cstring>
#include <string>

#include "sim/call.h"

namespace npc::sim {
namespace {

Status WantPointer(const void* pointer) {
  return pointer != nullptr ? Status{} : Fail(acl::kInvalidParam, "an argument is null");
}

Status CheckConfig(const State& state, const NpcSimConfig& config) {
  if (config.hbm_bytes == 0) return Fail(acl::kInvalidParam, "hbm_bytes is 0");
  if (config.device_count == 0 || config.device_count > kMaxDevices) {
    return Fail(acl::kInvalidParam, "device_count %u is not in [1, %u]", config.device_count, kMaxDevices);
  }
  for (size_t device = 0; device < state.devices.size(); ++device) {
    size_t used = state.memory.devices[device].used_bytes;
    if (config.hbm_bytes < used) {
      return Fail(acl::kInvalidParam, "hbm_bytes %llu is less than the %zu bytes in use on device %zu",
                  static_cast<unsigned long long>(config.hbm_bytes), used, device);
    }
    if (device >= config.device_count && state.InUse(device)) {
      return Fail(acl::kInvalidParam, "device_count %u would take away device %zu, which is in use",
                  config.device_count, device);
    }
  }
  return {};
}

Status FindFunction(const char* name, Function* function) {
  for (size_t i = 0; name != nullptr && i < kFunctionCount; ++i) {
    if (std::strcmp(kFunctionNames[i], name) == 0) {
      *function = static_cast<Function>(i);
      return {};
    }
  }
  return Fail(acl::kInvalidParam, "there is no function '%s' to fail", name != nullptr ? name : "(null)");
}

void AddDevice(const State& state, size_t device, NpcSimMemory* sum) {
  const Hbm& hbm = state.memory.devices[device];
  sum->live_allocations += hbm.allocations;
  sum->live_bytes += hbm.used_bytes;
  sum->peak_bytes += hbm.peak_bytes;
  sum->live_streams += state.timeline.CountStreams(static_cast<int32_t>(device));
  sum->live_events += state.timeline.CountEvents(static_cast<int32_t>(device));
}

NpcSimMemory MemoryOfAll(const State& state) {
  NpcSimMemory sum{};
  for (size_t device = 0; device < state.devices.size(); ++device) AddDevice(state, device, &sum);
  sum.peak_bytes = state.memory.peak_bytes();  // devices need not have peaked at the same time
  sum.live_host_allocations = state.memory.host_allocations();
  return sum;
}

}  // namespace
}  // namespace npc::sim

using namespace npc;
using namespace npc::sim;

// Defined outside the namespace: there the visibility declared in control.h holds.
extern "C" {

int npcSimGetConfig(NpcSimConfig* config) {
  return Guarded("npcSimGetConfig", [=] {
    Status status = WantPointer(config);
    if (!status.ok()) return status;
    const State& state = TheState();
    *config = {state.memory.hbm_bytes, static_cast<uint32_t>(state.devices.size()), state.timeline.max_events,
               state.memory.poison ? 1U : 0U};
    return status;
  });
}

int npcSimSetConfig(const NpcSimConfig* config) {
  return Guarded("npcSimSetConfig", [=] {
    State& state = TheState();
    Status status = WantPointer(config);
    if (status.ok()) status = CheckConfig(state, *config);
    if (!status.ok()) return status;
    state.Resize(config->device_count);
    state.memory.hbm_bytes = config->hbm_bytes;
    state.memory.poison = config->poison != 0;
    state.timeline.max_events = config->max_events;
    return status;
  });
}

int npcSimLateStreams(uint64_t seed, uint32_t within_calls) {
  return Guarded("npcSimLateStreams", [=]() -> Status {
    if (within_calls == 0) return Fail(acl::kInvalidParam, "within_calls is 0");
    TheState().timeline.RunLate(seed, within_calls);
    return {};
  });
}

int npcSimPromptStreams(void) {
  return Guarded("npcSimPromptStreams", []() -> Status {
    TheState().timeline.RunPromptly();
    return {};
  });
}

int npcSimRunStream(void* stream) {
  return Guarded("npcSimRunStream", [=] {
    State& state = TheState();
    const ContextState* context = state.FindContext(CurrentContext());
    if (stream == nullptr && context == nullptr) {
      return Fail(acl::kInvalidParam,
                  "the stream is null, and the thread has no context that has a default one");
    }
    return state.timeline.RunStream(stream != nullptr ? stream : context->default_stream);
  });
}

size_t npcSimFunctionCount(void) { return kFunctionCount; }

const char* npcSimFunctionName(size_t index) {
  return index < kFunctionCount ? kFunctionNames[index] : nullptr;
}

int npcSimAddFault(const char* name, uint64_t call, uint64_t times, int error, uint64_t* id) {
  return Guarded("npcSimAddFault", [=]() -> Status {
    Function function{};
    Status status = FindFunction(name, &function);
    if (!status.ok()) return status;
    if (call == 0) return Fail(acl::kInvalidParam, "call is 0: calls are counted from 1");
    if (error == acl::kSuccess) return Fail(acl::kInvalidParam, "error is 0: a fault needs a code");
    uint64_t added = TheState().faults.Add(function, call, times == 0 ? kForGood : times, error);
    if (id != nullptr) *id = added;
    return {};
  });
}

int npcSimRemoveFault(uint64_t id) {
  return Guarded("npcSimRemoveFault", [=]() -> Status {
    TheState().faults.Remove(id);
    return {};
  });
}

int npcSimClearFaults(void) {
  return Guarded("npcSimClearFaults", []() -> Status {
    TheState().faults.Clear();
    return {};
  });
}

int npcSimGetCounters(uint64_t* calls, size_t count, NpcSimCopies* copies) {
  return Guarded("npcSimGetCounters", [=]() -> Status {
    Status status = WantPointer(calls);
    if (status.ok()) status = WantPointer(copies);
    if (!status.ok()) return status;
    if (count != kFunctionCount) {
      return Fail(acl::kInvalidParam, "room for %zu functions given, there are %zu", count, kFunctionCount);
    }
    const State& state = TheState();
    std::memcpy(calls, state.faults.calls.data(), sizeof(state.faults.calls));
    std::memcpy(copies->copies, state.memory.copies.copies, sizeof(copies->copies));
    std::memcpy(copies->bytes, state.memory.copies.bytes, sizeof(copies->bytes));
    return {};
  });
}

int npcSimResetCounters(void) {
  return Guarded("npcSimResetCounters", []() -> Status {
    State& state = TheState();
    state.faults.calls.fill(0);
    state.memory.copies = {};
    state.memory.ResetPeaks();
    return {};
  });
}

int npcSimGetMemory(int32_t device, NpcSimMemory* memory) {
  return Guarded("npcSimGetMemory", [=]() -> Status {
    const State& state = TheState();
    Status status = WantPointer(memory);
    if (status.ok() && device != kHost) status = state.CheckDevice(device);
    if (!status.ok()) return {acl::kInvalidParam, status.text};
    *memory = {};
    if (device == kHost) {
      *memory = MemoryOfAll(state);
    } else {
      AddDevice(state, static_cast<size_t>(device), memory);
    }
    return {};
  });
}

int npcSimGetViolations(char* text, size_t capacity, size_t* needed) {
  return Guarded("npcSimGetViolations", [=]() -> Status {
    Status status = WantPointer(needed);
    if (status.ok() && capacity > 0) status = WantPointer(text);
    if (!status.ok()) return status;
    std::string all;
    for (const std::string& violation : TheState().timeline.violations) {
      all += all.empty() ? violation : "\n" + violation;
    }
    *needed = all.size() + 1;
    if (capacity >= *needed) std::memcpy(text, all.c_str(), *needed);
    return {};
  });
}

int npcSimClearViolations(void) {
  return Guarded("npcSimClearViolations", []() -> Status {
    TheState().timeline.violations.clear();
    return {};
  });
}

}  // extern "C"
