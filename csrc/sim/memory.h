// Every allocation of the simulated machine, live and freed: where it is, how much HBM it takes, and whether
// an access to it is right.
//
//   - an allocation may be accessed at the bytes asked for, [base, base + bytes), not at what rounding added
//   - it takes HBM: bytes rounded up to 32, plus the padding (32 for aclrtMalloc on A2/A3, 0 for the Align32
//     one), rounded up to pages: 4 KiB under the NORMAL policies, 2 MiB under HUGE_ONLY, 1 GiB under
//     HUGE1G_ONLY; HUGE_FIRST takes 4 KiB pages up to 1 MiB and where huge pages do not fit, else 2 MiB
//   - a freed range is remembered and never handed out again
//   - reserved address space (aclrtReserveMemAddress) may be accessed only where memory is mapped in
// Not thread-safe: the State's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "sim/status.h"

namespace npc::sim {

constexpr int32_t kHost = -1;  // the "device" of host memory

struct Region {
  uintptr_t base;
  size_t bytes;      // asked for: an access past it is an error
  size_t mapped;     // reserved from base on, at least bytes
  size_t hbm_bytes;  // taken from the device while live; 0 for host memory
  int32_t device;    // or kHost
  bool live;
  bool mapped_in;  // by aclrtMapMem: an access may go on into the next one, and aclrtUnmapMem ends it
};

struct Reservation {  // address space that has no memory of its own
  uintptr_t base;
  size_t bytes;
};

struct Hbm {
  size_t used_bytes = 0;  // sum of hbm_bytes over the live regions of the device
  size_t peak_bytes = 0;
  uint64_t allocations = 0;  // live
};

struct Copy {
  void* dst;
  size_t dst_bytes;
  const void* src;
  size_t bytes;
  int kind;  // acl::MemcpyKind
};

struct Fill {
  void* dst;
  size_t dst_bytes;
  int32_t value;
  size_t bytes;
};

// Copies done and the bytes they moved, indexed by the kind they really were: H2H, H2D, D2H, D2D.
struct CopyCounts {
  uint64_t copies[4] = {};
  uint64_t bytes[4] = {};
};

class Memory {
 public:
  size_t hbm_bytes = size_t{16} << 30;  // of each device; never below what is used
  bool poison = true;
  std::vector<Hbm> devices;  // one a device
  CopyCounts copies;

  // `base` is written on success only.
  Status Allocate(int32_t device, size_t bytes, int policy, size_t padding, void** base);
  Status AllocateHost(size_t bytes, void** base);
  Status Free(void* base);
  Status FreeHost(void* base);
  void FreeAllOf(int32_t device);  // or kHost

  // For VirtualMemory: HBM that has no address of its own, addresses that have no HBM, and the one mapped
  // into the other. `bytes` and addresses are multiples of a page.
  Status TakeHbm(int32_t device, size_t bytes);
  void ReturnHbm(int32_t device, size_t bytes);
  Status Reserve(size_t bytes, size_t alignment, void** base);
  void ReleaseReserved(const Reservation& reservation);
  const Reservation* FindReserved(const void* address) const;  // the one that holds it; null: none does
  Status MapIn(void* base, size_t bytes, int32_t device);
  void MapOut(void* base);

  // Checks a copy against what is live now, and says what kind it really is (H2H, H2D, D2H or D2D).
  Status CheckCopy(const Copy& copy, bool async, acl::MemcpyKind* kind) const;
  Status CheckFill(const Fill& fill) const;

  // Check, then do; a copy is counted when it is done.
  Status RunCopy(const Copy& copy, bool async);
  Status RunFill(const Fill& fill);

  uint64_t host_allocations() const { return host_allocations_; }
  size_t used_bytes() const { return used_bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }  // of the sum over devices
  void ResetPeaks();

 private:
  const Region* Find(const void* address) const;  // the region, live or freed, whose reserved range holds it
  Status CheckRange(const char* role, const void* address, size_t bytes, int32_t* device) const;
  Status CheckForeign(const char* role, const void* address, size_t bytes) const;
  Status FindToFree(void* base, bool host, Region** region);
  Status Map(Region region, size_t alignment, void** base);
  void Release(Region& region);

  std::map<uintptr_t, Region> regions_;        // by base; ranges are disjoint
  std::map<uintptr_t, Reservation> reserved_;  // by base
  uint64_t host_allocations_ = 0;              // live
  size_t used_bytes_ = 0;                      // sum over devices
  size_t peak_bytes_ = 0;
};

}  // namespace npc::sim
