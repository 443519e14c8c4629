#include "cache/cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace npc {
namespace {

size_t blocks_for(int64_t tokens, int32_t block_size) {
  return static_cast<size_t>((tokens + block_size - 1) / block_size);
}

}  // namespace

Cache::Cache(const CacheOptions& options)
    : options_(options), pool_(options.block_count), tree_(options.block_size, options.priority_bits) {}

Cache::~Cache() {
  for (Lease* lease : leases_) delete lease;
}

LookedUp Cache::lookup(std::string_view name_space, const Token* tokens, int64_t count, bool counted) {
  std::lock_guard lock(mutex_);
  check_open();
  LookedUp result;
  if (Root* root = tree_.find_root(name_space)) {
    PathMatch match = this->match(root, tokens, count);
    result.cached_tokens = match.tokens;
    for (Entry* entry : match.path) result.blocks.push_back(entry->block);
    if (match.tail.entry != nullptr) {
      result.blocks.push_back(match.tail.entry->block);
      tree_.touch(match.tail.entry);
    }
    for (auto entry = match.path.rbegin(); entry != match.path.rend(); ++entry) tree_.touch(*entry);
  }
  if (counted) count_lookup(count, result.cached_tokens);
  return result;
}

Acquired Cache::acquire(std::string_view name_space, const Token* tokens, int64_t count, int64_t limit,
                        Ticket newest, StreamId stream, bool counted) {
  std::lock_guard lock(mutex_);
  check_open();
  size_t table_blocks = blocks_for(count, options_.block_size);
  auto lease = std::unique_ptr<Lease>(new Lease);
  lease->blocks.reserve(table_blocks);
  leases_.reserve(leases_.size() + 1);

  Root* root = tree_.get_root(name_space);
  PathMatch match = this->match(root, tokens, limit);
  for (Entry* entry : match.path) {
    tree_.pin(entry);
    lease->blocks.push_back(entry->block);
  }
  tree_.pin(root);
  if (match.tail.entry != nullptr) tree_.pin(match.tail.entry);
  auto unpin_all = [&] {
    if (match.tail.entry != nullptr) tree_.unpin(match.tail.entry);
    for (auto entry = match.path.rbegin(); entry != match.path.rend(); ++entry) tree_.unpin(*entry);
    tree_.unpin(root);
    tree_.drop_root_if_unused(root);
  };

  Acquired result;
  try {
    size_t own_blocks = table_blocks - match.path.size();
    lease->known.assign(tokens + match.path.size() * options_.block_size, tokens + count);
    lease->held.reserve(1);
    if (match.tail.entry != nullptr && room_possible() < own_blocks) {
      // The part to copy from may be the very entry that must go: rather compute those tokens again than
      // fail.
      tree_.unpin(match.tail.entry);
      match.drop_tail();
    }
    if (!make_room(own_blocks)) {
      if (pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) < own_blocks)
        throw PoolExhausted(room_message("a request", own_blocks));
      unpin_all();
      result.wait_for = newest;
      return result;
    }
    BlockId after = lease->blocks.empty() ? 0 : lease->blocks.back();
    pool_.allocate(own_blocks, after, lease->blocks);
  } catch (...) {
    unpin_all();
    throw;
  }

  if (match.tail.entry != nullptr) {
    BlockId own = lease->blocks[match.path.size()];
    result.copy = RowCopy{match.tail.entry->block, own, match.tail.tokens};
  }
  auto read = [&](const Entry* entry) {
    if (entry->writer != stream) result.written = std::max(result.written, entry->written);
  };
  std::for_each(match.path.begin(), match.path.end(), read);
  if (match.tail.entry != nullptr) read(match.tail.entry);
  lease->root = root;
  lease->path = std::move(match.path);
  if (match.tail.entry != nullptr) lease->held.push_back(match.tail.entry);
  lease->cached = match.tokens;
  lease->length = count;
  if (counted) {
    count_lookup(count, lease->cached);
    counters_.computed_tokens += count - lease->cached;
  }
  result.cached_tokens = lease->cached;
  result.lease = lease.release();
  leases_.insert(result.lease);
  return result;
}

