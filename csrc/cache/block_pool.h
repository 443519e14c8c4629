// Who has each block of the pool. Ids only: no memory, no tokens, no lock (the facade holds the mutex).
//
//            allocate            publish
//   free  ------------> leased ----------> cached
//    ^                    |                   |
//    |   ticket passed    v       retire      |
//    +---------------- fenced <---------------+       (straight to free where the ticket has passed already)
//
// A block that leases write is private to one, or shared: `users` counts the leases that have it in their
// tables as their own, before and after one of them published it. Without users a leased block is retired; a
// cached one stays, its entry's.
//
// Costs: O(1) a block for every transition. What waits for tickets lies in a radix heap: bucket i holds
// blocks whose ticket differs from the passed one in bit i and in none above it. Buckets that a newer ticket
// has caught up with are due, and pass() sorts a bounded number of their blocks: free, or into a lower
// bucket.
//
// The free block that was given back last is the next one handed out. Whoever gives back a sequence does so
// from its last block to its first, so that the next sequence gets neighbours.
//
// Block 0 is padding: block tables are filled up with it, and it is never handed out.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "cache/types.h"

namespace npc {

enum class BlockState : uint8_t { kPadding, kFree, kLeased, kCached, kFenced };

class BlockPool {
 public:
  // Ids are [0, block_count); block_count >= 2.
  explicit BlockPool(BlockId block_count);

  // Appends `count` leased blocks, of one user each, to `out` and returns true, or changes nothing and
  // returns false where fewer are free. Each block is the successor of the one before it (of `after` for the
  // first) where that one is free: neighbours in a sequence that are neighbours in memory can be read as one.
  bool allocate(size_t count, BlockId after, std::vector<BlockId>& out);

  // One user more.
  void share(BlockId block) { ++slots_[block].users; }

  // One user less, who may use the block until `last_use`. A leased block that has none left -> fenced until
  // the last use of any of its users has passed.
  void drop(BlockId block, Ticket last_use);

  // leased -> cached.
  void publish(BlockId block);

  // cached, without users -> fenced until `last_use`, and the last use of any user it had, has passed.
  void retire(BlockId block, Ticket last_use);

  // Every ticket up to and including `ticket` has passed: what waited for them is free, but for what more
  // than kDueBlocks blocks were due: that stays fenced until the next calls, for the same ticket too.
  void pass(Ticket ticket);
  static constexpr size_t kDueBlocks = 4096;

  int32_t users(BlockId block) const { return slots_[block].users; }
  BlockState state(BlockId block) const { return slots_[block].state; }
  size_t count(BlockState state) const { return counts_[static_cast<size_t>(state)]; }
  size_t usable_blocks() const { return slots_.size() - 1; }

  // Throws IntegrityError unless the lists, the states and the counts agree and sum up to all blocks (P10).
  void check_integrity() const;

 private:
  struct Slot {
    Ticket last_use = 0;   // newest of the users it has dropped, ever; what it waits for where fenced
    BlockId next = 0;      // free: ring through 0. Fenced: ring of those that wait together
    BlockId previous = 0;  // free: ring through 0
    int32_t users = 0;     // 0 where free or fenced, at least 1 where leased
    BlockState state = BlockState::kPadding;
  };

  void set_state(BlockId block, BlockState state);
  void free(BlockId block);
  void unlink_free(BlockId block);
  void fence(BlockId block);
  void append(BlockId& last, BlockId& more);  // empties `more`
  BlockId pop_first(BlockId& last);
  size_t check_waiting(BlockId last, size_t bit) const;
  static constexpr size_t kNoBit = ~size_t{0};
  static size_t highest_bit(Ticket ticket) { return 63 - static_cast<size_t>(__builtin_clzll(ticket)); }

  std::vector<Slot> slots_;
  std::array<size_t, 5> counts_{};    // by BlockState
  std::array<BlockId, 64> fenced_{};  // last blocks of rings, by the highest bit of ticket ^ passed_
  BlockId due_ = 0;                   // last block of the ring of those that are to be looked at anew
  Ticket passed_ = 0;
};

}  // namespace npc
