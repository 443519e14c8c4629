// What every exported function does around its own work. In order:
//   1. in a forked child: 507899, and nothing else (no lock is taken)
//   2. the call is counted and queued work that is due runs
//   3. a fault set on this call: its code
//   4. before aclInit: 100001; without a current context: 107002 (where the function needs them)
//   5. the work itself
// A failure at any step leaves its text for aclGetRecentErrMsg, and nothing else behind. No exception leaves.
#pragma once

#include <exception>
#include <mutex>

#include "sim/functions.h"
#include "sim/state.h"

#define NPC_SIM_API extern "C" __attribute__((visibility("default")))

namespace npc::sim {

enum class Needs { kNothing, kInit, kContext };

struct Call {
  State& state;
  void* context;   // the thread's; null where the function needs none and the thread has none
  int32_t device;  // the context's; kHost without a context

  // The handle a caller means: null is the context's default stream.
  void* StreamOf(void* stream) const;
};

// Steps 2 to 4. The caller holds the mutex.
Status Enter(Function function, Needs needs, Call* call);

// For the synchronising calls that take one. No timeout ever passes: what is queued runs in no time.
Status CheckTimeout(int32_t milliseconds);

// Keeps the text of a failure for this thread; returns the code.
acl::Error Finish(const char* function, const Status& status);

// The text of the thread's last failure; empty before the first.
const char* RecentMessage();

// The calling thread's current context, whether it still exists or not.
void*& CurrentContext();

template <class Work>
acl::Error Guarded(const char* name, Work&& work) {
  if (Forked()) {
    return Finish(name,
                  {acl::kDriverInternalError, "the runtime was initialised before this process was forked"});
  }
  try {
    std::lock_guard<std::mutex> lock(TheState().mutex);
    return Finish(name, work());
  } catch (const std::exception& error) {
    return Finish(name, {acl::kInternalError, error.what()});
  }
}

// Serves one call; `work(const Call&)` returns a Status.
template <class Work>
acl::Error Serve(Function function, Needs needs, Work&& work) {
  return Guarded(NameOf(function), [&] {
    Call call{TheState(), nullptr, kHost};
    Status status = Enter(function, needs, &call);
    return status.ok() ? work(call) : status;
  });
}

}  // namespace npc::sim
