// Comparing token sequences.
#pragma once

#include <cstdint>
#include <cstring>

#include "cache/types.h"

namespace npc {

// Length of the longest common prefix of a[0, count) and b[0, count).
inline int64_t common_prefix(const Token* a, const Token* b, int64_t count) {
  constexpr int64_t kChunk = 16;
  int64_t i = 0;
  while (i + kChunk <= count && std::memcmp(a + i, b + i, kChunk * sizeof(Token)) == 0) i += kChunk;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

}  // namespace npc
