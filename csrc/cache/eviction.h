// The order in which entries are evicted that no lease holds. Entries are known by their blocks; no tokens,
// no lock.
//
// Contract
//   - an entry is pinned, and in no list, or unpinned, and in one; whoever pins an entry has its ancestors
//   pinned
//   - an entry is linked before its parent is: either the parent is pinned still, or the caller links it
//   again
//     next. `parent` is the parent's block, 0 where that is a root
//   - everything is O(1) but order() and check_integrity()
//
// There is a list for each priority and each of the last 16 generations. A list is in the order of last use.
// The next to go is the first entry of the oldest generation there is of the lowest priority there is.
//   - LRU: there is one generation.
//   - LFU: an entry is linked 2 * bit_width(uses) - 1 generations after the oldest one, and an entry that is
//     evicted makes its own generation the oldest one. So an entry used once outlives those of its generation
//     that were linked before it, one used 2^n times 2n generations more, and what is used no more goes,
//     however often it was: after 15 generations, each of which is at most what the pool holds.
//
// The first entry is always a leaf (P4). Where an entry is linked, its parent's priority and generation are
// raised to its own at least, and they never fall. The parent is linked later, so it is in a list that comes
// later or further behind in the same one; and an entry with a pinned child is pinned itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cache/arena.h"
#include "cache/types.h"

namespace npc {

class EvictionOrder {
 public:
  // Blocks are [1, block_count).
  EvictionOrder(BlockId block_count, EvictionPolicy policy);

  // A new entry, pinned, which one request uses.
  void add(BlockId block, Priority priority);
  // One more request uses the entry and its ancestors: to be called for each of them where uses are counted.
  // What the request does with them besides is no use more.
  void use(BlockId block) { nodes_[block].uses += nodes_[block].uses < kMostUses; }
  bool counts_uses() const { return policy_ == EvictionPolicy::kLfu; }
  // A request of this priority uses a pinned entry. Its ancestors have the priority when it is linked.
  void prioritize(BlockId block, Priority priority);

  void unlink(BlockId block);
  void link(BlockId block, BlockId parent);

  // The next to be evicted; 0 where all are pinned.
  BlockId first() const;
  // The first is about to be evicted: its generation is the oldest one now.
  void age();

  size_t size() const { return size_; }  // unpinned entries
  // The unpinned entries, the next to be evicted first.
  std::vector<BlockId> order() const;

  // Throws IntegrityError on a broken invariant. That parents come after their children is for the tree to
  // check.
  void check_integrity() const;

 private:
  static constexpr uint32_t kGenerations = 16;
  static constexpr uint8_t kMostUses = 255;
  static constexpr size_t kLists = kPriorities * kGenerations;

  // Of an entry, by its block; after those, the heads of the lists' rings, of which only the links count.
  struct Node {
    BlockId next, previous;  // from the first to go to the last; 0 where the entry is pinned
    uint32_t generation;     // LFU: where linked, in [oldest_[priority], oldest_[priority] + 16)
    Priority priority;       // the highest of the requests that used the entry, or one below it
    uint8_t uses;            // LFU: requests, up to kMostUses
  };

  size_t first_list() const;
  size_t list_of(const Node& node) const;
  BlockId head(size_t list) const { return block_count_ + static_cast<BlockId>(list); }
  static void raise(Node& node, Priority priority, uint32_t generation);

  const BlockId block_count_;
  const EvictionPolicy policy_;
  Arena<Node> nodes_;
  std::array<uint32_t, kPriorities> oldest_{};
  uint64_t filled_ = 0;  // bit i: list i has entries
  size_t size_ = 0;
};

}  // namespace npc
