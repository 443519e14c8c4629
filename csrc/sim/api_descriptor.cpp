// Descriptors that a program fills in before it asks for an operator: plain records that belong to the
// caller. They name no device and take no lock. The attributes of an operator are not kept: no operator ever
// runs.
#include <cstdint>
#include <string>
#include <vector>

#include "sim/call.h"

namespace npc::sim {
namespace {

struct TensorDescriptor {
  int type;  // aclDataType
  std::vector<int64_t> dims;
  int format;  // aclFormat
};

constexpr int kUndefined = -1;  // ACL_DT_UNDEFINED and ACL_FORMAT_UNDEFINED

acl::Error CheckDescriptor(const char* function, const void* descriptor) {
  if (descriptor != nullptr) return acl::kSuccess;
  return Finish(function, Fail(acl::kInvalidParam, "the descriptor is null"));
}

}  // namespace

NPC_SIM_API void* aclCreateTensorDesc(int type, int count, const int64_t* dims, int format) {
  if (count < 0 || (count > 0 && dims == nullptr)) return nullptr;
  return new TensorDescriptor{type, std::vector<int64_t>(dims, dims + count), format};
}

NPC_SIM_API void aclDestroyTensorDesc(const void* descriptor) {
  delete static_cast<const TensorDescriptor*>(descriptor);
}

NPC_SIM_API size_t aclGetTensorDescNumDims(const void* descriptor) {
  return descriptor == nullptr ? 0 : static_cast<const TensorDescriptor*>(descriptor)->dims.size();
}

NPC_SIM_API acl::Error aclGetTensorDescDimV2(const void* descriptor, size_t index, int64_t* size) {
  acl::Error code = CheckDescriptor("aclGetTensorDescDimV2", descriptor);
  if (code != acl::kSuccess) return code;
  const auto& dims = static_cast<const TensorDescriptor*>(descriptor)->dims;
  if (index >= dims.size() || size == nullptr) {
    return Finish("aclGetTensorDescDimV2",
                  Fail(acl::kInvalidParam, "dimension %zu asked, there are %zu", index, dims.size()));
  }
  *size = dims[index];
  return acl::kSuccess;
}

NPC_SIM_API int aclGetTensorDescFormat(const void* descriptor) {
  return descriptor == nullptr ? kUndefined : static_cast<const TensorDescriptor*>(descriptor)->format;
}

NPC_SIM_API int aclGetTensorDescType(const void* descriptor) {
  return descriptor == nullptr ? kUndefined : static_cast<const TensorDescriptor*>(descriptor)->type;
}

NPC_SIM_API void aclSetTensorDescName(void*, const char*) {}

// Of the storage, which no getter reads; the tensor's own stay as they were given.
NPC_SIM_API acl::Error aclSetTensorFormat(void* descriptor, int) {
  return CheckDescriptor("aclSetTensorFormat", descriptor);
}

NPC_SIM_API acl::Error aclSetTensorShape(void* descriptor, int, const int64_t*) {
  return CheckDescriptor("aclSetTensorShape", descriptor);
}

NPC_SIM_API acl::Error aclSetTensorPlaceMent(void* descriptor, int) {
  return CheckDescriptor("aclSetTensorPlaceMent", descriptor);
}

struct DataBuffer {
  void* data;
  size_t bytes;
};

NPC_SIM_API void* aclCreateDataBuffer(void* data, size_t bytes) { return new DataBuffer{data, bytes}; }

NPC_SIM_API acl::Error aclDestroyDataBuffer(const void* buffer) {
  delete static_cast<const DataBuffer*>(buffer);
  return acl::kSuccess;
}

// There are no attributes: null is what a failed creation returns.
NPC_SIM_API void* aclopCreateAttr() { return nullptr; }

NPC_SIM_API void aclopDestroyAttr(const void*) {}

}  // namespace npc::sim
