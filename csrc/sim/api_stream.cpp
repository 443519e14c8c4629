// Streams and events.
#include "sim/call.h"

namespace npc::sim {
namespace {

constexpr uint32_t kStreamFlags = 0x3FU;  // every ACL_STREAM_* creation flag of CANN's acl_rt.h
constexpr uint32_t kEventFlags = 0x7BU;   // every ACL_EVENT_* creation flag there

Status CreateStream(const Call& call, acl::Stream* stream, uint32_t flags) {
  if (stream == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the stream in is null");
  if ((flags & ~kStreamFlags) != 0) return Fail(acl::kInvalidParam, "stream flags 0x%x are unknown", flags);
  *stream = call.state.timeline.CreateStream(call.context, call.device, false);
  return {};
}

Status CreateEvent(const Call& call, acl::Event* event, uint32_t flags, bool outlives) {
  if (event == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the event in is null");
  if (flags == 0 || (flags & ~kEventFlags) != 0) {
    return Fail(acl::kInvalidParam, "event flags 0x%x are none or unknown", flags);
  }
  return call.state.timeline.CreateEvent(call.device, outlives, event);
}

}  // namespace

NPC_SIM_API acl::Error aclrtCreateStream(acl::Stream* stream) {
  return Serve(Function::aclrtCreateStream, Needs::kContext,
               [=](const Call& call) { return CreateStream(call, stream, 0); });
}

NPC_SIM_API acl::Error aclrtCreateStreamWithConfig(acl::Stream* stream, uint32_t, uint32_t flags) {
  return Serve(Function::aclrtCreateStreamWithConfig, Needs::kContext,
               [=](const Call& call) { return CreateStream(call, stream, flags); });
}

NPC_SIM_API acl::Error aclrtDestroyStream(acl::Stream stream) {
  return Serve(Function::aclrtDestroyStream, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.DestroyStream(stream, call.context, false);
  });
}

NPC_SIM_API acl::Error aclrtDestroyStreamForce(acl::Stream stream) {
  return Serve(Function::aclrtDestroyStreamForce, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.DestroyStream(stream, call.context, true);
  });
}

NPC_SIM_API acl::Error aclrtSynchronizeStream(acl::Stream stream) {
  return Serve(Function::aclrtSynchronizeStream, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.Synchronize(call.StreamOf(stream), call.context);
  });
}

NPC_SIM_API acl::Error aclrtSynchronizeStreamWithTimeout(acl::Stream stream, int32_t timeout_ms) {
  return Serve(Function::aclrtSynchronizeStreamWithTimeout, Needs::kContext, [=](const Call& call) {
    Status status = CheckTimeout(timeout_ms);
    return status.ok() ? call.state.timeline.Synchronize(call.StreamOf(stream), call.context) : status;
  });
}

NPC_SIM_API acl::Error aclrtStreamQuery(acl::Stream stream, int* status) {
  return Serve(Function::aclrtStreamQuery, Needs::kContext, [=](const Call& call) {
    if (status == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the status in is null");
    bool idle = false;
    Status result = call.state.timeline.QueryStream(call.StreamOf(stream), call.context, &idle);
    if (result.ok()) *status = idle ? acl::kStreamComplete : acl::kStreamNotReady;
    return result;
  });
}

NPC_SIM_API acl::Error aclrtStreamWaitEvent(acl::Stream stream, acl::Event event) {
  return Serve(Function::aclrtStreamWaitEvent, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.Wait(event, call.StreamOf(stream), call.context);
  });
}

NPC_SIM_API acl::Error aclrtCreateEvent(acl::Event* event) {
  return Serve(Function::aclrtCreateEvent, Needs::kContext,
               [=](const Call& call) { return CreateEvent(call, event, acl::kEventSync, false); });
}

NPC_SIM_API acl::Error aclrtCreateEventWithFlag(acl::Event* event, uint32_t flags) {
  return Serve(Function::aclrtCreateEventWithFlag, Needs::kContext,
               [=](const Call& call) { return CreateEvent(call, event, flags, false); });
}

// The kind that may be destroyed before what is queued on it has run.
NPC_SIM_API acl::Error aclrtCreateEventExWithFlag(acl::Event* event, uint32_t flags) {
  return Serve(Function::aclrtCreateEventExWithFlag, Needs::kContext,
               [=](const Call& call) { return CreateEvent(call, event, flags, true); });
}

NPC_SIM_API acl::Error aclrtRecordEvent(acl::Event event, acl::Stream stream) {
  return Serve(Function::aclrtRecordEvent, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.Record(event, call.StreamOf(stream), call.context);
  });
}

NPC_SIM_API acl::Error aclrtResetEvent(acl::Event event, acl::Stream stream) {
  return Serve(Function::aclrtResetEvent, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.Reset(event, call.StreamOf(stream), call.context);
  });
}

NPC_SIM_API acl::Error aclrtQueryEventStatus(acl::Event event, int* status) {
  return Serve(Function::aclrtQueryEventStatus, Needs::kContext, [=](const Call& call) {
    if (status == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the status in is null");
    bool complete = false;
    Status result = call.state.timeline.QueryEvent(event, &complete);
    if (result.ok()) *status = complete ? acl::kEventComplete : acl::kEventNotReady;
    return result;
  });
}

NPC_SIM_API acl::Error aclrtSynchronizeEvent(acl::Event event) {
  return Serve(Function::aclrtSynchronizeEvent, Needs::kContext,
               [=](const Call& call) { return call.state.timeline.SynchronizeEvent(event); });
}

NPC_SIM_API acl::Error aclrtEventElapsedTime(float* milliseconds, acl::Event start, acl::Event end) {
  return Serve(Function::aclrtEventElapsedTime, Needs::kContext, [=](const Call& call) {
    if (milliseconds == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the time in is null");
    return call.state.timeline.ElapsedTime(start, end, milliseconds);
  });
}

NPC_SIM_API acl::Error aclrtDestroyEvent(acl::Event event) {
  return Serve(Function::aclrtDestroyEvent, Needs::kContext,
               [=](const Call& call) { return call.state.timeline.DestroyEvent(event); });
}

}  // namespace npc::sim
