#include "cache/cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace npc {

Cache::Cache(const CacheOptions& options)
    : options_(options),
      pool_(options.block_count),
      tree_(options.block_size, options.block_count, options.policy, options.priority_bits),
      pins_of_(static_cast<size_t>(options.block_count)) {
  if (options.second_sighting) sightings_.emplace(pool_.usable_blocks());
}

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
    auto touch = [&](Entry* entry) {
      if (counted) tree_.use(entry);
      tree_.touch(entry);
    };
    if (match.tail.entry != nullptr) {
      result.blocks.push_back(match.tail.entry->block);
      touch(match.tail.entry);
    }
    std::for_each(match.path.rbegin(), match.path.rend(), touch);
  }
  if (counted) count_lookup(count, result.cached_tokens);
  return result;
}

std::optional<Ticket> Cache::extend(Lease* lease, int64_t count, Ticket newest) {
  std::lock_guard lock(mutex_);
  check_open();
  const auto usable_tokens = static_cast<int64_t>(pool_.usable_blocks()) * options_.block_size;
  if (count > usable_tokens)
    throw PoolExhausted("the pool cannot hold " + std::to_string(count) + " tokens more: all of it holds " +
                        std::to_string(usable_tokens));
  size_t wanted = blocks_for(lease->length + count) - lease->blocks.size();
  lease->blocks.reserve(lease->blocks.size() + wanted);
  if (!make_room(wanted, "extending a request")) return newest;
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
    differ(first, tree_.tokens(entry), options_.block_size);
    first += options_.block_size;
  }
  differ(first, lease->known.data(), static_cast<int64_t>(lease->known.size()));
  if (lease->tail != nullptr) differ(first, tree_.tokens(lease->tail), lease->tail->token_count);
}

// The other leases that have block `index` of this one in their tables too.
std::vector<Lease*> Cache::sharers_of(const Lease* lease, size_t index) const {
  std::vector<Lease*> sharers;
  if (index >= lease->blocks.size() || pool_.users(lease->blocks[index]) < 2) return sharers;
  for (Lease* other : leases_) {
    if (other != lease && index < other->blocks.size() && other->blocks[index] == lease->blocks[index])
      sharers.push_back(other);
  }
  return sharers;
}

// Sights the prefixes of tokens [0, count) that this lease has not sighted yet. Returns the number of leading
// tokens that may be published.
int64_t Cache::admit(Lease* lease, const Token* tokens, int64_t count) {
  if (!sightings_) return count;
  const int32_t block_size = options_.block_size;
  Lease::Admission& seen = lease->admission;
  seen.chains.reserve(static_cast<size_t>(count / block_size));
  uint64_t chain = seen.chains.empty() ? sightings_->begin(lease->root->name) : seen.chains.back();
  while (static_cast<int64_t>(seen.chains.size() + 1) * block_size <= count) {
    const size_t index = seen.chains.size();
    chain = sightings_->extend(chain, tokens + index * block_size, block_size);
    seen.blocks += sightings_->sight(chain) && seen.blocks == index;
    seen.chains.push_back(chain);
  }
  const auto part = static_cast<int32_t>(count % block_size);
  const bool part_is_new = part > 0 && count > std::exchange(seen.tokens, std::max(seen.tokens, count));
  const bool again = part_is_new && sightings_->sight(sightings_->extend(chain, tokens + count - part, part));
  const auto admitted = static_cast<int64_t>(seen.blocks) * block_size;
  return again && admitted == count - part ? count : admitted;
}

// Publishes the next `count` tokens of the lease (one block's, or the part there is of the last one), for
// itself and for those of `sharers` that have the block too. Returns the number of tokens that were not
// cached before; nothing where they are not `admitted`, and are not cached.
std::optional<int64_t> Cache::publish_block(Lease* lease, const std::vector<Lease*>& sharers,
                                            const Token* tokens, int32_t count, bool admitted, Ticket written,
                                            StreamId stream) {
  size_t index = lease->path.size();
  BlockId block = lease->blocks[index];
  Entry* parent = index == 0 ? lease->root : lease->path.back();
  auto each = [&](auto&& act) {
    for (Lease* sharer : sharers) {
      if (index < sharer->blocks.size() && sharer->blocks[index] == block) act(sharer);
    }
    act(lease);
  };
  bool full = count == options_.block_size;
  Found found = tree_.find_child(parent, tokens, count);
  if (found.tokens == count) {  // there already, by another request or by an earlier commit
    if (!full) return 0;
    auto is_found = [&](const Lease::Held& held) { return held.entry == found.entry; };
    if (!lease->is_fork && std::none_of(lease->held.begin(), lease->held.end(), is_found))
      tree_.use(found.entry);
    tree_.prioritize(found.entry, lease->options.priority);
    each([&](Lease* user) {
      tree_.pin(found.entry);
      user->path.push_back(found.entry);
      if (Entry* tail = std::exchange(user->tail, nullptr)) user->held.push_back({tail, index});
    });
    return 0;
  }
  if (!admitted) return std::nullopt;
  Entry* entry = lease->tail;
  int64_t news = count - found.tokens;
  if (entry != nullptr) {
    tree_.lengthen(entry, tokens, count);
  } else {
    entry = tree_.insert(parent, tokens, count, block, lease->options.priority);  // pinned, for this lease
    pool_.publish(block);
    counters_.committed_blocks += 1;
    each([&](Lease* user) {
      if (user != lease) tree_.pin(entry);
      user->tail = entry;
    });
  }
  entry->written = written;
  entry->writer = stream;
  if (full) {
    each([&](Lease* user) {
      user->path.push_back(entry);
      user->tail = nullptr;
    });
  }
  return news;
}

