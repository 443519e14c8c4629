// Real memory behind simulated memory. Reserving costs address space only; a page takes real memory when it
// is first written. An address range is never handed out twice: what is released stays reserved and
// inaccessible, so a host access to freed memory faults, and a stale address can be told from a foreign one
// for as long as the process lives.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npc::sim {

constexpr size_t kPageBytes = size_t{4} << 10;
constexpr size_t kHugePageBytes = size_t{2} << 20;

constexpr size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Inaccessible address space of `bytes` (a multiple of kPageBytes) at a multiple of `alignment` (a power of
// two, at least kPageBytes). Null when the machine refuses.
void* ReserveAddresses(size_t bytes, size_t alignment);

// Makes reserved addresses readable and writable, every byte 0xFF when `poison`, else 0. False when the
// machine refuses.
bool BackPages(void* base, size_t bytes, bool poison);

// Both in one. Null when the machine refuses.
void* ReservePages(size_t bytes, size_t alignment, bool poison);

// Gives the real memory back and makes the range inaccessible. The addresses stay reserved.
void ReleasePages(void* base, size_t bytes);

// Whether every page of [address, address + bytes) is mapped in this process. Says nothing of access rights.
bool IsMapped(const void* address, size_t bytes);

}  // namespace npc::sim