std::optional<Ticket> Cache::extend(Lease* lease, int64_t count, Ticket newest) {
  std::lock_guard lock(mutex_);
  check_open();
  const auto usable_tokens = static_cast<int64_t>(pool_.usable_blocks()) * options_.block_size;
  if (count > usable_tokens)
    throw PoolExhausted("the pool cannot hold " + std::to_string(count) + " tokens more: all of it holds " +
                        std::to_string(usable_tokens));
  size_t wanted = blocks_for(lease->length + count, options_.block_size) - lease->blocks.size();
  lease->blocks.reserve(lease->blocks.size() + wanted);
  if (!make_room(wanted)) {
    if (pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) < wanted)
      throw PoolExhausted(room_message("extending a request", wanted));
    return newest;
  }
  pool_.allocate(wanted, lease->blocks.empty() ? 0 : lease->blocks.back(), lease->blocks);
  lease->length += count;
  return std::nullopt;
}

void Cache::check_commit(const Lease* lease, const Token* tokens, int64_t count) const {
  auto number = [](int64_t value) { return std::to_string(value); };
  if (count < lease->cached || count < lease->committed)
    throw std::invalid_argument(
        "commit of " + number(count) + " tokens: at least " +
        number(std::max(lease->cached, lease->committed)) +
        " are cached or committed already; commit the whole sequence from its first token");
  if (count > lease->length)
    throw std::invalid_argument("commit of " + number(count) + " tokens: the lease has slots for " +
                                number(lease->length) + "; extend() it before computing more");
  auto differ = [&](int64_t first, const Token* expected, int64_t expected_count) {
    int64_t compared = std::min(expected_count, count - first);
    if (compared <= 0 || std::memcmp(tokens + first, expected, compared * sizeof(Token)) == 0) return;
    int64_t at = first;
    while (tokens[at] == expected[at - first]) ++at;
    throw std::invalid_argument("commit of other tokens than were acquired: token " + number(at) + " is " +
                                number(tokens[at]) + ", was " + number(expected[at - first]));
  };
  int64_t first = 0;
  for (const Entry* entry : lease->path) {
    differ(first, entry->tokens.get(), options_.block_size);
    first += options_.block_size;
  }
  differ(first, lease->known.data(), static_cast<int64_t>(lease->known.size()));
}

// Publishes the next `count` tokens of the lease (one block's, or the part there is of the last one).
int64_t Cache::publish_block(Lease* lease, const Token* tokens, int32_t count, Ticket written,
                             StreamId stream) {
  size_t index = lease->path.size();
  Entry* parent = index == 0 ? lease->root : lease->path.back();
  bool full = count == options_.block_size;
  Found found = tree_.find_child(parent, tokens, count);
  if (found.tokens == count) {  // there already, by another request or by an earlier commit
    if (!full) return 0;
    tree_.pin(found.entry);
    lease->path.push_back(found.entry);
    if (Entry* tail = std::exchange(lease->tail, nullptr)) lease->held.push_back(tail);
    return 0;
  }
  Entry* entry = lease->tail;
  int64_t news = count - found.tokens;
  if (entry != nullptr) {
    tree_.lengthen(entry, tokens, count);
  } else {
    entry = tree_.insert(parent, tokens, count, lease->blocks[index]);
    pool_.publish(entry->block);
    counters_.committed_blocks += 1;
  }
  entry->written = written;
  entry->writer = stream;
  if (full) lease->path.push_back(entry);
  lease->tail = full ? nullptr : entry;
  return news;
}

