#include "cache/sightings.h"

#include <algorithm>
#include <cstring>
#include <random>

namespace npc {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15U;
  return hash ^ (hash >> 29);
}

uint64_t mix_bytes(uint64_t hash, const void* data, size_t bytes) {
  hash = mix(hash, bytes);
  const auto* at = static_cast<const char*>(data);
  for (; bytes > 0; at += sizeof(uint64_t)) {
    uint64_t value = 0;
    const size_t taken = std::min(bytes, sizeof value);
    std::memcpy(&value, at, taken);
    hash = mix(hash, value);
    bytes -= taken;
  }
  return mix(hash, hash >> 32);
}

size_t power_of_two(size_t least) {
  size_t power = 1;
  while (power < least) power *= 2;
  return power;
}

}  // namespace

Sightings::Sightings(size_t blocks) : sets_(power_of_two(blocks)) {
  std::random_device random;
  seed_ = (static_cast<uint64_t>(random()) << 32) | random();
}

uint64_t Sightings::begin(std::string_view name_space) const {
  return mix_bytes(seed_, name_space.data(), name_space.size());
}

uint64_t Sightings::extend(uint64_t chain, const Token* tokens, int32_t count) const {
  return mix_bytes(chain, tokens, static_cast<size_t>(count) * sizeof(Token));
}

bool Sightings::sight(uint64_t chain) {
  Set& set = sets_[(chain >> 32) & (sets_.size() - 1)];
  const uint32_t fingerprint = std::max(1U, static_cast<uint32_t>(chain));
  auto place = std::find(set.begin(), set.end(), fingerprint);
  const bool again = place != set.end();
  if (!again) place = set.end() - 1;  // the one sighted longest ago is forgotten
  std::move_backward(set.begin(), place, place + 1);
  set[0] = fingerprint;
  return again;
}

}  // namespace npc
