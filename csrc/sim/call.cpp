#include "sim/call.h"

#include <cstdio>

namespace npc::sim {
namespace {

// Plain memory, so that calls made while the thread or the process ends find no destroyed object.
thread_local char recent_message[640];
thread_local void* current_context = nullptr;

}  // namespace

void*& CurrentContext() { return current_context; }

const char* RecentMessage() { return recent_message; }

void* Call::StreamOf(void* stream) const {
  return stream != nullptr ? stream : state.FindContext(context)->default_stream;
}

Status Enter(Function function, Needs needs, Call* call) {
  State& state = call->state;
  state.timeline.Tick();
  Status status = state.faults.Count(function);
  if (!status.ok() || needs == Needs::kNothing) return status;
  if (!state.initialized) {
    return {acl::kUninitialized,
            state.environment.ok() ? "aclInit was not called" : "aclInit failed: " + state.environment.text};
  }
  const ContextState* context = state.FindContext(current_context);
  if (context != nullptr) {
    call->context = current_context;
    call->device = context->device;
  } else if (needs == Needs::kContext) {
    return Fail(
        acl::kRtContextNull, "%s: call aclrtSetDevice or aclrtSetCurrentContext in this thread",
        current_context == nullptr ? "the thread has no context" : "the thread's context was destroyed");
  }
  return {};
}

Status CheckTimeout(int32_t milliseconds) {
  if (milliseconds >= -1) return {};
  return Fail(acl::kRtParamInvalid, "a timeout of %d ms asked: -1 (for ever) or more is needed",
              milliseconds);
}

acl::Error Finish(const char* function, const Status& status) {
  if (!status.ok()) {
    std::snprintf(recent_message, sizeof(recent_message), "%s: %s (error %d)", function, status.text.c_str(),
                  status.code);
  }
  return status.code;
}

}  // namespace npc::sim
