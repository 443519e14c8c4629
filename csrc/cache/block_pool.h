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
// Block 0 is padding: block tables are filled up with it, and it is never handed out.
#pragma once

#include <array>
#include <cstddef>
#include <map>
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
  void share(BlockId block) { ++users_[block]; }

  // One user less, who may use the block until `last_use`. A leased block that has none left -> fenced until
  // the last use of any of its users has passed.
  void drop(BlockId block, Ticket last_use);

  // leased -> cached.
  void publish(BlockId block);

  // cached, without users -> fenced until `last_use`, and the last use of any user it had, has passed.
  void retire(BlockId block, Ticket last_use);

  // Every ticket up to and including `ticket` has passed: what waited for them is free.
  void pass(Ticket ticket);

  int32_t users(BlockId block) const { return users_[block]; }
  BlockState state(BlockId block) const { return state_[block]; }
  size_t count(BlockState state) const { return counts_[static_cast<size_t>(state)]; }
  size_t usable_blocks() const { return state_.size() - 1; }

  // Throws IntegrityError unless the lists, the states and the counts agree and sum up to all blocks (P10).
  void check_integrity() const;

 private:
  void set_state(BlockId block, BlockState state);
  void link_free(BlockId block);
  void unlink_free(BlockId block);

  std::vector<BlockState> state_;
  std::vector<int32_t> users_;      // 0 where free or fenced, at least 1 where leased
  std::vector<Ticket> last_use_;    // of the users that a block has dropped since it was allocated
  std::array<size_t, 5> counts_{};  // by BlockState
  std::vector<BlockId> free_next_,
      free_prev_;  // ring of free blocks through 0; meaningful where state is kFree
  std::map<Ticket, std::vector<BlockId>> fenced_;  // by the ticket they wait for; all keys > passed_
  Ticket passed_ = 0;
};

}  // namespace npc