int64_t Cache::commit(Lease* lease, const Token* tokens, int64_t count, Ticket written, StreamId stream) {
  std::lock_guard lock(mutex_);
  check_open();
  check_commit(lease, tokens, count);
  const int64_t block_size = options_.block_size;
  if (options_.whole_blocks) count -= count % block_size;
  int64_t start = static_cast<int64_t>(lease->path.size()) * block_size;
  std::vector<Token>
      known;  // of what will remain below the path's end; made first, so that nothing can throw between
  int64_t new_start = count / block_size * block_size;
  if (count >= start + static_cast<int64_t>(lease->known.size())) {
    known.assign(tokens + new_start, tokens + count);
  } else {
    known.assign(lease->known.begin() + (new_start - start), lease->known.end());
  }
  lease->path.reserve(static_cast<size_t>(count / block_size));
  lease->held.reserve(lease->held.size() + 1);

  int64_t news = 0;
  for (int64_t at = start; at < count; at += block_size) {
    news += publish_block(lease, tokens + at, static_cast<int32_t>(std::min(block_size, count - at)), written,
                          stream);
  }
  lease->known = std::move(known);
  lease->committed = count;
  enforce_watermark();
  return news;
}

void Cache::release(Lease* lease, Ticket last_use) {
  std::lock_guard lock(mutex_);
  leases_.erase(lease);
  std::unique_ptr<Lease> owned(lease);
  for (BlockId block : lease->blocks) {
    if (pool_.state(block) == BlockState::kLeased) pool_.retire(block, last_use);
  }
  if (lease->tail != nullptr) lease->held.push_back(lease->tail);
  for (Entry* part : lease->held) {
    part->last_use = std::max(part->last_use, last_use);
    tree_.unpin(part);
    drop_if_covered(part);
  }
  for (auto entry = lease->path.rbegin(); entry != lease->path.rend(); ++entry) {
    (*entry)->last_use = std::max((*entry)->last_use, last_use);
    tree_.unpin(*entry);
  }
  tree_.unpin(lease->root);
  tree_.drop_root_if_unused(lease->root);
  enforce_watermark();
}

int64_t Cache::length(const Lease* lease) const {
  std::lock_guard lock(mutex_);
  return lease->length;
}

std::vector<BlockId> Cache::block_table(const Lease* lease) const {
  std::lock_guard lock(mutex_);
  check_open();
  return lease->blocks;
}

std::vector<int64_t> Cache::slots(const Lease* lease, int64_t start, int64_t stop) const {
  std::lock_guard lock(mutex_);
  check_open();
  if (start < 0 || stop < start || stop > lease->length)
    throw std::invalid_argument("slots(" + std::to_string(start) + ", " + std::to_string(stop) +
                                "): not a half-open interval inside [0, " + std::to_string(lease->length) +
                                ")");
  std::vector<int64_t> slots(static_cast<size_t>(stop - start));
  const int64_t block_size = options_.block_size;
  for (int64_t at = start; at < stop; ++at) {
    slots[at - start] = lease->blocks[at / block_size] * block_size + at % block_size;
  }
  return slots;
}

void Cache::pass(Ticket ticket) {
  std::lock_guard lock(mutex_);
  pool_.pass(ticket);
}

void Cache::clear() {
  std::lock_guard lock(mutex_);
  check_open();
  while (tree_.oldest() != nullptr) evict_oldest();
}

void Cache::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
}

PathMatch Cache::match(Root* root, const Token* tokens, int64_t count) const {
  PathMatch match = tree_.match(root, tokens, count);
  if (options_.whole_blocks) match.drop_tail();
  return match;
}

void Cache::count_lookup(int64_t tokens, int64_t hit_tokens) {
  counters_.lookups += 1;
  counters_.hits += hit_tokens > 0;
  counters_.lookup_tokens += tokens;
  counters_.hit_tokens += hit_tokens;
}

// Evicts until `blocks` are free; false where that is not to be had now. Evicts nothing where it cannot be
// had at all, so that a request that is too large costs nobody their entries.
bool Cache::make_room(size_t blocks) {
  size_t possible =
      pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) + tree_.unpinned_count();
  if (possible < blocks) return false;
  while (pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) < blocks) evict_oldest();
  return pool_.count(BlockState::kFree) >= blocks;
}

