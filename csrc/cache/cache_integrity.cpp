// What must hold of the tree, the pool and the leases together, after every operation (P10).
#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "cache/cache.h"

namespace npc {
namespace {

[[noreturn]] void broken(BlockId block, const char* what) {
  throw IntegrityError("block " + std::to_string(block) + " " + what);
}

}  // namespace

void Cache::check_integrity() const {
  std::lock_guard lock(mutex_);
  pool_.check_integrity();
  std::unordered_map<const Entry*, int32_t> pins;
  std::vector<int32_t> users(options_.block_count, 0), pins_of(options_.block_count, 0);
  for (const Lease* lease : leases_) {
    check_table(lease, users);
    if (lease->is_pin) {
      for (const Entry* entry : lease->path) ++pins_of[entry->block];
      for (const Lease::Held& held : lease->held) ++pins_of[held.entry->block];
    }
    ++pins[lease->root];
    for (const Entry* entry : lease->path) ++pins[entry];
    for (const Lease::Held& held : lease->held) ++pins[held.entry];
    if (lease->tail != nullptr) ++pins[lease->tail];
  }
  for (BlockId block = 0; block < options_.block_count; ++block) {
    if (users[block] != pool_.users(block)) broken(block, "has other users than the leases say");
  }
  if (!std::equal(pins_of.begin(), pins_of.end(), pins_of_.data()))
    throw IntegrityError("the pins of some block are miscounted");
  const auto unpinned = static_cast<size_t>(std::count(pins_of.begin(), pins_of.end(), 0));
  if (blocks_of_pins_ != pins_of.size() - unpinned || blocks_of_pins_ > options_.pinned_blocks)
    throw IntegrityError("pins hold " + std::to_string(blocks_of_pins_) + " blocks, miscounted or too many");
  std::vector<BlockId> cached;
  tree_.check_integrity(pins, cached);
  std::vector<char> seen(options_.block_count, 0);
  for (BlockId block : cached) {
    if (pool_.state(block) != BlockState::kCached || seen[block]++)
      broken(block, "is not the block of exactly one entry");
  }
  if (cached.size() != pool_.count(BlockState::kCached))
    throw IntegrityError("cached blocks differ from the entries");
}

// Counts the lease's own blocks in `users`.
void Cache::check_table(const Lease* lease, std::vector<int32_t>& users) const {
  if (lease->blocks.size() != blocks_for(lease->length))
    throw IntegrityError("a lease's block table does not fit its length");
  if (lease->borrowed > std::min(lease->path.size(), lease->blocks.size()))
    throw IntegrityError("a lease's table begins with blocks that are not on its path");
  std::unordered_set<BlockId> pinned;
  for (const Entry* entry : lease->path) pinned.insert(entry->block);
  for (const Lease::Held& held : lease->held) {
    pinned.insert(held.entry->block);
    if (held.index > lease->path.size()) broken(held.entry->block, "is held below the lease's path");
  }
  if (lease->tail != nullptr) {
    pinned.insert(lease->tail->block);
    if (lease->path.size() >= lease->blocks.size() || lease->blocks[lease->path.size()] != lease->tail->block)
      broken(lease->tail->block, "is a lease's published part, but not after its path");
  }
  for (size_t i = 0; i < lease->blocks.size(); ++i) {
    BlockId block = lease->blocks[i];
    bool is_cached = pool_.state(block) == BlockState::kCached;
    if (i < lease->borrowed) {
      if (!is_cached || block != lease->path[i]->block) broken(block, "is not that of the path's entry");
      continue;
    }
    ++users[block];
    if (is_cached ? pinned.count(block) == 0 : pool_.state(block) != BlockState::kLeased)
      broken(block, "is in a table, but its entry is not pinned");
    bool is_whole = static_cast<int64_t>(i + 1) * options_.block_size <= lease->length;
    if (pool_.users(block) > 1 && !is_whole) broken(block, "is shared, and one that shares it may write it");
  }
  if (lease->spare != 0) ++users[lease->spare];
}

}  // namespace npc
