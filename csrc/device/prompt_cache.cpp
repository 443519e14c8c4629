#include "device/prompt_cache.h"

#include <algorithm>
#include <utility>

namespace npc::device {
namespace {

CacheOptions cache_options(const PoolOptions& pool, const Region& region) {
  size_t usable_bytes = (region.block_count() - 1) * region.block_bytes();
  if (pool.watermark_bytes >= usable_bytes)
    throw std::invalid_argument("watermark_bytes=" + std::to_string(pool.watermark_bytes) +
                                " leaves nothing to cache in: it must be below the " +
                                std::to_string(usable_bytes) + " bytes of the pool's blocks");
  CacheOptions options;
  options.block_count = region.block_count();
  options.block_size = pool.block_size;
  options.block_bytes = region.block_bytes();
  options.watermark_blocks = (pool.watermark_bytes + region.block_bytes() - 1) / region.block_bytes();
  options.whole_blocks = pool.whole_blocks;
  options.pinned_blocks = pool.max_pinned_bytes / region.block_bytes();
  options.policy = pool.policy;
  options.second_sighting = pool.second_sighting;
  options.priority_bits = pool.priority_bits;
  return options;
}

}  // namespace

PromptCache::PromptCache(const PoolOptions& options)
    : runtime_(std::make_shared<Runtime>(options.acl_lib, options.device)),
      fences_(std::make_unique<Fences>(runtime_, options.fenced)),
      region_(std::make_shared<Region>(runtime_, options.pool_bytes, options.plane_block_bytes,
                                       options.block_size)),
      cache_(std::make_unique<Cache>(cache_options(options, *region_))),
      block_bytes_(region_->block_bytes()) {
  Runtime::Scope scope(*runtime_);
  runtime_->check(runtime_->api().aclrtCreateStream(&own_stream_), "aclrtCreateStream");
}

PromptCache::~PromptCache() {
  if (own_stream_ == nullptr || !runtime_->may_call()) return;
  try {
    Runtime::Scope scope(*runtime_);
    runtime_->api().aclrtSynchronizeStream(own_stream_);
    runtime_->api().aclrtDestroyStream(own_stream_);
  } catch (const std::exception&) {
    // No context to be had: the runtime takes the stream back with the process.
  }
}

void PromptCache::check_usable() const {
  runtime_->check_process();
  if (closed_) throw CacheClosed("the cache was closed; make a new one");
}

std::shared_ptr<Region> PromptCache::region() const {
  check_usable();
  std::lock_guard lock(region_mutex_);
  if (region_ == nullptr) throw CacheClosed("the cache was closed; make a new one");
  return region_;
}

LookedUp PromptCache::lookup(std::string_view name_space, const Token* tokens, int64_t count) {
  check_usable();
  return cache_->lookup(name_space, tokens, count, true);
}

// Handles for what `try_once` lends, as soon as it does: it returns no rows where it must wait for a ticket.
template <typename Lend>
AcquiredBatch PromptCache::lend(acl::Stream on, std::vector<std::shared_ptr<LeaseHandle>>& handles,
                                Lend&& try_once) {
  for (;;) {
    pass_fences();
    AcquiredBatch batch = try_once();
    if (batch.rows.empty()) {
      fences_->wait(batch.wait_for);
      continue;
    }
    // From here on the handles release, whatever happens: after the copies that were enqueued (P5, P6).
    for (const Acquired& row : batch.rows)
      handles.push_back(std::make_shared<LeaseHandle>(shared_from_this(), row.lease, on, row.cached_tokens));
    return batch;
  }
}

// Leases whose cached parts may be read on `on`, but for the rows that are still to be copied.
AcquiredBatch PromptCache::lease(std::string_view name_space, const std::vector<Prompt>& prompts,
                                 acl::Stream on, bool counted, const EntryOptions& options,
                                 std::vector<std::shared_ptr<LeaseHandle>>& handles) {
  AcquiredBatch batch = lend(on, handles, [&] {
    return cache_->acquire(name_space, prompts, fences_->newest(), on, counted, options);
  });
  if (batch.written != 0) fences_->wait(batch.written);
  return batch;
}

void PromptCache::copy_rows(const AcquiredBatch& batch, acl::Stream on) {
  bool any = false;
  for (const Acquired& row : batch.rows) {
    if (!row.copy) continue;
    region()->copy_rows(*row.copy, on);
    any = true;
  }
  if (any && on == own_stream_) synchronize_own_stream();
}

std::shared_ptr<LeaseHandle> PromptCache::acquire(std::string_view name_space, const Token* tokens,
                                                  int64_t count, int64_t limit, acl::Stream stream,
                                                  const EntryOptions& options) {
  return acquire(name_space, {{tokens, count, limit}}, stream, options).leases[0];
}

Batch PromptCache::acquire(std::string_view name_space, const std::vector<Prompt>& prompts,
                           acl::Stream stream, const EntryOptions& options) {
  check_usable();
  acl::Stream on = or_own(stream);
  Batch result;
  AcquiredBatch batch = lease(name_space, prompts, on, true, options, result.leases);
  copy_rows(batch, on);
  for (const Acquired& row : batch.rows) result.starts.push_back(row.start);
  result.copy_sources = std::move(batch.copy_sources);
  result.copy_slots = std::move(batch.copy_slots);
  return result;
}

std::shared_ptr<LeaseHandle> PromptCache::pin(std::string_view name_space, const Token* tokens,
                                              int64_t count) {
  check_usable();
  Acquired pinned = cache_->pin(name_space, tokens, count);
  return std::make_shared<LeaseHandle>(shared_from_this(), pinned.lease, own_stream_, pinned.cached_tokens);
}

int64_t PromptCache::insert(std::string_view name_space, const Token* tokens, int64_t count,
                            const std::vector<Source>& sources, acl::Stream stream,
                            const EntryOptions& options) {
  std::shared_ptr<Region> region = this->region();
  acl::Stream on = or_own(stream);
  if (cache_->lookup(name_space, tokens, count, false).cached_tokens == count) return 0;
  std::vector<std::shared_ptr<LeaseHandle>> handles;
  AcquiredBatch batch = lease(name_space, {{tokens, count, count - 1}}, on, false, options, handles);
  const std::shared_ptr<LeaseHandle>& handle = handles[0];
  int64_t cached = batch.rows[0].cached_tokens;
  try {
    if (batch.rows[0].copy) region->copy_rows(*batch.rows[0].copy, on);
    std::vector<Source> rest = sources;
    for (size_t p = 0; p < rest.size(); ++p) {
      rest[p].data = static_cast<const char*>(rest[p].data) +
                     cached * (region->plane_block_bytes(p) / region->block_size());
    }
    region->fill(rest, handle->block_table(), cached, count - cached, on);
  } catch (...) {
    // What was enqueued on our own stream reads the caller's memory: not after this call.
    try {
      if (stream == nullptr) synchronize_own_stream();
    } catch (const acl::AclError&) {
      // The first error says more.
    }
    throw;
  }
  if (stream == nullptr) synchronize_own_stream();
  int64_t news = handle->commit(tokens, count);
  handle->release();
  return news;
}

void PromptCache::pass_fences() { cache_->pass(fences_->poll()); }

void PromptCache::extend(Lease* lease, int64_t count) {
  check_usable();
  for (;;) {
    pass_fences();
    std::optional<Ticket> ticket = cache_->extend(lease, count, fences_->newest());
    if (!ticket) return;
    fences_->wait(*ticket);
  }
}

void PromptCache::truncate(Lease* lease, int64_t length, acl::Stream on) {
  std::shared_ptr<Region> region = this->region();
  std::optional<RowCopy> copy;
  for (;;) {
    pass_fences();
    std::optional<Ticket> ticket = cache_->prepare_truncate(lease, length, fences_->newest(), copy);
    if (!ticket) break;
    fences_->wait(*ticket);
  }
  try {
    if (copy) region->copy_rows(*copy, on);
    if (copy && on == own_stream_) synchronize_own_stream();
  } catch (...) {
    cache_->cancel_truncate(lease, fences_->take(on));
    throw;
  }
  cache_->truncate(lease, length, fences_->take(on));
  pass_fences();
}

void PromptCache::release(Lease* lease, acl::Stream stream) {
  Ticket ticket = fences_->take(stream);
  cache_->release(lease, ticket);
  pass_fences();
}

void PromptCache::synchronize_own_stream() {
  Runtime::Scope scope(*runtime_);
  runtime_->check(runtime_->api().aclrtSynchronizeStream(own_stream_), "aclrtSynchronizeStream");
}

void PromptCache::clear() {
  check_usable();
  cache_->clear();
}

void PromptCache::check_integrity() const {
  runtime_->check_process();
  cache_->check_integrity();
}

std::vector<std::vector<Token>> PromptCache::eviction_order() const {
  check_usable();
  return cache_->eviction_order();
}

void PromptCache::close() {
  runtime_->check_process();
  closed_ = true;
  cache_->close();
  std::lock_guard lock(region_mutex_);
  if (region_ == nullptr) return;
  if (region_.use_count() == 1) region_->free();  // else the last tensor over it frees it
  region_.reset();
}

CacheStats PromptCache::stats() const {
  check_usable();
  return cache_->stats();
}

std::array<CopyCounts, 4> PromptCache::copies() const { return region()->copies(); }

LeaseHandle::LeaseHandle(std::shared_ptr<PromptCache> cache, Lease* lease, acl::Stream stream,
                         int64_t cached_tokens)
    : cache_(std::move(cache)), lease_(lease), stream_(stream), cached_tokens_(cached_tokens) {}

LeaseHandle::~LeaseHandle() {
  // At exit and in a forked child there is nothing to give back to, and no lock that is safe to take.
  if (lease_ == nullptr || !cache_->runtime_->may_call()) return;
  try {
    cache_->release(lease_, stream_);
  } catch (const std::exception&) {
    // Out of memory; a destructor has nobody to tell.
  }
}

// In a forked child another thread's lock may be held for ever: look before locking.
std::unique_lock<std::mutex> LeaseHandle::lock() const {
  cache_->runtime_->check_process();
  return std::unique_lock(mutex_);
}

Lease* LeaseHandle::live() const {
  cache_->check_usable();
  if (lease_ == nullptr) throw LeaseReleased("the lease was released; acquire() a new one");
  return lease_;
}

int64_t LeaseHandle::length() const {
  auto held = lock();
  return cache_->cache_->length(live());
}

std::vector<BlockId> LeaseHandle::block_table() const {
  auto held = lock();
  return cache_->cache_->block_table(live());
}

std::vector<int64_t> LeaseHandle::slots(int64_t start, int64_t stop) const {
  auto held = lock();
  return cache_->cache_->slots(live(), start, stop);
}

void LeaseHandle::extend(int64_t count) {
  auto held = lock();
  cache_->extend(live(), count);
}

int64_t LeaseHandle::commit(const Token* tokens, int64_t count) {
  auto held = lock();
  Lease* lease = live();
  Ticket written = cache_->fences_->take(stream_);
  int64_t news = cache_->cache_->commit(lease, tokens, count, written, stream_);
  cache_->pass_fences();
  return news;
}

std::shared_ptr<LeaseHandle> LeaseHandle::fork(int64_t length) {
  auto held = lock();
  Lease* lease = live();
  std::vector<std::shared_ptr<LeaseHandle>> handles;
  AcquiredBatch batch = cache_->lend(
      stream_, handles, [&] { return cache_->cache_->fork(lease, length, cache_->fences_->newest()); });
  cache_->copy_rows(batch, stream_);
  return handles[0];
}

void LeaseHandle::truncate(int64_t length) {
  auto held = lock();
  cache_->truncate(live(), length, stream_);
  cached_tokens_ = std::min(cached_tokens_.load(), length);
}

void LeaseHandle::release() {
  auto held = lock();
  if (lease_ == nullptr) throw LeaseReleased("the lease was released before");
  cache_->release(std::exchange(lease_, nullptr), stream_);
}

bool LeaseHandle::released() const {
  auto held = lock();
  return lease_ == nullptr;
}

}  // namespace npc::device
