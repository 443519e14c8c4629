#include "cache/block_pool.h"

#include <algorithm>

namespace npc {

BlockPool::BlockPool(BlockId block_count)
    : state_(block_count, BlockState::kPadding),
      users_(block_count, 0),
      last_use_(block_count, 0),
      free_next_(block_count, 0),
      free_prev_(block_count, 0) {
  counts_[static_cast<size_t>(BlockState::kPadding)] = block_count;
  for (BlockId block = 1; block < block_count; ++block) {
    set_state(block, BlockState::kFree);
    link_free(block);
  }
}

bool BlockPool::allocate(size_t count, BlockId after, std::vector<BlockId>& out) {
  if (count > this->count(BlockState::kFree)) return false;
  out.reserve(out.size() + count);
  for (; count > 0; --count) {
    size_t successor = static_cast<size_t>(after) + 1;
    bool adjacent = after != 0 && successor < state_.size() && state_[successor] == BlockState::kFree;
    BlockId block = adjacent ? static_cast<BlockId>(successor) : free_next_[0];
    unlink_free(block);
    set_state(block, BlockState::kLeased);
    users_[block] = 1;
    last_use_[block] = 0;
    out.push_back(block);
    after = block;
  }
  return true;
}

void BlockPool::publish(BlockId block) { set_state(block, BlockState::kCached); }

void BlockPool::drop(BlockId block, Ticket last_use) {
  last_use_[block] = std::max(last_use_[block], last_use);
  if (--users_[block] == 0 && state_[block] == BlockState::kLeased) retire(block, last_use);
}

void BlockPool::retire(BlockId block, Ticket last_use) {
  last_use = std::max(last_use, last_use_[block]);
  if (last_use <= passed_) {
    set_state(block, BlockState::kFree);
    link_free(block);
  } else {
    fenced_[last_use].push_back(block);
    set_state(block, BlockState::kFenced);
  }
}

void BlockPool::pass(Ticket ticket) {
  if (ticket <= passed_) return;
  passed_ = ticket;
  while (!fenced_.empty() && fenced_.begin()->first <= ticket) {
    for (BlockId block : fenced_.begin()->second) {
      set_state(block, BlockState::kFree);
      link_free(block);
    }
    fenced_.erase(fenced_.begin());
  }
}

void BlockPool::set_state(BlockId block, BlockState state) {
  --counts_[static_cast<size_t>(state_[block])];
  ++counts_[static_cast<size_t>(state)];
  state_[block] = state;
}

void BlockPool::link_free(BlockId block) {
  BlockId last = free_prev_[0];
  free_prev_[block] = last;
  free_next_[block] = 0;
  free_next_[last] = block;
  free_prev_[0] = block;
}

void BlockPool::unlink_free(BlockId block) {
  free_next_[free_prev_[block]] = free_next_[block];
  free_prev_[free_next_[block]] = free_prev_[block];
}

void BlockPool::check_integrity() const {
  std::array<size_t, 5> counted{};
  for (BlockState state : state_) ++counted[static_cast<size_t>(state)];
  if (counted != counts_) throw IntegrityError("block counts by state differ from the states");
  if (state_[0] != BlockState::kPadding || counts_[static_cast<size_t>(BlockState::kPadding)] != 1)
    throw IntegrityError("block 0 is not the one padding block");
  for (size_t block = 0; block < state_.size(); ++block) {
    bool is_leased = state_[block] == BlockState::kLeased, is_cached = state_[block] == BlockState::kCached;
    if (users_[block] < (is_leased ? 1 : 0) || (users_[block] > 0 && !is_leased && !is_cached))
      throw IntegrityError("block " + std::to_string(block) + " has " + std::to_string(users_[block]) +
                           " users");
  }
  size_t free = 0;
  for (BlockId block = free_next_[0]; block != 0; block = free_next_[block]) {
    if (state_[block] != BlockState::kFree || free_prev_[free_next_[block]] != block)
      throw IntegrityError("the free list is broken at block " + std::to_string(block));
    if (++free > count(BlockState::kFree)) throw IntegrityError("the free list has a cycle");
  }
  size_t fenced = 0;
  for (const auto& [ticket, blocks] : fenced_) {
    if (ticket <= passed_) throw IntegrityError("blocks wait for a ticket that has passed");
    for (BlockId block : blocks) {
      if (state_[block] != BlockState::kFenced)
        throw IntegrityError("block " + std::to_string(block) + " waits but is not fenced");
    }
    fenced += blocks.size();
  }
  if (free != count(BlockState::kFree) || fenced != count(BlockState::kFenced))
    throw IntegrityError("the free or fenced list misses blocks");
}

}  // namespace npc
