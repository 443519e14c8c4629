#include "sim/memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "sim/pages.h"

namespace npc::sim {
namespace {

constexpr size_t kGigaPageBytes = size_t{1} << 30;
constexpr size_t kSmallBytes = size_t{1} << 20;    // up to here HUGE_FIRST takes 4 KiB pages
constexpr size_t kLargestBytes = size_t{1} << 46;  // keeps every sum below from overflowing
constexpr uintptr_t kAsyncAlignment = 64;

size_t PageBytes(int policy, size_t bytes) {
  switch (policy) {
    case acl::kHugeFirst:
    case acl::kHugeFirstP2p:
      return bytes <= kSmallBytes ? kPageBytes : kHugePageBytes;
    case acl::kHugeOnly:
    case acl::kHugeOnlyP2p:
      return kHugePageBytes;
    case acl::kHuge1gOnly:
    case acl::kHuge1gOnlyP2p:
      return kGigaPageBytes;
    default:
      return kPageBytes;
  }
}

bool MayFallBack(int policy) { return policy == acl::kHugeFirst || policy == acl::kHugeFirstP2p; }

const char* PlaceName(int32_t device) { return device == kHost ? "host" : "device"; }

// What the caller says of the two ends. `fixed` is false where the runtime is to find out.
struct Ends {
  bool fixed;
  bool dst_on_device;
  bool src_on_device;
};

Status EndsOf(int kind, Ends* ends) {
  switch (kind) {
    case acl::kHostToHost:
      *ends = {true, false, false};
      return {};
    case acl::kHostToDevice:
    case acl::kHostBufToDevice:
      *ends = {true, true, false};
      return {};
    case acl::kDeviceToHost:
      *ends = {true, false, true};
      return {};
    case acl::kDeviceToDevice:
    case acl::kInnerDeviceToDevice:
    case acl::kInterDeviceToDevice:
      *ends = {true, true, true};
      return {};
    case acl::kMemcpyDefault:
      *ends = {false, false, false};
      return {};
    default:
      return Fail(acl::kInvalidParam, "copy kind %d is none of 0 to 7", kind);
  }
}

Status CheckEnds(const Copy& copy, const Ends& ends, int32_t dst_device, int32_t src_device) {
  auto right = [&](bool on_device, int32_t device) { return !ends.fixed || on_device == (device != kHost); };
  if (!right(ends.dst_on_device, dst_device)) {
    return Fail(acl::kRtParamInvalid, "dst %p is %s memory, but copy kind %d wants %s memory", copy.dst,
                PlaceName(dst_device), copy.kind, ends.dst_on_device ? "device" : "host");
  }
  if (!right(ends.src_on_device, src_device)) {
    return Fail(acl::kRtParamInvalid, "src %p is %s memory, but copy kind %d wants %s memory", copy.src,
                PlaceName(src_device), copy.kind, ends.src_on_device ? "device" : "host");
  }
  bool same = dst_device == src_device;
  if ((copy.kind == acl::kInnerDeviceToDevice && !same) || (copy.kind == acl::kInterDeviceToDevice && same)) {
    return Fail(acl::kRtParamInvalid, "copy kind %d does not fit a copy from device %d to device %d",
                copy.kind, src_device, dst_device);
  }
  return {};
}

Status CheckOverlap(const Copy& copy) {
  uintptr_t dst = reinterpret_cast<uintptr_t>(copy.dst);
  uintptr_t src = reinterpret_cast<uintptr_t>(copy.src);
  uintptr_t distance = dst > src ? dst - src : src - dst;
  if (distance >= copy.bytes) return {};
  return Fail(acl::kRtParamInvalid, "dst %p and src %p overlap: they lie %zu bytes apart, the copy is of %zu",
              copy.dst, copy.src, static_cast<size_t>(distance), copy.bytes);
}

Status CheckAlignment(const Copy& copy) {
  uintptr_t dst = reinterpret_cast<uintptr_t>(copy.dst);
  uintptr_t src = reinterpret_cast<uintptr_t>(copy.src);
  if (dst % kAsyncAlignment == 0 && src % kAsyncAlignment == 0) return {};
  return Fail(kAddressUnaligned,
              "an asynchronous device-to-device copy wants both ends 64-byte aligned; dst %p, src %p",
              copy.dst, copy.src);
}

Status CheckSizes(const void* dst, size_t dst_bytes, size_t bytes) {
  if (dst == nullptr) return Fail(acl::kInvalidParam, "dst is null");
  if (bytes == 0) return Fail(acl::kRtParamInvalid, "the size is 0");
  if (dst_bytes < bytes) {
    return Fail(acl::kRtParamInvalid, "%zu bytes asked, but dst is said to hold %zu", bytes, dst_bytes);
  }
  return {};
}

}  // namespace

Status Memory::Allocate(int32_t device, size_t bytes, int policy, size_t padding, void** base) {
  if (base == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the address in is null");
  if (bytes == 0) return Fail(acl::kInvalidParam, "the size is 0");
  if (policy < acl::kHugeFirst || policy > acl::kHuge1gOnlyP2p) {
    return Fail(acl::kInvalidParam, "memory policy %d is none of 0 to 7", policy);
  }
  const Hbm& hbm = devices[static_cast<size_t>(device)];
  size_t free_bytes = hbm_bytes - hbm.used_bytes;
  size_t page = PageBytes(policy, bytes);
  size_t padded = bytes > kLargestBytes ? kLargestBytes : RoundUp(bytes, 32) + padding;
  if (RoundUp(padded, page) > free_bytes && MayFallBack(policy)) page = kPageBytes;
  size_t taken = RoundUp(padded, page);
  if (bytes > kLargestBytes || taken > free_bytes) {
    return Fail(acl::kRtMemoryAllocation,
                "%zu bytes asked (%zu in pages of %zu), but device %d has %zu of %zu bytes of HBM free",
                bytes, taken, page, device, free_bytes, hbm_bytes);
  }
  Status status = Map({0, bytes, taken, taken, device, true, false}, std::min(page, kHugePageBytes), base);
  if (status.ok()) status = TakeHbm(device, taken);
  return status;
}

Status Memory::TakeHbm(int32_t device, size_t bytes) {
  Hbm& hbm = devices[static_cast<size_t>(device)];
  if (bytes > hbm_bytes - hbm.used_bytes) {
    return Fail(acl::kRtMemoryAllocation, "%zu bytes asked, but device %d has %zu of %zu bytes of HBM free",
                bytes, device, hbm_bytes - hbm.used_bytes, hbm_bytes);
  }
  hbm.used_bytes += bytes;
  hbm.peak_bytes = std::max(hbm.peak_bytes, hbm.used_bytes);
  hbm.allocations += 1;
  used_bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, used_bytes_);
  return {};
}

void Memory::ReturnHbm(int32_t device, size_t bytes) {
  Hbm& hbm = devices[static_cast<size_t>(device)];
  hbm.used_bytes -= bytes;
  hbm.allocations -= 1;
  used_bytes_ -= bytes;
}

Status Memory::AllocateHost(size_t bytes, void** base) {
  if (base == nullptr) return Fail(acl::kInvalidParam, "the pointer to return the address in is null");
  if (bytes == 0) return Fail(acl::kInvalidParam, "the size is 0");
  if (bytes > kLargestBytes) return Fail(acl::kRtMemoryAllocation, "%zu bytes of host memory asked", bytes);
  Status status = Map({0, bytes, RoundUp(bytes, kPageBytes), 0, kHost, true, false}, kPageBytes, base);
  if (status.ok()) host_allocations_ += 1;
  return status;
}

Status Memory::Map(Region region, size_t alignment, void** base) {
  void* at = ReservePages(region.mapped, alignment, poison);
  if (at == nullptr) {
    return Fail(acl::kRtMemoryAllocation, "this machine has no %zu bytes of address space left for %s memory",
                region.mapped, PlaceName(region.device));
  }
  region.base = reinterpret_cast<uintptr_t>(at);
  regions_[region.base] = region;
  *base = at;
  return {};
}

Status Memory::Free(void* base) {
  Region* region = nullptr;
  Status status = FindToFree(base, false, &region);
  if (status.ok()) Release(*region);
  return status;
}

Status Memory::FreeHost(void* base) {
  Region* region = nullptr;
  Status status = FindToFree(base, true, &region);
  if (status.ok()) Release(*region);
  return status;
}

Status Memory::FindToFree(void* base, bool host, Region** found) {
  if (base == nullptr) return Fail(acl::kInvalidParam, "the address is null");
  const Region* region = Find(base);
  if (region == nullptr) {
    return Fail(acl::kRtParamInvalid, "foreign free: %p was never allocated by this runtime", base);
  }
  if ((region->device == kHost) != host) {
    return Fail(acl::kRtParamInvalid, "%p is %s memory: %s frees it", base, PlaceName(region->device),
                host ? "aclrtFree" : "aclrtFreeHost");
  }
  if (region->mapped_in) return Fail(acl::kRtParamInvalid, "%p is mapped in: aclrtUnmapMem ends that", base);
  if (!region->live) return Fail(acl::kRtParamInvalid, "double free: %p was freed before", base);
  if (region->base != reinterpret_cast<uintptr_t>(base)) {
    return Fail(acl::kRtParamInvalid, "%p is inside the allocation at %p, not its start", base,
                reinterpret_cast<void*>(region->base));
  }
  *found = &regions_.find(region->base)->second;
  return {};
}

void Memory::Release(Region& region) {
  ReleasePages(reinterpret_cast<void*>(region.base), region.mapped);
  region.live = false;
  if (region.device == kHost) {
    host_allocations_ -= 1;
    return;
  }
  ReturnHbm(region.device, region.hbm_bytes);
}

void Memory::FreeAllOf(int32_t device) {
  for (auto& [base, region] : regions_) {
    if (region.live && region.device == device) Release(region);
  }
}

Status Memory::Reserve(size_t bytes, size_t alignment, void** base) {
  void* at = ReserveAddresses(bytes, alignment);
  if (at == nullptr) {
    return Fail(acl::kRtMemoryAllocation, "this machine has no %zu bytes of address space left", bytes);
  }
  uintptr_t address = reinterpret_cast<uintptr_t>(at);
  reserved_[address] = Reservation{address, bytes};
  *base = at;
  return {};
}

void Memory::ReleaseReserved(const Reservation& reservation) { reserved_.erase(reservation.base); }

const Reservation* Memory::FindReserved(const void* address) const {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  auto after = reserved_.upper_bound(at);
  if (after == reserved_.begin()) return nullptr;
  const Reservation& reservation = std::prev(after)->second;
  return at - reservation.base < reservation.bytes ? &reservation : nullptr;
}

Status Memory::MapIn(void* base, size_t bytes, int32_t device) {
  if (!BackPages(base, bytes, poison)) {
    return Fail(acl::kRtMemoryAllocation, "this machine cannot map %zu bytes at %p", bytes, base);
  }
  uintptr_t at = reinterpret_cast<uintptr_t>(base);
  regions_[at] = Region{at, bytes, bytes, 0, device, true, true};
  return {};
}

void Memory::MapOut(void* base) {
  auto at = regions_.find(reinterpret_cast<uintptr_t>(base));
  ReleasePages(base, at->second.mapped);
  regions_.erase(at);
}

void Memory::ResetPeaks() {
  peak_bytes_ = used_bytes_;
  for (Hbm& hbm : devices) hbm.peak_bytes = hbm.used_bytes;
}

const Region* Memory::Find(const void* address) const {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  auto after = regions_.upper_bound(at);
  if (after == regions_.begin()) return nullptr;
  const Region& region = std::prev(after)->second;
  return at - region.base < region.mapped ? &region : nullptr;
}

// What no region holds: ordinary host memory, reserved addresses with nothing behind them, or nothing at all.
Status Memory::CheckForeign(const char* role, const void* address, size_t bytes) const {
  if (FindReserved(address) != nullptr) {
    return Fail(acl::kRtParamInvalid, "%s: %p is reserved address space with no memory mapped in", role,
                address);
  }
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  auto next = regions_.upper_bound(at);
  bool runs_into = next != regions_.end() && next->first - at < bytes;
  if (runs_into || !IsMapped(address, bytes)) {
    return Fail(acl::kRtParamInvalid,
                "%s: the %zu bytes at %p are neither device memory nor mapped host memory", role, bytes,
                address);
  }
  return {};
}

// Finds out where [address, address + bytes) lies and that all of it may be accessed.
Status Memory::CheckRange(const char* role, const void* address, size_t bytes, int32_t* device) const {
  const Region* region = Find(address);
  *device = region == nullptr ? kHost : region->device;
  if (region == nullptr) return CheckForeign(role, address, bytes);
  const void* base = reinterpret_cast<void*>(region->base);
  if (!region->live) {
    return Fail(acl::kRtParamInvalid, "%s: %p lies in %s memory that was freed (%p, %zu bytes)", role,
                address, PlaceName(region->device), base, region->bytes);
  }
  size_t offset = reinterpret_cast<uintptr_t>(address) - region->base;
  size_t room = offset > region->bytes ? 0 : region->bytes - offset;
  if (bytes <= room) return {};
  const Region* next = Find(reinterpret_cast<void*>(region->base + region->bytes));
  if (region->mapped_in && next != nullptr && next->mapped_in && next->device == region->device) {
    return CheckRange(role, reinterpret_cast<void*>(next->base), bytes - room, device);
  }
  return Fail(acl::kRtParamInvalid,
              "%s: %zu bytes at offset %zu run past the end of the allocation %p of %zu bytes", role, bytes,
              offset, base, region->bytes);
}

Status Memory::CheckCopy(const Copy& copy, bool async, acl::MemcpyKind* kind) const {
  if (copy.src == nullptr) return Fail(acl::kInvalidParam, "src is null");
  Status status = CheckSizes(copy.dst, copy.dst_bytes, copy.bytes);
  Ends ends{};
  int32_t dst_device = kHost;
  int32_t src_device = kHost;
  if (status.ok()) status = EndsOf(copy.kind, &ends);
  if (status.ok()) status = CheckRange("dst", copy.dst, copy.bytes, &dst_device);
  if (status.ok()) status = CheckRange("src", copy.src, copy.bytes, &src_device);
  if (status.ok()) status = CheckEnds(copy, ends, dst_device, src_device);
  if (status.ok()) status = CheckOverlap(copy);
  bool to_device = dst_device != kHost;
  bool from_device = src_device != kHost;
  if (status.ok() && async && to_device && from_device) status = CheckAlignment(copy);
  *kind = to_device ? (from_device ? acl::kDeviceToDevice : acl::kHostToDevice)
                    : (from_device ? acl::kDeviceToHost : acl::kHostToHost);
  return status;
}

Status Memory::CheckFill(const Fill& fill) const {
  Status status = CheckSizes(fill.dst, fill.dst_bytes, fill.bytes);
  int32_t device = kHost;
  if (status.ok()) status = CheckRange("dst", fill.dst, fill.bytes, &device);
  return status;
}

Status Memory::RunCopy(const Copy& copy, bool async) {
  acl::MemcpyKind kind = acl::kMemcpyDefault;
  Status status = CheckCopy(copy, async, &kind);
  if (!status.ok()) return status;
  std::memcpy(copy.dst, copy.src, copy.bytes);
  copies.copies[kind] += 1;
  copies.bytes[kind] += copy.bytes;
  return {};
}

Status Memory::RunFill(const Fill& fill) {
  Status status = CheckFill(fill);
  if (status.ok()) std::memset(fill.dst, fill.value, fill.bytes);
  return status;
}

}  // namespace npc::sim
