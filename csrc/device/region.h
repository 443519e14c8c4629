// The pool's memory: one allocation of device memory, cut into planes of blocks.
//
//   [plane 0: block 0, block 1, ...][plane 1: ...] ...      a plane is one layer's K or V (DESIGN:
//   plane-major)
//
// Contract
//   - planes and the first byte are aligned to 2 MiB, blocks to 64 bytes (asynchronous copies on the device
//   want it)
//   - the memory lives as long as a Region is held by anyone; before it is freed the whole device is
//   synchronised,
//     because aclrtFree waits for nothing
//   - copies are enqueued on the stream given and counted by kind, in calls and bytes
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "cache/cache.h"
#include "device/runtime.h"

namespace npc::device {

constexpr size_t kPlaneAlign = size_t{2} << 20;
constexpr size_t kBlockAlign = 64;

struct CopyCounts {
  uint64_t calls = 0;
  uint64_t bytes = 0;
};

// Contiguous rows of one plane that a caller holds: `rows` * row_bytes(plane) bytes.
struct Source {
  const void* data = nullptr;
  acl::MemcpyKind kind = acl::kDeviceToDevice;
};

class Region {
 public:
  // As many blocks as fit into `pool_bytes`, at least 2 (one is padding). plane_block_bytes[p] is the size of
  // one block in plane p, a multiple of 64. Throws std::invalid_argument where the pool is too small.
  Region(std::shared_ptr<Runtime> runtime, size_t pool_bytes, std::vector<size_t> plane_block_bytes,
         int32_t block_size);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  BlockId block_count() const { return block_count_; }
  size_t block_bytes() const { return block_bytes_; }  // of one block in all planes
  int32_t block_size() const { return block_size_; }
  size_t plane_count() const { return plane_block_bytes_.size(); }
  size_t plane_block_bytes(size_t plane) const { return plane_block_bytes_.at(plane); }
  void* plane(size_t plane) const { return base_ + plane_offset_.at(plane); }

  // Enqueues the copy of rows within the pool, in every plane.
  void copy_rows(const RowCopy& copy, acl::Stream stream);

  // Enqueues the copy of rows [first, first + count) of `sources` (one a plane) into the slots of the same
  // tokens.
  void fill(const std::vector<Source>& sources, const std::vector<BlockId>& table, int64_t first,
            int64_t count, acl::Stream stream);

  // Frees the memory now; throws AclError and keeps it where that fails. Called at most once with success.
  void free();

  std::array<CopyCounts, 4> copies() const;  // by acl::MemcpyKind 0 ... 3

 private:
  void allocate();
  void copy(size_t plane, size_t to, const void* from, size_t bytes, acl::MemcpyKind kind,
            acl::Stream stream);

  std::shared_ptr<Runtime> runtime_;
  std::vector<size_t> plane_block_bytes_, plane_offset_;
  int32_t block_size_;
  size_t block_bytes_ = 0, allocated_bytes_ = 0;
  BlockId block_count_ = 0;
  void* allocation_ = nullptr;
  char* base_ = nullptr;  // allocation_, rounded up to kPlaneAlign
  std::array<std::atomic<uint64_t>, 4> copy_calls_{}, copy_bytes_{};
};

}  // namespace npc::device
