// The prefix tree: which token prefixes are cached, in which blocks, and which of them to evict first.
//
// Contract
//   - no lock, no memory, no vendor call: the facade holds the mutex, the device room holds the bytes
//   - one tree per namespace; an entry is found by comparing its tokens, one by one, with the request's.
//   There is
//     no hash to collide: the children of an entry form a treap ordered by their tokens, so that one descent
//     finds the exact child or, where there is none, the child with the longest common prefix. Its priorities
//     are random and seeded per process, so that no choice of prompts makes it deep
//   - the entry of block b is slot b of an array that is reserved once: no call here allocates memory for an
//   entry or its tokens, moves them, or does anything for all of them. A prompt's blocks are neighbours where
//   the pool could give it such, and so are then its entries and their tokens
//   - costs: O(log children) comparisons a block to find, insert and remove (one comparison on an unforked
//   path),
//     O(1) to pin, unpin, touch and to find the entry to evict (eviction.h)
//   - intervals are half-open; counts are tokens
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cache/arena.h"
#include "cache/eviction.h"
#include "cache/types.h"

namespace npc {

struct Entry {
  Entry* parent = nullptr;  // null for a root, and in the slot of a block that has no entry
  BlockId block = 0;        // this entry's slot; 0 for a root
  // Links to other entries, by their blocks; 0 is none.
  BlockId children = 0;  // top of the treap of children; only an entry of block_size tokens has any
  BlockId left = 0;      // treap links among siblings: left < this < right by tokens
  BlockId right = 0;
  uint32_t priority = 0;      // treap heap order: no child above its parent
  Token first_token = 0;      // of its tokens: most comparisons with siblings look no further
  int32_t token_count = 0;    // 1 ... block_size; 0 for a root
  int32_t pins = 0;           // a pinned entry has pinned ancestors: leases pin whole paths
  Ticket last_use = 0;        // the block may be read by work up to this ticket
  Ticket written = 0;         // the block is written once this ticket has passed
  StreamId writer = nullptr;  // or, on this stream, for whatever is enqueued from now on
};

struct Root : Entry {
  std::string name;
};

// Where a search among the children of one entry ended.
struct Found {
  Entry* entry = nullptr;  // the child with the longest common prefix, null where no child shares a token
  int32_t tokens = 0;      // its length
};

// What of a prompt is cached.
struct PathMatch {
  std::vector<Entry*>
      path;            // path[i] holds exactly the prompt's tokens [i * block_size, (i + 1) * block_size)
  Found tail;          // continues the path by tail.tokens more
  int64_t tokens = 0;  // path.size() * block_size + tail.tokens

  void drop_tail() { tokens -= std::exchange(tail, {}).tokens; }
};

class PrefixTree {
 public:
  // Blocks are [1, block_count). `priority_bits` < 32 makes treap priorities collide; a hook for tests.
  PrefixTree(int32_t block_size, BlockId block_count, EvictionPolicy policy, int priority_bits = 32);
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  Root* find_root(std::string_view name);
  Root* get_root(std::string_view name);  // made where there is none
  void drop_root_if_unused(Root* root);

  // Of an entry; never changed but for more being appended, by the lease that wrote the block.
  const Token* tokens(const Entry* entry) const { return tokens_.data() + offset_of(entry->block); }

  PathMatch match(Root* root, const Token* tokens, int64_t count) const;
  Found find_child(const Entry* parent, const Token* tokens, int32_t count) const;

  // A new, pinned child, in the slot of `block`, which a request of this priority uses. No child may equal or
  // begin with `tokens`.
  Entry* insert(Entry* parent, const Token* tokens, int32_t count, BlockId block, Priority priority);
  // The same entry with more tokens; tokens[0, token_count) must be what it holds.
  void lengthen(Entry* entry, const Token* tokens, int32_t count);
  // Unlinks an unpinned leaf and blanks its slot; returns its block.
  BlockId remove(Entry* entry);
  // True where a sibling begins with all tokens of this leaf, so that it can serve no request alone.
  bool is_covered(const Entry* entry) const;

  void pin(Entry* entry);
  void unpin(Entry* entry);  // becomes the last of its list; unpin the leaf first, its ancestors after it
  void touch(Entry* entry);  // likewise, where it is not pinned

  // See EvictionOrder.
  void use(const Entry* entry) { order_.use(entry->block); }
  bool counts_uses() const { return order_.counts_uses(); }
  void prioritize(const Entry* entry, Priority priority) { order_.prioritize(entry->block, priority); }

  // The next entry to be evicted, an unpinned leaf; null where all are pinned.
  Entry* first_to_evict() const { return order_.size() == 0 ? nullptr : &entries_[order_.first()]; }
  // Unlinks and deletes it; returns its block.
  BlockId evict();

  // The unpinned entries, the next to be evicted first; each as all tokens from the root to its own last.
  std::vector<std::vector<Token>> eviction_order() const;

  size_t entry_count() const { return entry_count_; }
  size_t unpinned_count() const { return order_.size(); }
  int32_t block_size() const { return block_size_; }

  // Throws IntegrityError on a broken invariant. `pins` is what the leases say they hold, by entry; `blocks`
  // gets the block of every entry.
  void check_integrity(const std::unordered_map<const Entry*, int32_t>& pins,
                       std::vector<BlockId>& blocks) const;

 private:
  size_t offset_of(BlockId block) const { return static_cast<size_t>(block) * block_size_; }
  bool less(const Entry& a, const Entry& b) const;
  void split(BlockId top, const Entry& key, BlockId* below, BlockId* above);
  void join(BlockId low, BlockId high, BlockId* slot);
  void link_child(Entry* entry);
  void unlink_child(Entry* entry);
  std::vector<const Entry*> ordered_children(const Entry* parent) const;
  void check_entry(const Entry* entry) const;

  int32_t block_size_;
  Arena<Entry> entries_;  // by block
  Arena<Token> tokens_;   // those of the entry of block b from b * block_size on
  uint32_t priority_mask_;
  std::mt19937 random_;
  std::map<std::string, std::unique_ptr<Root>, std::less<>> roots_;
  EvictionOrder order_;  // of the entries that are not pinned
  size_t entry_count_ = 0;
};

}  // namespace npc