size_t Cache::room_possible() const {
  return pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) + tree_.unpinned_count();
}

// Fenced blocks count as free here: they will be, without anything more being evicted.
void Cache::enforce_watermark() {
  while (pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) < options_.watermark_blocks &&
         tree_.oldest() != nullptr) {
    evict_oldest();
  }
}

void Cache::evict_oldest() {
  Entry* entry = tree_.oldest();
  Ticket last_use = entry->last_use;
  pool_.retire(tree_.remove(entry), last_use);
  counters_.evicted_blocks += 1;
}

void Cache::drop_if_covered(Entry* entry) {
  if (entry->pins > 0 || !tree_.is_covered(entry)) return;
  Ticket last_use = entry->last_use;
  pool_.retire(tree_.remove(entry), last_use);
  counters_.superseded_blocks += 1;
}

void Cache::check_open() const {
  if (closed_) throw CacheClosed("the cache was closed; make a new one");
}

std::string Cache::room_message(const char* what, size_t wanted_blocks) const {
  auto part = [&](BlockState state) {
    return std::to_string(pool_.count(state) * options_.block_bytes) + " bytes";
  };
  return std::string("the pool cannot hold ") + what + " of " + std::to_string(wanted_blocks) + " blocks (" +
         std::to_string(wanted_blocks * options_.block_bytes) + " bytes): free " + part(BlockState::kFree) +
         ", fenced " + part(BlockState::kFenced) + ", leased " + part(BlockState::kLeased) + ", cached " +
         part(BlockState::kCached) + ", of which " +
         std::to_string(tree_.unpinned_count() * options_.block_bytes) +
         " bytes could be evicted. Release leases, or make the pool larger";
}

CacheStats Cache::stats() const {
  std::lock_guard lock(mutex_);
  CacheStats stats = counters_;
  stats.entries = tree_.entry_count();
  stats.pinned_entries = tree_.entry_count() - tree_.unpinned_count();
  stats.leases = leases_.size();
  stats.free_blocks = pool_.count(BlockState::kFree);
  stats.leased_blocks = pool_.count(BlockState::kLeased);
  stats.cached_blocks = pool_.count(BlockState::kCached);
  stats.fenced_blocks = pool_.count(BlockState::kFenced);
  stats.usable_blocks = pool_.usable_blocks();
  return stats;
}

std::vector<std::vector<Token>> Cache::eviction_order() const {
  std::lock_guard lock(mutex_);
  return tree_.eviction_order();
}

void Cache::check_integrity() const {
  std::lock_guard lock(mutex_);
  pool_.check_integrity();
  std::unordered_map<const Entry*, int32_t> pins;
  std::vector<char> owned(options_.block_count, 0);
  size_t leased = 0;
  for (const Lease* lease : leases_) {
    ++pins[lease->root];
    for (const Entry* entry : lease->path) ++pins[entry];
    for (const Entry* entry : lease->held) ++pins[entry];
    if (lease->tail != nullptr) ++pins[lease->tail];
    if (lease->blocks.size() != blocks_for(lease->length, options_.block_size))
      throw IntegrityError("a lease's block table does not fit its length");
    for (BlockId block : lease->blocks) {
      if (pool_.state(block) != BlockState::kLeased) continue;
      if (owned[block]++) throw IntegrityError("block " + std::to_string(block) + " is leased twice");
      ++leased;
    }
  }
  if (leased != pool_.count(BlockState::kLeased))
    throw IntegrityError("leased blocks differ from the leases'");
  std::vector<BlockId> cached;
  tree_.check_integrity(pins, cached);
  for (BlockId block : cached) {
    if (pool_.state(block) != BlockState::kCached || owned[block]++)
      throw IntegrityError("block " + std::to_string(block) + " is not the block of exactly one entry");
  }
  if (cached.size() != pool_.count(BlockState::kCached))
    throw IntegrityError("cached blocks differ from the entries");
}

}  // namespace npc
