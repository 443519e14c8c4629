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
// A request's life: acquire -> (extend | commit | truncate | fork)* -> release. A lease reads tokens [0,
// cached) from pinned entries and writes [cached, length) into blocks of its own. Where the cached tokens end
// inside a block, the first of its own blocks must begin with a copy of that block's first rows:
// Acquired::copy says so.
//
// Leases may share blocks that are not published: a fork shares those of its parent, a row of a batch those
// that an earlier row will compute. Only whole blocks are shared, so that no sharer has anything left to
// write there, and where one lease has block i in common with another, it has all blocks before it. So when
// one of them publishes a shared block, all of them take the entry on their paths: whoever reads a cached
// block has its entry pinned, always.
#pragma once

#include <algorithm>
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
#include "cache/sightings.h"
#include "cache/types.h"

namespace npc {

struct CacheOptions {
  BlockId block_count = 0;      // with the padding block; at least 2
  int32_t block_size = 128;     // tokens
  size_t block_bytes = 0;       // of one block in all planes together
  size_t watermark_blocks = 0;  // kept free after every commit and release, where evicting can do it
  bool whole_blocks = false;    // entries are block_size tokens: the rest is neither published nor found
  size_t pinned_blocks = ~size_t{0};  // that pins may hold together; leases are no pins
  EvictionPolicy policy = EvictionPolicy::kLru;
  bool second_sighting =
      false;               // a block is published when its prefix was committed before, by another request
  int priority_bits = 32;  // PrefixTree's hook for tests
};

struct CacheStats {
  uint64_t lookups = 0;            // acquire and lookup calls that succeeded
  uint64_t hits = 0;               // of these, with at least one cached token
  uint64_t lookup_tokens = 0;      // tokens asked for
  uint64_t hit_tokens = 0;         // of these, found
  uint64_t computed_tokens = 0;    // tokens that acquire() was asked for and left to compute
  uint64_t committed_blocks = 0;   // entries published
  uint64_t evicted_blocks = 0;     // entries evicted for room, or by clear()
  uint64_t superseded_blocks = 0;  // entries dropped because a longer one covers them
  size_t entries = 0, leases = 0, pinned_entries = 0;
  size_t blocks_of_pins = 0;
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

  // An entry off the path that is pinned nevertheless: its block is read (a copy's source) or in `blocks`.
  struct Held {
    Entry* entry;
    size_t index;  // of the block it stands for; its parent is path[index - 1]
  };

  // With `second_sighting`: what of the prompt was sighted, each prefix once, however often it is committed.
  struct Admission {
    std::vector<uint64_t> chains;  // of the leading whole blocks
    size_t blocks = 0;             // of these, the leading ones that were sighted before
    int64_t tokens = 0;            // sighted, with the longest part

    // The lease is to have `length` tokens, of which `whole` blocks are whole.
    void cut(size_t whole, int64_t length) {
      chains.resize(std::min(chains.size(), whole));
      blocks = std::min(blocks, whole);
      tokens = std::min(tokens, length);
    }
  };

  EntryOptions options;
  Root* root = nullptr;      // pinned
  std::vector<Entry*> path;  // pinned: full entries, found at acquire or published since
  std::vector<Held> held;
  Entry* tail = nullptr;  // pinned: the part of block path.size() that is published; only this lease, and
                          // those that share the block, may lengthen it
  std::vector<BlockId> blocks;  // the block table of [0, length)
  size_t borrowed = 0;  // blocks[0, borrowed) are path[0, borrowed)'s; the others are this lease's own, and
                        // count it among their users
  BlockId spare = 0;    // own too, not in the table: takes the rows that a truncation copies; 0 for none
  std::vector<Token> known;  // the request's tokens from path.size() * block_size on, as far as known
  int64_t cached = 0;        // tokens found at acquire
  int64_t length = 0;        // tokens there are slots for
  int64_t committed = 0;     // tokens the longest commit covered
  bool is_pin = false;       // made by pin()
  bool is_fork = false;      // made by fork(): of the same request, which uses an entry once
  Admission admission;
};

// A request for a lease, alone or as a row of a batch: `count` >= 1 tokens, of which at most `limit` need not
// be computed, 0 <= limit < count.
struct Prompt {
  const Token* tokens = nullptr;
  int64_t count = 0;
  int64_t limit = 0;
};

struct Acquired {
  Lease* lease = nullptr;
  int64_t cached_tokens = 0;  // in its blocks, once `copy` is done
  int64_t start =
      0;  // tokens that it need not compute: the cached ones, or those that an earlier row computes too
  std::optional<RowCopy> copy;
};

struct AcquiredBatch {
  std::vector<Acquired> rows;  // in the order of the prompts, and to be copied in it; empty: try again once
                               // ticket `wait_for` has passed
  Ticket wait_for = 0;
  Ticket written = 0;  // wait for this ticket before reading what was found: another stream writes it
  // What row r takes from an earlier row but cannot share, in a block of its own: K/V of new token
  // copy_sources[i] are to be written to slot copy_slots[i] too. New tokens [start, count) of all rows are
  // numbered from 0, row after row.
  std::vector<int64_t> copy_sources, copy_slots;
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

  // Leases for the prompts of one batch, or for one alone; all or none. Each takes the longer of what is
  // cached and what it shares with an earlier row, whose blocks it then shares although they are not computed
  // yet: until they are, the leases stand and fall together. Throws PoolExhausted where not even evicting
  // everything else would make room. `newest` is the newest ticket handed out: when it has passed, all blocks
  // that are fenced now are free. The requests will read on `stream`. `counted` = false leaves the hit
  // statistics alone. `options` are for the entries that are found, and for those that are published.
  AcquiredBatch acquire(std::string_view name_space, const std::vector<Prompt>& prompts, Ticket newest,
                        StreamId stream = nullptr, bool counted = true, const EntryOptions& options = {});