int64_t Cache::commit(Lease* lease, const Token* tokens, int64_t count, Ticket written, StreamId stream) {
  std::lock_guard lock(mutex_);
  check_open();
  check_commit(lease, tokens, count);
  const int64_t block_size = options_.block_size;
  if (options_.whole_blocks) count -= count % block_size;
  const int64_t start = static_cast<int64_t>(lease->path.size()) * block_size;
  const int64_t new_start = std::max(start, count / block_size * block_size);
  // All that can throw comes first: what will be known of the tokens below the path's new end, and room.
  std::vector<Token> known;
  if (sightings_) {  // the path may end before `new_start`
    known = lease->known;
    if (count > start + static_cast<int64_t>(known.size())) known.assign(tokens + start, tokens + count);
  } else if (count >= start + static_cast<int64_t>(lease->known.size())) {
    if (count > new_start) known.assign(tokens + new_start, tokens + count);
  } else {
    known.assign(lease->known.begin() + (new_start - start), lease->known.end());
  }
  std::vector<Lease*> sharers = start < count ? sharers_of(lease, lease->path.size()) : std::vector<Lease*>();
  auto reserve = [&](Lease* user) {
    user->path.reserve(static_cast<size_t>(count / block_size));
    user->held.reserve(user->held.size() + 1);
  };
  reserve(lease);
  std::for_each(sharers.begin(), sharers.end(), reserve);
  const int64_t admitted = admit(lease, tokens, count);

  int64_t news = 0;
  for (int64_t at = start; at < count; at += block_size) {
    const int64_t stop = std::min(at + block_size, count);
    std::optional<int64_t> published = publish_block(
        lease, sharers, tokens + at, static_cast<int32_t>(stop - at), stop <= admitted, written, stream);
    if (!published) break;
    news += *published;
  }
  auto forget_path = [&](const Lease* of, std::vector<Token>& known) {
    size_t taken = of->path.size() * block_size - start;
    known.erase(known.begin(), known.begin() + static_cast<int64_t>(std::min(known.size(), taken)));
  };
  for (Lease* sharer : sharers) forget_path(sharer, sharer->known);
  if (sightings_) forget_path(lease, known);
  lease->known = std::move(known);
  lease->committed = count;
  enforce_watermark();
  return news;
}

void Cache::release(Lease* lease, Ticket last_use) {
  std::lock_guard lock(mutex_);
  leases_.erase(lease);
  std::unique_ptr<Lease> owned(lease);
  if (lease->is_pin) count_pin(lease, -1);
  drop_from(lease, lease->borrowed, last_use);
  if (lease->spare != 0) pool_.drop(lease->spare, last_use);
  unpin_from(lease, 0, 0, last_use);
  tree_.unpin(lease->root);
  tree_.drop_root_if_unused(lease->root);
  enforce_watermark();
}

// Gives back the lease's own blocks from block `index` on, in the order that the pool asks for.
void Cache::drop_from(const Lease* lease, size_t index, Ticket last_use) {
  for (size_t i = lease->blocks.size(); i > std::max(index, lease->borrowed); --i)
    pool_.drop(lease->blocks[i - 1], last_use);
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
  size_t left = stats().entries;  // those who go on publishing do not keep us
  // A mutex has no queue: only who waits longer than others need to wake up lets them have it.
  while (clear_some(left)) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

// Evicts up to `left` entries, and counts them off, but no more than others can wait for; false when done.
bool Cache::clear_some(size_t& left) {
  constexpr size_t kAtOnce = 1024;
  std::lock_guard lock(mutex_);
  check_open();
  for (size_t count = 0; count < kAtOnce; ++count, --left) {
    if (left == 0 || tree_.unpinned_count() == 0) return false;
    evict();
  }
  return true;
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

// Evicts until `blocks` are free; false where they are all to be had, but only once fenced ones have passed.
// Throws PoolExhausted and evicts nothing where they cannot be had at all, so that a request that is too
// large costs nobody their entries.
bool Cache::make_room(size_t blocks, const char* what) {
  auto without_eviction = [&] { return pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced); };
  if (room_possible() < blocks) throw PoolExhausted(room_message(what, blocks));
  while (without_eviction() < blocks) evict();
  pool_.pass(0);  // where more was due than the last call took
  return pool_.count(BlockState::kFree) >= blocks;
}

// Every block of an unpinned entry can be had: who reads a cached block has its entry pinned.
size_t Cache::room_possible() const {
  return pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) + tree_.unpinned_count();
}

// Fenced blocks count as free here: they will be, without anything more being evicted.
void Cache::enforce_watermark() {
  while (pool_.count(BlockState::kFree) + pool_.count(BlockState::kFenced) < options_.watermark_blocks &&
         tree_.unpinned_count() > 0) {
    evict();
  }
}

void Cache::evict() {
  Ticket last_use = tree_.first_to_evict()->last_use;
  pool_.retire(tree_.evict(), last_use);
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
  stats.blocks_of_pins = blocks_of_pins_;
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

}  // namespace npc
