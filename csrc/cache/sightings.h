// Which prefixes were sighted lately: what is remembered of prompts that are not kept.
//
// A prefix is a chain of hashes over its namespace and the tokens of its blocks. What is forgotten or, once
// in some 2^30 sightings, mistaken for another is kept a request too late or too early: nothing is found by
// these hashes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cache/arena.h"
#include "cache/types.h"

namespace npc {

class Sightings {
 public:
  // Remembers the latest 4 * `blocks` prefixes, some more and some less, in 16 to 32 bytes a block.
  explicit Sightings(size_t blocks);

  // Chains; seeded per process.
  uint64_t begin(std::string_view name_space) const;
  uint64_t extend(uint64_t chain, const Token* tokens, int32_t count) const;

  // True where the prefix was sighted before. It has been from now on.
  bool sight(uint64_t chain);

 private:
  using Set = std::array<uint32_t, 4>;  // fingerprints, the latest first; 0: none

  uint64_t seed_;
  Arena<Set> sets_;  // a power of two
};

}  // namespace npc
