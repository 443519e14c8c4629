// Address space, physical memory, and the one mapped into the other.
#include "sim/call.h"
#include "sim/pages.h"

namespace npc::sim {
namespace {

// aclrtPhysicalMemProp, as acl_rt.h lays it out.
struct PhysicalProperties {
  int handle_type;
  int allocation_type;
  int attribute;  // aclrtMemAttr
  uint32_t device;
  int location_type;
  uint64_t reserved;
};

constexpr int kOnDevice = 1;        // ACL_MEM_LOCATION_TYPE_DEVICE
constexpr int kHuge1g = 10;         // ACL_HBM_MEM_HUGE1G
constexpr uint64_t kPageFlags = 1;  // aclrtReserveMemAddress: 0 normal pages, 1 huge ones

Status PageBytes(int attribute, size_t* bytes) {
  switch (attribute) {
    case acl::kHbmMem:
    case acl::kHbmMemHuge:
      *bytes = kHugePageBytes;
      return {};
    case acl::kHbmMemNormal:
      *bytes = kPageBytes;
      return {};
    case kHuge1g:
      *bytes = size_t{1} << 30;
      return {};
    default:
      return Fail(acl::kRtFeatureNotSupported, "memory attribute %d is none of HBM's", attribute);
  }
}

Status AllocatePhysical(const Call& call, size_t bytes, const PhysicalProperties* properties, void** handle) {
  if (properties == nullptr) return Fail(acl::kInvalidParam, "the properties are null");
  if (properties->location_type != kOnDevice) {
    return Fail(acl::kRtFeatureNotSupported, "location type %d is not a device", properties->location_type);
  }
  size_t page_bytes = 0;
  Status status = PageBytes(properties->attribute, &page_bytes);
  if (status.ok()) status = call.state.CheckDevice(static_cast<int32_t>(properties->device));
  if (!status.ok()) return status;
  return call.state.virtual_memory.Allocate(static_cast<int32_t>(properties->device), bytes, page_bytes,
                                            handle);
}

}  // namespace

// Addresses belong to no device: torch_npu reserves some before it has set one.
NPC_SIM_API acl::Error aclrtReserveMemAddress(void** base, size_t bytes, size_t alignment, void* expected,
                                              uint64_t flags) {
  return Serve(Function::aclrtReserveMemAddress, Needs::kInit, [=](const Call& call) {
    if (flags > kPageFlags) {
      return Fail(acl::kRtParamInvalid, "flags are %llu: 0 or 1", static_cast<unsigned long long>(flags));
    }
    return call.state.virtual_memory.Reserve(bytes, alignment, expected, base);
  });
}

NPC_SIM_API acl::Error aclrtReleaseMemAddress(void* base) {
  return Serve(Function::aclrtReleaseMemAddress, Needs::kInit,
               [=](const Call& call) { return call.state.virtual_memory.ReleaseReserved(base); });
}

NPC_SIM_API acl::Error aclrtMallocPhysical(void** handle, size_t bytes, const PhysicalProperties* properties,
                                           uint64_t flags) {
  return Serve(Function::aclrtMallocPhysical, Needs::kContext, [=](const Call& call) {
    if (flags != 0) return Fail(acl::kRtParamInvalid, "the flags are not 0");
    return AllocatePhysical(call, bytes, properties, handle);
  });
}

NPC_SIM_API acl::Error aclrtFreePhysical(void* handle) {
  return Serve(Function::aclrtFreePhysical, Needs::kContext,
               [=](const Call& call) { return call.state.virtual_memory.Free(handle); });
}

NPC_SIM_API acl::Error aclrtMapMem(void* at, size_t bytes, size_t offset, void* handle, uint64_t flags) {
  return Serve(Function::aclrtMapMem, Needs::kContext, [=](const Call& call) {
    if (flags != 0) return Fail(acl::kRtParamInvalid, "the flags are not 0");
    return call.state.virtual_memory.Map(at, bytes, offset, handle);
  });
}

NPC_SIM_API acl::Error aclrtUnmapMem(void* at) {
  return Serve(Function::aclrtUnmapMem, Needs::kContext,
               [=](const Call& call) { return call.state.virtual_memory.Unmap(at); });
}

}  // namespace npc::sim
