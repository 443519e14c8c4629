#include "sim/state.h"

#include <pthread.h>

#include <atomic>
#include <iterator>
#include <new>

#include "sim/environment.h"
#include "sim/handle.h"

namespace npc::sim {
namespace {

constexpr uint32_t kLateWithinCalls = 8;  // for NPU_PROMPT_CACHE_SIM_LATE_STREAMS

std::atomic<bool> forked{false};

void AfterForkInChild() {
  State& state = TheState();
  if (state.initialized) {
    forked = true;
  } else {
    // Another thread of the parent may have held the mutex, and is not here to release it.
    new (&state.mutex) std::mutex;
  }
}

[[gnu::constructor]] void WatchForks() {
  TheState();
  pthread_atfork(nullptr, nullptr, AfterForkInChild);
}

}  // namespace

State::State() {
  EnvironmentMachine machine;
  environment = ReadEnvironment(&machine);
  Resize(machine.devices);
  memory.hbm_bytes = machine.hbm_bytes;
  timeline.max_events = machine.max_events;
  if (machine.late) timeline.RunLate(machine.late_seed, kLateWithinCalls);
}

State& TheState() {
  static State* state = new State;  // never deleted: see state.h
  return *state;
}

bool Forked() { return forked; }

void State::Resize(size_t device_count) {
  devices.resize(device_count);
  memory.devices.resize(device_count);
}

bool State::InUse(size_t device) const {
  if (memory.devices[device].allocations > 0) return true;
  for (const auto& [handle, context] : contexts_) {
    if (static_cast<size_t>(context.device) == device) return true;
  }
  return false;
}

Status State::CheckDevice(int32_t device) const {
  if (device >= 0 && static_cast<size_t>(device) < devices.size()) return {};
  return Fail(kInvalidDevice, "device %d asked, but there are %zu, counted from 0", device, devices.size());
}

Status State::SetDevice(int32_t device, void** context) {
  Status status = CheckDevice(device);
  if (!status.ok()) return status;
  Device& entry = devices[static_cast<size_t>(device)];
  if (entry.default_context == nullptr) entry.default_context = CreateContext(device, true);
  entry.set_count += 1;
  *context = entry.default_context;
  return {};
}

Status State::ResetDevice(int32_t device) {
  Status status = CheckDevice(device);
  if (!status.ok()) return status;
  Device& entry = devices[static_cast<size_t>(device)];
  if (entry.set_count == 0)
    return Fail(acl::kRtParamInvalid, "device %d is not set: nothing to reset", device);
  entry.set_count -= 1;
  if (entry.set_count > 0) return {};
  for (auto at = contexts_.begin(); at != contexts_.end();) {
    auto next = std::next(at);
    if (at->second.device == device) RemoveContext(at->first);
    at = next;
  }
  entry.default_context = nullptr;
  timeline.DestroyEventsOf(device);
  virtual_memory.FreeAllOf(device);
  memory.FreeAllOf(device);
  return {};
}

void* State::CreateContext(int32_t device, bool is_default) {
  void* context = MakeHandle(HandleKind::kContext, ++last_context_);
  contexts_[context] = ContextState{device, is_default, timeline.CreateStream(context, device, true)};
  return context;
}

Status State::DestroyContext(void* context) {
  const ContextState* state = FindContext(context);
  if (state == nullptr) return Fail(acl::kRtParamInvalid, "%p is no live context", context);
  if (state->is_default) {
    return Fail(acl::kRtParamInvalid, "%p is the default context of device %d: aclrtResetDevice ends it",
                context, state->device);
  }
  RemoveContext(context);
  return {};
}

void State::RemoveContext(void* context) {
  timeline.DestroyStreamsOf(context);
  contexts_.erase(context);
}

void State::Finalize() {
  for (size_t device = 0; device < devices.size(); ++device) {
    devices[device].set_count = 1;
    ResetDevice(static_cast<int32_t>(device));
  }
  memory.FreeAllOf(kHost);
  initialized = false;
  finalized = true;
}

const ContextState* State::FindContext(void* context) const {
  auto at = contexts_.find(context);
  return at == contexts_.end() ? nullptr : &at->second;
}

}  // namespace npc::sim
