#include "sim/virtual_memory.h"

#include <algorithm>
#include <iterator>

#include "sim/handle.h"
#include "sim/pages.h"

namespace npc::sim {
namespace {

constexpr size_t kLargestBytes = size_t{1} << 46;  // keeps sums from overflowing

}  // namespace

Status VirtualMemory::Reserve(size_t bytes, size_t alignment, const void* expected, void** base) {
  if (base == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the address in is null");
  if (bytes == 0 || bytes > kLargestBytes) {
    return Fail(acl::kRtParamInvalid, "%zu bytes of address space asked: 1 to %zu", bytes, kLargestBytes);
  }
  if (expected != nullptr)
    return Fail(acl::kRtParamInvalid, "an address is expected (%p): null is needed", expected);
  if ((alignment & (alignment - 1)) != 0) {
    return Fail(acl::kRtParamInvalid, "alignment %zu is no power of two", alignment);
  }
  return memory_.Reserve(RoundUp(bytes, kHugePageBytes), std::max(alignment, kHugePageBytes), base);
}

Status VirtualMemory::ReleaseReserved(void* base) {
  const Reservation* found = memory_.FindReserved(base);
  if (found == nullptr || found->base != reinterpret_cast<uintptr_t>(base)) {
    return Fail(acl::kRtParamInvalid, "%p is no reserved address space", base);
  }
  auto inside = mapped_.lower_bound(found->base);
  if (inside != mapped_.end() && inside->first - found->base < found->bytes) {
    return Fail(acl::kRtParamInvalid, "memory is still mapped in at %p: unmap it first",
                reinterpret_cast<void*>(inside->first));
  }
  memory_.ReleaseReserved(*found);
  return {};
}

Status VirtualMemory::Allocate(int32_t device, size_t bytes, size_t page_bytes, void** handle) {
  if (handle == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the handle in is null");
  if (bytes == 0 || bytes % page_bytes != 0) {
    return Fail(acl::kRtParamInvalid, "%zu bytes asked in pages of %zu: whole pages are needed", bytes,
                page_bytes);
  }
  Status status = memory_.TakeHbm(device, bytes);
  if (!status.ok()) return status;
  *handle = MakeHandle(HandleKind::kPhysical, ++serial_);
  physical_[*handle] = Physical{device, bytes, 0};
  return {};
}

Status VirtualMemory::Free(void* handle) {
  Physical* physical = nullptr;
  Status status = FindPhysical(handle, &physical);
  if (!status.ok()) return status;
  if (physical->at != 0) {
    return Fail(acl::kRtParamInvalid, "%p is mapped in at %p: unmap it first", handle,
                reinterpret_cast<void*>(physical->at));
  }
  memory_.ReturnHbm(physical->device, physical->bytes);
  physical_.erase(handle);
  return {};
}

Status VirtualMemory::Map(void* at, size_t bytes, size_t offset, void* handle) {
  Physical* physical = nullptr;
  Status status = FindPhysical(handle, &physical);
  if (!status.ok()) return status;
  if (offset != 0 || bytes != physical->bytes) {
    return Fail(acl::kRtParamInvalid, "%zu bytes at offset %zu asked of %zu: a handle is mapped whole", bytes,
                offset, physical->bytes);
  }
  if (physical->at != 0) {
    return Fail(acl::kRtParamInvalid, "%p is mapped in at %p already", handle,
                reinterpret_cast<void*>(physical->at));
  }
  uintptr_t address = reinterpret_cast<uintptr_t>(at);
  status = CheckPlace(address, bytes);
  if (status.ok()) status = memory_.MapIn(at, bytes, physical->device);
  if (!status.ok()) return status;
  physical->at = address;
  mapped_[address] = handle;
  return {};
}

Status VirtualMemory::Unmap(void* at) {
  auto found = mapped_.find(reinterpret_cast<uintptr_t>(at));
  if (found == mapped_.end()) return Fail(acl::kRtParamInvalid, "no memory is mapped in at %p", at);
  memory_.MapOut(at);
  physical_.at(found->second).at = 0;
  mapped_.erase(found);
  return {};
}

void VirtualMemory::FreeAllOf(int32_t device) {
  for (auto at = physical_.begin(); at != physical_.end();) {
    auto next = std::next(at);
    if (at->second.device == device) {
      if (at->second.at != 0) Unmap(reinterpret_cast<void*>(at->second.at));
      Free(at->first);
    }
    at = next;
  }
}

Status VirtualMemory::FindPhysical(void* handle, Physical** found) {
  auto at = physical_.find(handle);
  if (at == physical_.end())
    return Fail(acl::kRtParamInvalid, "%p is no live handle of physical memory", handle);
  *found = &at->second;
  return {};
}

// Whether [at, at + bytes) lies in one reservation with nothing mapped in yet.
Status VirtualMemory::CheckPlace(uintptr_t at, size_t bytes) const {
  const Reservation* reservation = memory_.FindReserved(reinterpret_cast<void*>(at));
  bool inside = reservation != nullptr && bytes <= reservation->bytes - (at - reservation->base);
  if (!inside || at % kPageBytes != 0) {
    return Fail(acl::kRtParamInvalid, "the %zu bytes at %p are not pages of reserved address space", bytes,
                reinterpret_cast<void*>(at));
  }
  auto next = mapped_.lower_bound(at);
  bool taken = next != mapped_.end() && next->first - at < bytes;
  if (next != mapped_.begin()) {
    auto [base, handle] = *std::prev(next);
    taken = taken || at - base < physical_.at(handle).bytes;
  }
  if (!taken) return {};
  return Fail(acl::kRtParamInvalid, "something is mapped in already within the %zu bytes at %p", bytes,
              reinterpret_cast<void*>(at));
}

}  // namespace npc::sim