  // A lease of no length that pins what of the prompt is cached. Throws PinLimitExceeded.
  Acquired pin(std::string_view name_space, const Token* tokens, int64_t count);

  // One lease that has tokens [0, length) of another, 0 <= length <= its length: shares the whole blocks, and
  // begins a block of its own with a copy of the rest. To be used on the same stream.
  AcquiredBatch fork(const Lease* parent, int64_t length, Ticket newest);

  // Slots for `count` more tokens. Returns nothing when done; else the ticket to wait for before the next
  // try.
  std::optional<Ticket> extend(Lease* lease, int64_t count, Ticket newest);

  // Publishes tokens [0, count): their K/V are in the lease's slots, or will be once `written`, a ticket
  // taken on `stream`, has passed. cached <= count <= length; tokens must begin as acquired and as committed
  // before. With `whole_blocks` a part of a block is left out. Returns the number of tokens that were not
  // cached before and are now.
  int64_t commit(Lease* lease, const Token* tokens, int64_t count, Ticket written = 0,
                 StreamId stream = nullptr);

  // Tokens from `length` on are to be written anew, 0 <= length <= the lease's. In two steps. The first
  // changes nothing but for a spare block, where rows must be copied because others may read the block they
  // are in: `copy` says so. Returns nothing when done; else the ticket to wait for before the next try.
  std::optional<Ticket> prepare_truncate(Lease* lease, int64_t length, Ticket newest,
                                         std::optional<RowCopy>& copy);
  // The second: the lease is as short as prepared. What it gives back may be read until `last_use`.
  void truncate(Lease* lease, int64_t length, Ticket last_use);
  // Or, where the copy failed: the lease is as it was before.
  void cancel_truncate(Lease* lease, Ticket last_use);

  // Ends the lease and deletes it; what it did not commit is lost. Its blocks may be read until `last_use`.
  void release(Lease* lease, Ticket last_use);

  int64_t length(const Lease* lease) const;
  std::vector<BlockId> block_table(const Lease* lease) const;
  // Slot numbers block * block_size + offset of tokens [start, stop), stop <= length.
  std::vector<int64_t> slots(const Lease* lease, int64_t start, int64_t stop) const;

  // Every ticket up to `ticket` has passed: see BlockPool::pass(), of which each acquire, extend and fork
  // that finds too few free blocks is another call.
  void pass(Ticket ticket);

  void clear();  // evicts every unpinned entry, step by step: other calls may come in between
  void close();  // calls other than release and close throw CacheClosed from here on
  CacheStats stats() const;
  std::vector<std::vector<Token>> eviction_order() const;  // see PrefixTree
  void check_integrity() const;

 private:
  size_t blocks_for(int64_t tokens) const {
    return static_cast<size_t>((tokens + options_.block_size - 1) / options_.block_size);
  }
  struct Plan;
  void plan_rows(Plan& plan, const std::vector<Prompt>& prompts, bool with_parts);
  void plan_row(Plan& plan, const Prompt& prompt, size_t shared_with, int64_t shared_tokens, bool with_parts);
  void cancel(Plan& plan);
  void give_blocks(Plan& plan, size_t number, StreamId stream, AcquiredBatch& batch);
  void share_blocks(const Lease* from, size_t count, Lease* to);
  static void check_inside(const Lease* lease, int64_t length, const char* what);
  PathMatch match(Root* root, const Token* tokens, int64_t count) const;
  void count_lookup(int64_t tokens, int64_t hit_tokens);
  size_t room_possible() const;
  bool make_room(size_t blocks, const char* what);
  bool is_writable(const Lease* lease, int64_t length) const;
  std::vector<Token> known_until(const Lease* lease, int64_t length) const;
  void pin_all(const Lease* lease);
  void unpin_from(Lease* lease, size_t path_from, size_t off_path_from, Ticket last_use);
  void drop_from(const Lease* lease, size_t index, Ticket last_use);
  std::vector<Lease*> sharers_of(const Lease* lease, size_t index) const;
  bool clear_some(size_t& left);
  size_t pinned_anew(const Lease* pin) const;
  void count_pin(const Lease* pin, int32_t change);
  std::string pin_limit_message(size_t anew) const;
  int64_t admit(Lease* lease, const Token* tokens, int64_t count);
  void enforce_watermark();
  void evict();
  void use_path(const Lease* lease);
  void drop_if_covered(Entry* entry);
  void check_open() const;
  void check_commit(const Lease* lease, const Token* tokens, int64_t count) const;
  std::optional<int64_t> publish_block(Lease* lease, const std::vector<Lease*>& sharers, const Token* tokens,
                                       int32_t count, bool admitted, Ticket written, StreamId stream);
  std::string room_message(const char* what, size_t wanted_blocks) const;
  void check_table(const Lease* lease, std::vector<int32_t>& users) const;

  const CacheOptions options_;
  mutable std::mutex mutex_;
  BlockPool pool_;  // guarded by mutex_, as everything below
  PrefixTree tree_;
  std::optional<Sightings> sightings_;  // where second_sighting is on
  Arena<int32_t> pins_of_;              // by block: pins that hold its entry
  size_t blocks_of_pins_ = 0;           // with at least one
  std::unordered_set<Lease*> leases_;   // live ones, owned
  CacheStats counters_;                 // the counting fields only
  bool closed_ = false;
};

}  // namespace npc
