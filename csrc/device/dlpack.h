// The DLPack structures (version 0, "dltensor" capsules), as published at dmlc/dlpack: how a plane of the
// pool is shown to torch without compiling against it.
#pragma once

#include <cstdint>

namespace npc::device {

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous, row-major
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

constexpr int32_t kDLCPU = 1;
constexpr int32_t kDLExtDev = 12;  // what torch calls PrivateUse1: an NPU where torch_npu is loaded

}  // namespace npc::device
