// The prefix tree: which token prefixes are cached, in which blocks, and which of them to evict first.
//
// Contract
//   - no lock, no memory, no vendor call: the facade holds the mutex, the device room holds the bytes
//   - one tree per namespace; an entry is found by comparing its tokens, one by one, with the request's.
//   There is
//     no hash to collide: the children of an entry form a treap ordered by their tokens, so that one descent
//     finds the exact child or, where there is none, the child with the longest common prefix. Its priorities
//     are random and seeded per process, so that no choice of prompts makes it deep
//   - costs: O(log children) comparisons a block to find, insert and remove (one comparison on an unforked
//   path),
//     O(1) to pin, unpin, touch and to find the entry to evict
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

#include "cache/types.h"

namespace npc {

struct Entry {
  Entry* parent = nullptr;    // null for a root only
  Entry* children = nullptr;  // top of the treap of children; only an entry of block_size tokens has any
  Entry* left = nullptr;      // treap links among siblings: left < this < right by tokens
  Entry* right = nullptr;
  Entry* older = nullptr;  // list by recency: linked if and only if pins == 0 and this is no root
  Entry* newer = nullptr;
  std::unique_ptr<Token[]>
      tokens;                 // never changed in place; only the lease that wrote the block may lengthen it
  Ticket last_use = 0;        // the block may be read by work up to this ticket
  Ticket written = 0;         // the block is written once this ticket has passed
  StreamId writer = nullptr;  // or, on this stream, for whatever is enqueued from now on
  uint32_t priority = 0;      // treap heap order: no child above its parent
  int32_t token_count = 0;    // 1 ... block_size; 0 for a root
  int32_t pins = 0;           // a pinned entry has pinned ancestors: leases pin whole paths
  BlockId block = 0;
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
  // `priority_bits` < 32 makes treap priorities collide; a hook for tests.
  explicit PrefixTree(int32_t block_size, int priority_bits = 32);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  Root* find_root(std::string_view name);
  Root* get_root(std::string_view name);  // made where there is none
  void drop_root_if_unused(Root* root);

  PathMatch match(Root* root, const Token* tokens, int64_t count) const;
  Found find_child(const Entry* parent, const Token* tokens, int32_t count) const;

  // A new, pinned child. No child may equal or begin with `tokens`.
  Entry* insert(Entry* parent, const Token* tokens, int32_t count, BlockId block);
  // The same entry with more tokens; tokens[0, token_count) must be what it holds.
  void lengthen(Entry* entry, const Token* tokens, int32_t count);
  // Unlinks and deletes an unpinned leaf; returns its block.
  BlockId remove(Entry* entry);
  // True where a sibling begins with all tokens of this leaf, so that it can serve no request alone.
  bool is_covered(const Entry* entry) const;

  void pin(Entry* entry);
  void unpin(Entry* entry);  // becomes the most recent; unpin the leaf first, its ancestors after it
  void touch(Entry* entry);  // likewise, where it is not pinned

  // The least recently used unpinned entry: always a leaf, because a path is touched leaf first and pinned
  // whole.
  Entry* oldest() const { return lru_.newer == &lru_ ? nullptr : lru_.newer; }

  // The unpinned entries, the next to be evicted first; each as all tokens from the root to its own last.
  std::vector<std::vector<Token>> eviction_order() const;

  size_t entry_count() const { return entry_count_; }
  size_t unpinned_count() const { return unpinned_count_; }
  int32_t block_size() const { return block_size_; }

  // Throws IntegrityError on a broken invariant. `pins` is what the leases say they hold, by entry; `blocks`
  // gets the block of every entry.
  void check_integrity(const std::unordered_map<const Entry*, int32_t>& pins,
                       std::vector<BlockId>& blocks) const;

 private:
  void link_newest(Entry* entry);
  static void unlink(Entry* entry);
  void link_child(Entry* entry);
  void unlink_child(Entry* entry);
  void delete_subtree(Entry* top);

  int32_t block_size_;
  uint32_t priority_mask_;
  std::mt19937 random_;
  std::map<std::string, std::unique_ptr<Root>, std::less<>> roots_;
  Entry lru_;  // ring: lru_.newer is the oldest, lru_.older the newest
  size_t entry_count_ = 0;
  size_t unpinned_count_ = 0;
};

}  // namespace npc
