// The index alone at a number of entries; run by scripts/bench_scale.py, which says what is measured. Prints
// one line of JSON.
//
//   bench_scale ENTRIES PROMPT_BLOCKS CALLS
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include "cache/cache.h"

namespace {

constexpr int32_t kBlockSize = 128;

double now_us(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

size_t resident_bytes() {
  size_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// Times of calls: by the wall, and of this thread's own work, which does not count while others run.
struct Times {
  std::vector<double> wall, own;

  template <typename Call>
  auto add(Call&& call) {
    double own_start = now_us(CLOCK_THREAD_CPUTIME_ID), start = now_us(CLOCK_MONOTONIC);
    auto result = call();
    wall.push_back(now_us(CLOCK_MONOTONIC) - start);
    own.push_back(now_us(CLOCK_THREAD_CPUTIME_ID) - own_start);
    return result;
  }
};

double quantile(std::vector<double>& values, double part) {
  auto at = values.begin() + static_cast<ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

class Bench {
 public:
  Bench(size_t entries, size_t prompt_blocks)
      : prompts_(entries / prompt_blocks), tokens_(prompt_blocks * kBlockSize), cache_(options(entries)) {}

  void build() {
    double start = now_us(CLOCK_MONOTONIC);
    for (size_t number = 0; number < prompts_; ++number) insert(number, build_);
    build_s_ = (now_us(CLOCK_MONOTONIC) - start) / 1e6;
    bytes_ = resident_bytes() - before_;
  }

  // Full hits of random prompts: of all, and of so few that the processor's caches hold them.
  void hit(size_t calls) {
    std::mt19937 random(7);
    for (size_t call = 0; call < calls; ++call) acquire_cached(random() % prompts_, hit_);
    size_t few = std::max<size_t>(1, 1000 * kBlockSize / tokens_.size());
    for (size_t call = 0; call < calls; ++call) acquire_cached(random() % std::min(few, prompts_), hit_few_);
  }

  // What no index can do without: a hit compares the request's tokens with as many of those in memory.
  void compare(size_t calls) {
    std::vector<npc::Token> all(prompts_ * tokens_.size(), 1);
    std::fill(tokens_.begin(), tokens_.end(), 1);
    std::mt19937 random(7);
    for (size_t call = 0; call < calls; ++call) {
      const npc::Token* held = all.data() + random() % prompts_ * tokens_.size();
      differ_ = compare_.add(
          [&] { return std::memcmp(held, tokens_.data(), tokens_.size() * sizeof(npc::Token)); });
    }
  }

  // The pool is full: each new prompt evicts as many blocks as it needs.
  void replace(size_t calls) {
    for (size_t call = 0; call < calls; ++call) insert(prompts_ + call, replace_);
  }

  void print() {
    double blocks = static_cast<double>(tokens_.size()) / kBlockSize;
    auto per_block = [&](Times& times) { return quantile(times.wall, 0.5) * 1e3 / blocks; };
    size_t entries = cache_.stats().entries;
    printf("{\"entries\": %zu, \"build_s\": %.3f, \"bytes_an_entry\": %.1f, ", entries, build_s_,
           static_cast<double>(bytes_) / static_cast<double>(entries) - kBlockSize * sizeof(npc::Token));
    printf("\"memcmp_ns\": %.1f, ", per_block(compare_));
    printf("\"acquire_ns\": %.1f, \"acquire_few_ns\": %.1f, ", per_block(hit_.acquire),
           per_block(hit_few_.acquire));
    printf("\"release_ns\": %.1f, ", per_block(hit_.release));
    printf("\"evict_ns\": %.1f, \"commit_ns\": %.1f, ", per_block(replace_.acquire),
           per_block(replace_.commit));
    Times all;
    for (Life* life : {&build_, &hit_, &hit_few_, &replace_}) {
      for (Times* times : {&life->acquire, &life->commit, &life->release}) {
        all.wall.insert(all.wall.end(), times->wall.begin(), times->wall.end());
        all.own.insert(all.own.end(), times->own.begin(), times->own.end());
      }
    }
    printf(
        "\"calls\": %zu, \"p9999_us\": %.1f, \"own_p9999_us\": %.1f, \"max_us\": %.1f, \"own_max_us\": "
        "%.1f}\n",
        all.wall.size(), quantile(all.wall, 0.9999), quantile(all.own, 0.9999), quantile(all.wall, 1),
        quantile(all.own, 1));
    cache_.check_integrity();
  }

 private:
  struct Life {
    Times acquire, commit, release;
  };

  static npc::CacheOptions options(size_t entries) {
    npc::CacheOptions options;
    options.block_count = static_cast<npc::BlockId>(entries + 1);
    options.block_size = kBlockSize;
    options.block_bytes = 1;
    return options;
  }

  void make_prompt(size_t number) {
    uint64_t state = number * 0x9e3779b97f4a7c15U + 1;
    for (npc::Token& token : tokens_) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      token = static_cast<npc::Token>(state >> 47U);
    }
  }

  npc::Lease* acquire(Times& times) {
    auto count = static_cast<int64_t>(tokens_.size());
    return times.add([&] { return cache_.acquire("", {{tokens_.data(), count, count - 1}}, 0); })
        .rows[0]
        .lease;
  }

  void acquire_cached(size_t number, Life& life) {
    make_prompt(number);
    npc::Lease* lease = acquire(life.acquire);
    life.release.add([&] { return cache_.release(lease, 0), 0; });
  }

  void insert(size_t number, Life& life) {
    make_prompt(number);
    npc::Lease* lease = acquire(life.acquire);
    auto count = static_cast<int64_t>(tokens_.size());
    life.commit.add([&] { return cache_.commit(lease, tokens_.data(), count); });
    life.release.add([&] { return cache_.release(lease, 0), 0; });
  }

  size_t prompts_;
  std::vector<npc::Token> tokens_;
  size_t before_ = resident_bytes();
  npc::Cache cache_;
  double build_s_ = 0;
  size_t bytes_ = 0;
  Life build_, hit_, hit_few_, replace_;
  Times compare_;
  volatile int differ_ = 0;  // so that the compiler does not leave the comparisons out
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  Bench bench(std::strtoul(argv[1], nullptr, 10), std::strtoul(argv[2], nullptr, 10));
  auto calls = std::strtoul(argv[3], nullptr, 10);
  bench.build();
  bench.hit(calls);
  bench.replace(calls);
  bench.compare(calls);
  bench.print();
}
