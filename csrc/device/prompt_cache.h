// The prompt cache on a device: the facade of the cache room, the pool's memory, and the fences between them.
//
// Contract
//   - thread-safe; no lock is held over a vendor call or a wait but the fences' own
//   - every call but close() and the destructors throws CacheClosed after close() and in a forked child
//   - a `stream` of null stands for the cache's own stream; what is enqueued there has run when the call
//   returns.
//     On a caller's stream it is only enqueued: the caller computes on that stream, so the order is right
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cache/cache.h"
#include "device/fences.h"
#include "device/region.h"
#include "device/runtime.h"

namespace npc::device {

struct PoolOptions {
  std::string acl_lib;  // explicit path of the runtime, empty for none
  int32_t device = 0;
  size_t pool_bytes = 0;
  size_t watermark_bytes = 0;
  std::vector<size_t> plane_block_bytes;
  int32_t block_size = 128;
  bool whole_blocks = false;
  size_t max_pinned_bytes = ~size_t{0};
  EvictionPolicy policy = EvictionPolicy::kLru;
  bool second_sighting = false;
  int priority_bits = 32;
  bool fenced = true;
};

class PromptCache;

// A request's lease. Released by its destructor, without publishing, if it was not before.
class LeaseHandle {
 public:
  LeaseHandle(std::shared_ptr<PromptCache> cache, Lease* lease, acl::Stream stream, int64_t cached_tokens);
  ~LeaseHandle();
  LeaseHandle(const LeaseHandle&) = delete;
  LeaseHandle& operator=(const LeaseHandle&) = delete;

  int64_t cached_tokens() const { return cached_tokens_; }  // found at acquire, and not truncated
  int64_t length() const;
  std::vector<BlockId> block_table() const;
  std::vector<int64_t> slots(int64_t start, int64_t stop) const;
  void extend(int64_t count);
  int64_t commit(const Token* tokens, int64_t count);
  // Another lease that begins with tokens [0, length) of this one, on the same stream.
  std::shared_ptr<LeaseHandle> fork(int64_t length);
  void truncate(int64_t length);
  void release();  // a second call throws LeaseReleased
  bool released() const;

 private:
  std::unique_lock<std::mutex> lock() const;
  Lease* live() const;

  mutable std::mutex mutex_;  // one call at a time; taken before the cache's
  std::shared_ptr<PromptCache> cache_;
  Lease* lease_;  // null once released
  acl::Stream stream_;
  std::atomic<int64_t> cached_tokens_;
};

// The leases of one batch, in the order of its prompts.
struct Batch {
  std::vector<std::shared_ptr<LeaseHandle>> leases;
  std::vector<int64_t> starts;                    // of each row: tokens that it need not compute
  std::vector<int64_t> copy_sources, copy_slots;  // see AcquiredBatch
};

class PromptCache : public std::enable_shared_from_this<PromptCache> {
 public:
  explicit PromptCache(const PoolOptions& options);
  ~PromptCache();

  LookedUp lookup(std::string_view name_space, const Token* tokens, int64_t count);
  std::shared_ptr<LeaseHandle> acquire(std::string_view name_space, const Token* tokens, int64_t count,
                                       int64_t limit, acl::Stream stream, const EntryOptions& options);
  Batch acquire(std::string_view name_space, const std::vector<Prompt>& prompts, acl::Stream stream,
                const EntryOptions& options);
  std::shared_ptr<LeaseHandle> pin(std::string_view name_space, const Token* tokens, int64_t count);
  // Publishes a prompt whose K/V the caller holds, contiguous rows [0, count) a plane; copies what is not
  // cached yet. Returns the number of tokens that were not.
  int64_t insert(std::string_view name_space, const Token* tokens, int64_t count,
                 const std::vector<Source>& sources, acl::Stream stream, const EntryOptions& options);

  void clear();
  void check_integrity() const;
  std::vector<std::vector<Token>> eviction_order() const;
  void close();
  bool closed() const { return closed_; }

  CacheStats stats() const;
  std::shared_ptr<Region> region() const;  // throws CacheClosed
  const Runtime& runtime() const { return *runtime_; }
  size_t block_bytes() const { return block_bytes_; }
  std::array<CopyCounts, 4> copies() const;

 private:
  friend class LeaseHandle;
  template <typename Lend>
  AcquiredBatch lend(acl::Stream on, std::vector<std::shared_ptr<LeaseHandle>>& handles, Lend&& try_once);
  AcquiredBatch lease(std::string_view name_space, const std::vector<Prompt>& prompts, acl::Stream on,
                      bool counted, const EntryOptions& options,
                      std::vector<std::shared_ptr<LeaseHandle>>& handles);
  acl::Stream or_own(acl::Stream stream) const { return stream != nullptr ? stream : own_stream_; }
  void copy_rows(const AcquiredBatch& batch, acl::Stream on);
  void pass_fences();
  void extend(Lease* lease, int64_t count);
  void truncate(Lease* lease, int64_t length, acl::Stream on);
  void release(Lease* lease, acl::Stream stream);
  void synchronize_own_stream();
  void check_usable() const;

  std::shared_ptr<Runtime> runtime_;
  acl::Stream own_stream_ = nullptr;
  std::unique_ptr<Fences> fences_;
  mutable std::mutex region_mutex_;
  std::shared_ptr<Region> region_;  // guarded by region_mutex_; null after close()
  std::unique_ptr<Cache> cache_;
  size_t block_bytes_ = 0;
  std::atomic<bool> closed_{false};
};

}  // namespace npc::device
