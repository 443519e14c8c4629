// The facade of the cache room: the prefix tree, the block pool and the leases behind one mutex.
//
// Contract
//   - thread-safe; no call here reads or writes device memory, calls the vendor's runtime or Python
//   - a call either does all it says or throws and changes nothing (P6)
//   - tokens are [0, count) of a prompt; block i of a table holds tokens [i * block_size, (i + 1) *
//   block_size)
//   - tickets (types.h) come from the caller, who takes one after it has enqueued its last use of a lease's
//   blocks
//
// A request's life: acquire -> (extend)* -> (commit)* -> release. A lease reads tokens [0, cached) from
// pinned entries and writes [cached, length) into blocks of its own. Where the cached tokens end inside a
// block, the first of its own blocks must begin with a copy of that block's first rows: Acquired::copy says
// so.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "cache/block_pool.h"
#include "cache/prefix_tree.h"
#include "cache/types.h"

namespace npc {

struct CacheOptions {
  BlockId block_count = 0;      // with the padding block; at least 2
  int32_t block_size = 128;     // tokens
  size_t block_bytes = 0;       // of one block in all planes together
  size_t watermark_blocks = 0;  // kept free after every commit and release, where evicting can do it
  bool whole_blocks = false;    // entries are block_size tokens: the rest is neither published nor found
  int priority_bits = 32;       // PrefixTree's hook for tests
};

struct CacheStats {
  uint64_t lookups = 0;            // acquire and lookup calls that succeeded
  uint64_t hits = 0;               // of these, with at least one cached token
  uint64_t lookup_tokens = 0;      // tokens asked for
  uint64_t hit_tokens = 0;         // of these, found
  uint64_t computed_tokens = 0;    // tokens that acquire() was asked for and did not find
  uint64_t committed_blocks = 0;   // entries published
  uint64_t evicted_blocks = 0;     // entries evicted for room, or by clear()
  uint64_t superseded_blocks = 0;  // entries dropped because a longer one covers them
  size_t entries = 0, leases = 0, pinned_entries = 0;
  size_t free_blocks = 0, leased_blocks = 0, cached_blocks = 0, fenced_blocks = 0, usable_blocks = 0;
};

// Rows [0, rows) of block `from` are to be copied to the same rows of block `to`.
struct RowCopy {
  BlockId from = 0, to = 0;
  int32_t rows = 0;
};

class Cache;

// State of one request. Guarded by the cache's mutex; callers hold it by pointer, pass it back, and use it no
// more once it is released.
class Lease {
 public:
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

 private:
  friend class Cache;
  Lease() = default;

  Root* root = nullptr;      // pinned
  std::vector<Entry*> path;  // pinned: full entries, found at acquire or published since
  std::vector<Entry*>
      held;               // pinned: off the path, but their blocks are read (a copy's source) or in `blocks`
  Entry* tail = nullptr;  // pinned: the part of a block published last; only this lease may lengthen it
  std::vector<BlockId>
      blocks;  // the block table of [0, length); a block is this lease's own while it is kLeased
  std::vector<Token> known;  // the request's tokens from path.size() * block_size on, as far as known
  int64_t cached = 0;        // tokens found at acquire
  int64_t length = 0;        // tokens there are slots for
  int64_t committed = 0;     // tokens the longest commit covered
};

struct Acquired {
  Lease* lease = nullptr;  // null: try again once ticket `wait_for` has passed
  int64_t cached_tokens = 0;
  std::optional<RowCopy> copy;
  Ticket wait_for = 0;
  Ticket written = 0;  // wait for this ticket before reading what was found: another stream writes it
};

struct LookedUp {
  int64_t cached_tokens = 0;
  std::vector<BlockId> blocks;  // of [0, cached_tokens)
};

class Cache {
 public:
  explicit Cache(const CacheOptions& options);
  ~Cache();

  // What of the prompt is cached. Pins nothing: entries may go with the next call.
  LookedUp lookup(std::string_view name_space, const Token* tokens, int64_t count, bool counted = true);

  // A lease for a prompt of `count` >= 1 tokens. At most `limit` of them are taken from the cache, 0 <= limit
  // < count. Throws PoolExhausted where not even evicting everything else would make room. `newest` is the
  // newest ticket handed out: when it has passed, all blocks that are fenced now are free. The request will
  // read on `stream`. `counted` = false leaves the hit statistics alone.
  Acquired acquire(std::string_view name_space, const Token* tokens, int64_t count, int64_t limit,
                   Ticket newest, StreamId stream = nullptr, bool counted = true);

  // Slots for `count` more tokens. Returns nothing when done; else the ticket to wait for before the next
  // try.
  std::optional<Ticket> extend(Lease* lease, int64_t count, Ticket newest);

  // Publishes tokens [0, count): their K/V are in the lease's slots, or will be once `written`, a ticket
  // taken on `stream`, has passed. cached <= count <= length; tokens must begin as acquired and as committed
  // before. With `whole_blocks` a part of a block is left out. Returns the number of tokens that were not
  // cached before.
  int64_t commit(Lease* lease, const Token* tokens, int64_t count, Ticket written = 0,
                 StreamId stream = nullptr);

  // Ends the lease and deletes it; what it did not commit is lost. Its blocks may be read until `last_use`.
  void release(Lease* lease, Ticket last_use);

  int64_t length(const Lease* lease) const;
  std::vector<BlockId> block_table(const Lease* lease) const;
  // Slot numbers block * block_size + offset of tokens [start, stop), stop <= length.
  std::vector<int64_t> slots(const Lease* lease, int64_t start, int64_t stop) const;

  // Every ticket up to `ticket` has passed.
  void pass(Ticket ticket);

  void clear();  // evicts every unpinned entry
  void close();  // calls other than release and close throw CacheClosed from here on
  CacheStats stats() const;
  std::vector<std::vector<Token>> eviction_order() const;  // see PrefixTree
  void check_integrity() const;

 private:
  PathMatch match(Root* root, const Token* tokens, int64_t count) const;
  void count_lookup(int64_t tokens, int64_t hit_tokens);
  bool make_room(size_t blocks);
  size_t room_possible() const;
  void enforce_watermark();
  void evict_oldest();
  void drop_if_covered(Entry* entry);
  void check_open() const;
  void check_commit(const Lease* lease, const Token* tokens, int64_t count) const;
  int64_t publish_block(Lease* lease, const Token* tokens, int32_t count, Ticket written, StreamId stream);
  std::string room_message(const char* what, size_t wanted_blocks) const;

  const CacheOptions options_;
  mutable std::mutex mutex_;
  BlockPool pool_;  // guarded by mutex_, as everything below
  PrefixTree tree_;
  std::unordered_set<Lease*> leases_;  // live ones, owned
  CacheStats counters_;                // the counting fields only
  bool closed_ = false;
};

}  // namespace npc
