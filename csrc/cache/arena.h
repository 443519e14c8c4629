// An array of fixed size whose memory is reserved at once and taken from the system page by page, as it is
// touched: it never moves, nothing is ever copied to grow it, and what is not used costs nothing.
//
// Elements begin as zero bytes. Throws std::bad_alloc where the addresses cannot be reserved.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <type_traits>

namespace npc {

template <typename T>
class Arena {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  explicit Arena(size_t count) : count_(count) {
    void* memory = MAP_FAILED;
    if (count <= (~size_t{0} >> 1U) / sizeof(T))
      memory =
          mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(memory);
  }
  ~Arena() { munmap(data_, bytes()); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  size_t size() const { return count_; }
  T* data() const { return data_; }
  T& operator[](size_t index) const { return data_[index]; }

 private:
  size_t bytes() const { return count_ * sizeof(T); }

  size_t count_;
  T* data_;
};

}  // namespace npc
