#include "sim/pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace npc::sim {
namespace {

constexpr int kReserve = MAP_PRIVATE | MAP_NORESERVE;

// A file of 0xFF that poisoned memory maps copy-on-write, again and again: gigabytes of poison then cost this
// file and the pages the program writes. Large enough that a big allocation stays far below the kernel's
// limit on mappings a process (65,530 by default).
constexpr size_t kPatternBytes = size_t{16} << 20;

// -1 when there is no such file to be had. Never closed: simulated memory lives until the process ends.
int PatternFile() {
  static const int file = [] {
    int fd = memfd_create("npc_sim_poison", MFD_CLOEXEC);
    if (fd < 0) return -1;
    void* view = MAP_FAILED;
    if (ftruncate(fd, kPatternBytes) == 0) {
      view = mmap(nullptr, kPatternBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    if (view == MAP_FAILED) {
      close(fd);
      return -1;
    }
    std::memset(view, 0xFF, kPatternBytes);
    munmap(view, kPatternBytes);
    return fd;
  }();
  return file;
}

bool MapPattern(char* base, size_t bytes) {
  if (PatternFile() < 0) return false;
  for (size_t done = 0; done < bytes; done += kPatternBytes) {
    size_t step = std::min(kPatternBytes, bytes - done);
    void* at = mmap(base + done, step, PROT_READ | PROT_WRITE, kReserve | MAP_FIXED, PatternFile(), 0);
    if (at == MAP_FAILED) return false;
  }
  return true;
}

bool MapPlain(char* base, size_t bytes) {
  return mmap(base, bytes, PROT_READ | PROT_WRITE, kReserve | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// Small memory is filled by hand: one mapping and no copy-on-write.
bool MapPoisoned(char* base, size_t bytes) {
  if (bytes > kHugePageBytes && MapPattern(base, bytes)) return true;
  if (!MapPlain(base, bytes)) return false;
  std::memset(base, 0xFF, bytes);
  return true;
}

}  // namespace

void* ReserveAddresses(size_t bytes, size_t alignment) {
  size_t slack = alignment > kPageBytes ? alignment : 0;
  if (bytes > SIZE_MAX - slack) return nullptr;
  void* range = mmap(nullptr, bytes + slack, PROT_NONE, kReserve | MAP_ANONYMOUS, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  // The slack before and after the aligned base stays reserved: it is a guard against neighbouring accesses.
  return reinterpret_cast<void*>(RoundUp(reinterpret_cast<uintptr_t>(range), alignment));
}

bool BackPages(void* base, size_t bytes, bool poison) {
  char* at = static_cast<char*>(base);
  return poison ? MapPoisoned(at, bytes) : MapPlain(at, bytes);
}

void* ReservePages(size_t bytes, size_t alignment, bool poison) {
  void* base = ReserveAddresses(bytes, alignment);
  if (base == nullptr || BackPages(base, bytes, poison)) return base;
  ReleasePages(base, bytes);
  return nullptr;
}

void ReleasePages(void* base, size_t bytes) {
  void* at = mmap(base, bytes, PROT_NONE, kReserve | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  // Out of mappings: keep the address, drop the access as far as the kernel lets us.
  if (at == MAP_FAILED) mprotect(base, bytes, PROT_NONE);
}

bool IsMapped(const void* address, size_t bytes) {
  constexpr size_t kStepPages = 4096;
  unsigned char resident[kStepPages];
  uintptr_t first = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0 || first > UINTPTR_MAX - bytes) return false;
  uintptr_t end = first + bytes;
  for (uintptr_t at = first / kPageBytes * kPageBytes; at < end; at += kStepPages * kPageBytes) {
    size_t step = std::min<size_t>(end - at, kStepPages * kPageBytes);
    if (mincore(reinterpret_cast<void*>(at), step, resident) != 0) return false;
  }
  return true;
}

}  // namespace npc::sim
