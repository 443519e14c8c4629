#include "cache/eviction.h"

#include <algorithm>
#include <string>
#include <utility>

namespace npc {
namespace {

// Generations that an entry is linked after the oldest one: 1, 3, 5, ... 15, two more each time its uses
// double.
uint32_t generations(uint8_t uses) {
  const uint32_t bit_width = 32 - static_cast<uint32_t>(__builtin_clz(uses));
  return 2 * bit_width - 1;
}

[[noreturn]] void broken(BlockId block, const char* what) {
  throw IntegrityError("eviction order: block " + std::to_string(block) + " " + what);
}

}  // namespace

EvictionOrder::EvictionOrder(BlockId block_count, EvictionPolicy policy)
    : block_count_(block_count), policy_(policy), nodes_(static_cast<size_t>(block_count) + kLists) {
  static_assert(kLists <= 64, "a list is a bit of filled_");
  for (size_t list = 0; list < kLists; ++list)
    nodes_[head(list)].next = nodes_[head(list)].previous = head(list);
}

void EvictionOrder::add(BlockId block, Priority priority) { nodes_[block] = {0, 0, 0, priority, 1}; }

void EvictionOrder::prioritize(BlockId block, Priority priority) { raise(nodes_[block], priority, 0); }

void EvictionOrder::unlink(BlockId block) {
  const BlockId before = std::exchange(nodes_[block].previous, 0),
                after = std::exchange(nodes_[block].next, 0);
  nodes_[before].next = after;
  nodes_[after].previous = before;
  if (before == after) filled_ &= ~(uint64_t{1} << (before - block_count_));  // the list's head, alone now
  --size_;
}

void EvictionOrder::link(BlockId block, BlockId parent) {
  Node& node = nodes_[block];
  if (policy_ == EvictionPolicy::kLfu)
    node.generation = std::max(node.generation, oldest_[node.priority] + generations(node.uses));
  if (parent != 0) raise(nodes_[parent], node.priority, node.generation);
  const size_t list = list_of(node);
  const BlockId end = head(list), last = nodes_[end].previous;
  node.previous = last;
  node.next = end;
  nodes_[last].next = nodes_[end].previous = block;
  filled_ |= uint64_t{1} << list;
  ++size_;
}

// To this priority, and to this generation of it, at least.
void EvictionOrder::raise(Node& node, Priority priority, uint32_t generation) {
  if (node.priority > priority) return;
  if (node.priority < priority) node.generation = 0;  // that of another priority says nothing here
  node.priority = priority;
  node.generation = std::max(node.generation, generation);
}

size_t EvictionOrder::list_of(const Node& node) const {
  return node.priority * kGenerations + node.generation % kGenerations;
}

// Of those that have entries.
size_t EvictionOrder::first_list() const {
  const auto priority = static_cast<size_t>(__builtin_ctzll(filled_)) / kGenerations;
  const auto lists = static_cast<uint32_t>(filled_ >> priority * kGenerations) & 0xffffU;
  const uint32_t oldest = oldest_[priority] % kGenerations;
  // Twice the ring, from the oldest generation on.
  const uint32_t from_oldest = (lists | lists << kGenerations) >> oldest;
  const uint32_t generation = oldest + static_cast<uint32_t>(__builtin_ctz(from_oldest));
  return priority * kGenerations + generation % kGenerations;
}

BlockId EvictionOrder::first() const { return filled_ == 0 ? 0 : nodes_[head(first_list())].next; }

void EvictionOrder::age() {
  const Node& node = nodes_[first()];
  oldest_[node.priority] = node.generation;
}

std::vector<BlockId> EvictionOrder::order() const {
  std::vector<BlockId> order;
  order.reserve(size_);
  for (size_t priority = 0; priority < kPriorities; ++priority) {
    for (uint32_t age = 0; age < kGenerations; ++age) {
      const BlockId end = head(priority * kGenerations + (oldest_[priority] + age) % kGenerations);
      for (BlockId block = nodes_[end].next; block != end; block = nodes_[block].next) order.push_back(block);
    }
  }
  return order;
}

void EvictionOrder::check_integrity() const {
  size_t linked = 0;
  for (size_t list = 0; list < kLists; ++list) {
    const BlockId end = head(list);
    if (((filled_ >> list & 1) != 0) != (nodes_[end].next != end))
      throw IntegrityError("eviction order: filled lists");
    for (BlockId block = nodes_[end].next; block != end; block = nodes_[block].next) {
      if (block <= 0 || block >= block_count_) broken(block, "is in a list");
      const Node& node = nodes_[block];
      if (nodes_[node.next].previous != block || nodes_[node.previous].next != block)
        broken(block, "has broken links");
      if (list_of(node) != list) broken(block, "is in the list of another priority or generation");
      if (node.generation - oldest_[node.priority] >= kGenerations)
        broken(block, "is of no generation there is");
      if (++linked > size_) throw IntegrityError("eviction order: a list has a cycle");
    }
  }
  if (linked != size_) throw IntegrityError("eviction order: the number of unpinned entries is wrong");
}

}  // namespace npc
