// Device and host memory, copies and fills.
#include "sim/call.h"

namespace npc::sim {
namespace {

constexpr size_t kPadding = 32;  // what aclrtMalloc adds on A2/A3

}  // namespace

NPC_SIM_API acl::Error aclrtMalloc(void** base, size_t bytes, int policy) {
  return Serve(Function::aclrtMalloc, Needs::kContext, [=](const Call& call) {
    return call.state.memory.Allocate(call.device, bytes, policy, kPadding, base);
  });
}

NPC_SIM_API acl::Error aclrtMallocAlign32(void** base, size_t bytes, int policy) {
  return Serve(Function::aclrtMallocAlign32, Needs::kContext, [=](const Call& call) {
    return call.state.memory.Allocate(call.device, bytes, policy, 0, base);
  });
}

// Frees at once, whatever is still queued: as the real one, which does not wait for the device either.
NPC_SIM_API acl::Error aclrtFree(void* base) {
  return Serve(Function::aclrtFree, Needs::kContext,
               [=](const Call& call) { return call.state.memory.Free(base); });
}

NPC_SIM_API acl::Error aclrtMallocHost(void** base, size_t bytes) {
  return Serve(Function::aclrtMallocHost, Needs::kContext,
               [=](const Call& call) { return call.state.memory.AllocateHost(bytes, base); });
}

NPC_SIM_API acl::Error aclrtFreeHost(void* base) {
  return Serve(Function::aclrtFreeHost, Needs::kContext,
               [=](const Call& call) { return call.state.memory.FreeHost(base); });
}

// Not ordered with any stream: it overtakes what is queued.
NPC_SIM_API acl::Error aclrtMemcpy(void* dst, size_t dst_bytes, const void* src, size_t bytes, int kind) {
  return Serve(Function::aclrtMemcpy, Needs::kContext, [=](const Call& call) {
    return call.state.memory.RunCopy({dst, dst_bytes, src, bytes, kind}, false);
  });
}

NPC_SIM_API acl::Error aclrtMemcpyAsync(void* dst, size_t dst_bytes, const void* src, size_t bytes, int kind,
                                        acl::Stream stream) {
  return Serve(Function::aclrtMemcpyAsync, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.SubmitCopy(call.StreamOf(stream), call.context,
                                          {dst, dst_bytes, src, bytes, kind});
  });
}

NPC_SIM_API acl::Error aclrtMemset(void* dst, size_t dst_bytes, int32_t value, size_t bytes) {
  return Serve(Function::aclrtMemset, Needs::kContext,
               [=](const Call& call) { return call.state.memory.RunFill({dst, dst_bytes, value, bytes}); });
}

NPC_SIM_API acl::Error aclrtMemsetAsync(void* dst, size_t dst_bytes, int32_t value, size_t bytes,
                                        acl::Stream stream) {
  return Serve(Function::aclrtMemsetAsync, Needs::kContext, [=](const Call& call) {
    return call.state.timeline.SubmitFill(call.StreamOf(stream), call.context,
                                          {dst, dst_bytes, value, bytes});
  });
}

}  // namespace npc::sim
