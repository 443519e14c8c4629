// Address space and the memory behind it, apart: a program reserves addresses, allocates HBM that has none,
// and maps the one into the other. torch_npu's expandable segments live on it.
//
//   - HBM of a handle is taken in whole pages when it is allocated, wherever it is mapped
//   - a handle is mapped whole and at one place at a time; what it held is gone when it is mapped again
//   (where
//     poison is on, it shows)
//   - a handle that is mapped cannot be freed, and addresses that something is mapped at cannot be released
// Not thread-safe: the State's mutex guards it.
#pragma once

#include <cstdint>
#include <map>

#include "sim/memory.h"

namespace npc::sim {

class VirtualMemory {
 public:
  explicit VirtualMemory(Memory& memory) : memory_(memory) {}

  Status Reserve(size_t bytes, size_t alignment, const void* expected, void** base);
  Status ReleaseReserved(void* base);
  Status Allocate(int32_t device, size_t bytes, size_t page_bytes, void** handle);
  Status Free(void* handle);
  Status Map(void* at, size_t bytes, size_t offset, void* handle);
  Status Unmap(void* at);
  void FreeAllOf(int32_t device);  // maps out first

 private:
  struct Physical {
    int32_t device;
    size_t bytes;
    uintptr_t at;  // where it is mapped; 0: nowhere
  };

  Status FindPhysical(void* handle, Physical** found);
  Status CheckPlace(uintptr_t at, size_t bytes) const;

  Memory& memory_;
  std::map<void*, Physical> physical_;  // by handle
  std::map<uintptr_t, void*> mapped_;   // address to handle
  uint64_t serial_ = 0;                 // of the last handle
};

}  // namespace npc::sim
