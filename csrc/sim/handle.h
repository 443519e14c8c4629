// Handles of contexts, streams, events and physical memory. They are numbers, never given out twice, that no
// address can equal: a program that looks inside one faults, and one used after its destruction is always
// found out.
#pragma once

#include <cstdint>

namespace npc::sim {

enum class HandleKind : uintptr_t { kContext = 1, kStream = 2, kEvent = 3, kPhysical = 4 };

inline void* MakeHandle(HandleKind kind, uint64_t serial) {
  // Bits 56 and up are set, bit 63 is not: not canonical on x86-64 nor on AArch64.
  return reinterpret_cast<void*>((static_cast<uintptr_t>(kind) << 56) |
                                 (static_cast<uintptr_t>(serial) << 4));
}

}  // namespace npc::sim
