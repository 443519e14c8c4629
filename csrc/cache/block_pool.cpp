#include "cache/block_pool.h"

#include <algorithm>
#include <utility>

namespace npc {

BlockPool::BlockPool(BlockId block_count) : slots_(static_cast<size_t>(block_count)) {
  counts_[static_cast<size_t>(BlockState::kPadding)] = slots_.size();
  for (BlockId block = block_count - 1; block > 0; --block) free(block);
}

bool BlockPool::allocate(size_t count, BlockId after, std::vector<BlockId>& out) {
  if (count > this->count(BlockState::kFree)) return false;
  out.reserve(out.size() + count);
  for (; count > 0; --count) {
    size_t successor = static_cast<size_t>(after) + 1;
    bool adjacent = after != 0 && successor < slots_.size() && slots_[successor].state == BlockState::kFree;
    BlockId block = adjacent ? static_cast<BlockId>(successor) : slots_[0].next;
    unlink_free(block);
    set_state(block, BlockState::kLeased);
    slots_[block].users = 1;
    out.push_back(block);
    after = block;
  }
  return true;
}

void BlockPool::publish(BlockId block) { set_state(block, BlockState::kCached); }

void BlockPool::drop(BlockId block, Ticket last_use) {
  Slot& slot = slots_[block];
  slot.last_use = std::max(slot.last_use, last_use);
  if (--slot.users == 0 && slot.state == BlockState::kLeased) retire(block, last_use);
}

void BlockPool::retire(BlockId block, Ticket last_use) {
  Slot& slot = slots_[block];
  slot.last_use = std::max(slot.last_use, last_use);
  if (slot.last_use <= passed_) {
    free(block);
  } else {
    set_state(block, BlockState::kFenced);
    fence(block);
  }
}

// Whose ticket has the bit where `ticket` differs from the passed one, or a lower one, may have passed.
void BlockPool::pass(Ticket ticket) {
  if (ticket > passed_) {
    size_t caught_up = highest_bit(ticket ^ passed_);
    for (size_t bit = 0; bit <= caught_up; ++bit) append(due_, fenced_[bit]);
    passed_ = ticket;
  }
  for (size_t left = kDueBlocks; left > 0 && due_ != 0; --left) {
    BlockId block = pop_first(due_);
    if (slots_[block].last_use <= passed_) {
      free(block);
    } else {
      fence(block);
    }
  }
}

void BlockPool::set_state(BlockId block, BlockState state) {
  --counts_[static_cast<size_t>(slots_[block].state)];
  ++counts_[static_cast<size_t>(state)];
  slots_[block].state = state;
}

void BlockPool::free(BlockId block) {
  set_state(block, BlockState::kFree);
  BlockId first = slots_[0].next;
  slots_[block].next = first;
  slots_[block].previous = 0;
  slots_[0].next = slots_[first].previous = block;
}

void BlockPool::unlink_free(BlockId block) {
  slots_[slots_[block].previous].next = slots_[block].next;
  slots_[slots_[block].next].previous = slots_[block].previous;
}

void BlockPool::fence(BlockId block) {
  BlockId& last = fenced_[highest_bit(slots_[block].last_use ^ passed_)];
  slots_[block].next = block;
  append(last, block);
}

void BlockPool::append(BlockId& last, BlockId& more) {
  if (last != 0 && more != 0) std::swap(slots_[last].next, slots_[more].next);
  if (more != 0) last = more;
  more = 0;
}

BlockId BlockPool::pop_first(BlockId& last) {
  BlockId first = slots_[last].next;
  slots_[last].next = slots_[first].next;
  if (first == last) last = 0;
  return first;
}

void BlockPool::check_integrity() const {
  std::array<size_t, 5> counted{};
  for (const Slot& slot : slots_) ++counted[static_cast<size_t>(slot.state)];
  if (counted != counts_) throw IntegrityError("block counts by state differ from the states");
  if (slots_[0].state != BlockState::kPadding || count(BlockState::kPadding) != 1)
    throw IntegrityError("block 0 is not the one padding block");
  for (size_t block = 0; block < slots_.size(); ++block) {
    const Slot& slot = slots_[block];
    bool is_leased = slot.state == BlockState::kLeased, is_cached = slot.state == BlockState::kCached;
    if (slot.users < (is_leased ? 1 : 0) || (slot.users > 0 && !is_leased && !is_cached))
      throw IntegrityError("block " + std::to_string(block) + " has " + std::to_string(slot.users) +
                           " users");
  }
  size_t free = 0;
  for (BlockId block = slots_[0].next; block != 0; block = slots_[block].next) {
    if (slots_[block].state != BlockState::kFree || slots_[slots_[block].next].previous != block)
      throw IntegrityError("the free list is broken at block " + std::to_string(block));
    if (++free > count(BlockState::kFree)) throw IntegrityError("the free list has a cycle");
  }
  size_t fenced = check_waiting(due_, kNoBit);
  for (size_t bit = 0; bit < fenced_.size(); ++bit) fenced += check_waiting(fenced_[bit], bit);
  if (free != count(BlockState::kFree) || fenced != count(BlockState::kFenced))
    throw IntegrityError("the free or fenced lists miss blocks");
}

// Counts the blocks of a list that wait for tickets of this highest bit, or for whatever ticket.
size_t BlockPool::check_waiting(BlockId last, size_t bit) const {
  size_t count = 0;
  for (BlockId block = last; block != 0;) {
    block = slots_[block].next;
    if (slots_[block].state != BlockState::kFenced)
      throw IntegrityError("block " + std::to_string(block) + " waits but is not fenced");
    Ticket ticket = slots_[block].last_use;
    if (bit != kNoBit && (ticket <= passed_ || highest_bit(ticket ^ passed_) != bit))
      throw IntegrityError("block " + std::to_string(block) + " waits among those of other tickets");
    if (++count > this->count(BlockState::kFenced)) throw IntegrityError("a fenced list has a cycle");
    if (block == last) break;
  }
  return count;
}

}  // namespace npc
