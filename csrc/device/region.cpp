#include "device/region.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace npc::device {
namespace {

size_t round_up(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

size_t planes_bytes(const std::vector<size_t>& plane_block_bytes, size_t blocks) {
  size_t total = 0;
  for (size_t bytes : plane_block_bytes) total += round_up(bytes * blocks, kPlaneAlign);
  return total;
}

// The largest number of blocks whose planes fit; planes_bytes() grows with it, so halve the interval.
size_t blocks_that_fit(const std::vector<size_t>& plane_block_bytes, size_t pool_bytes) {
  size_t block_bytes = std::accumulate(plane_block_bytes.begin(), plane_block_bytes.end(), size_t{0});
  size_t low = 0, high = std::min<size_t>(pool_bytes / block_bytes, std::numeric_limits<BlockId>::max() - 1);
  while (low < high) {
    size_t middle = (low + high + 1) / 2;
    if (planes_bytes(plane_block_bytes, middle) <= pool_bytes) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace

Region::Region(std::shared_ptr<Runtime> runtime, size_t pool_bytes, std::vector<size_t> plane_block_bytes,
               int32_t block_size)
    : runtime_(std::move(runtime)),
      plane_block_bytes_(std::move(plane_block_bytes)),
      block_size_(block_size) {
  constexpr size_t kLeastBlocks = 2;
  size_t blocks = blocks_that_fit(plane_block_bytes_, pool_bytes);
  if (blocks < kLeastBlocks)
    throw std::invalid_argument("pool_bytes=" + std::to_string(pool_bytes) +
                                " is too small: " + std::to_string(plane_block_bytes_.size()) +
                                " planes of whole 2 MiB pages need at least " +
                                std::to_string(planes_bytes(plane_block_bytes_, kLeastBlocks)) +
                                " bytes for one block of " + std::to_string(block_size) +
                                " tokens and the padding block");
  block_count_ = static_cast<BlockId>(blocks);
  size_t offset = 0;
  for (size_t bytes : plane_block_bytes_) {
    plane_offset_.push_back(offset);
    offset += round_up(bytes * blocks, kPlaneAlign);
    block_bytes_ += bytes;
  }
  allocated_bytes_ = offset + kPlaneAlign;  // the runtime aligns to 64 bytes only
  allocate();
  base_ = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(allocation_), kPlaneAlign));
}

void Region::allocate() {
  Runtime::Scope scope(*runtime_);
  acl::Error code = runtime_->api().aclrtMalloc(&allocation_, allocated_bytes_, acl::kHugeFirst);
  if (code == acl::kSuccess) return;
  allocation_ = nullptr;
  std::string doing = "aclrtMalloc of " + std::to_string(allocated_bytes_) + " bytes for the pool";
  const char* recent = runtime_->api().aclGetRecentErrMsg();
  std::string detail = recent != nullptr ? recent : "";  // copied: the next call may overwrite it
  size_t free_bytes = 0, total_bytes = 0;
  if (runtime_->api().aclrtGetMemInfo(acl::kHbmMem, &free_bytes, &total_bytes) == acl::kSuccess)
    doing += " (" + std::to_string(free_bytes) + " of " + std::to_string(total_bytes) +
             " bytes of the device are free)";
  throw acl::AclError(code, doing, detail.c_str());
}

Region::~Region() {
  if (allocation_ == nullptr || !runtime_->may_call()) return;
  try {
    free();
  } catch (const std::exception&) {
    // A destructor has nobody to tell; close() frees by a path that does.
  }
}

void Region::free() {
  Runtime::Scope scope(*runtime_);
  runtime_->check(runtime_->api().aclrtSynchronizeDevice(), "aclrtSynchronizeDevice before freeing the pool");
  runtime_->check(runtime_->api().aclrtFree(allocation_),
                  "aclrtFree of the pool of " + std::to_string(allocated_bytes_) + " bytes");
  allocation_ = nullptr;
}

void Region::copy(size_t plane, size_t to, const void* from, size_t bytes, acl::MemcpyKind kind,
                  acl::Stream stream) {
  size_t plane_bytes = plane_block_bytes_[plane] * block_count_;
  runtime_->check(
      runtime_->api().aclrtMemcpyAsync(base_ + plane_offset_[plane] + to, plane_bytes - to, from, bytes, kind,
                                       stream),
      "aclrtMemcpyAsync of " + std::to_string(bytes) + " bytes into plane " + std::to_string(plane));
  copy_calls_[kind] += 1;
  copy_bytes_[kind] += bytes;
}

void Region::copy_rows(const RowCopy& rows, acl::Stream stream) {
  Runtime::Scope scope(*runtime_);
  for (size_t p = 0; p < plane_count(); ++p) {
    const char* from = base_ + plane_offset_[p] + rows.from * plane_block_bytes_[p];
    size_t bytes = plane_block_bytes_[p] / block_size_ * rows.rows;
    copy(p, rows.to * plane_block_bytes_[p], from, bytes, acl::kDeviceToDevice, stream);
  }
}

void Region::fill(const std::vector<Source>& sources, const std::vector<BlockId>& table, int64_t first,
                  int64_t count, acl::Stream stream) {
  Runtime::Scope scope(*runtime_);
  for (int64_t at = first; at < first + count;) {
    // As many tokens as lie in neighbouring blocks are one copy.
    int64_t index = at / block_size_, offset = at % block_size_, last = index;
    int64_t end_index = (first + count - 1) / block_size_;
    while (last < end_index && table[last + 1] == table[last] + 1) ++last;
    int64_t run = std::min((last + 1) * block_size_, first + count) - at;
    for (size_t p = 0; p < plane_count(); ++p) {
      size_t row_bytes = plane_block_bytes_[p] / block_size_;
      const char* from = static_cast<const char*>(sources[p].data) + (at - first) * row_bytes;
      copy(p, table[index] * plane_block_bytes_[p] + offset * row_bytes, from, run * row_bytes,
           sources[p].kind, stream);
    }
    at += run;
  }
}

std::array<CopyCounts, 4> Region::copies() const {
  std::array<CopyCounts, 4> counts;
  for (size_t kind = 0; kind < counts.size(); ++kind) counts[kind] = {copy_calls_[kind], copy_bytes_[kind]};
  return counts;
}

}  // namespace npc::device
