#include "cpu/decode_attention.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

// Vectors wider than the machine's are passed between inlined functions only.
#pragma GCC diagnostic ignored "-Wpsabi"
#define NPC_INLINE inline __attribute__((always_inline))

namespace npc::cpu {
namespace {

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

constexpr int32_t kTile = 64;           // tokens whose scores are computed before their values are read
constexpr int64_t kSmallestPart = 128;  // tokens that are worth a thread
constexpr float kHidden = -std::numeric_limits<float>::infinity();

NPC_INLINE Floats load(const float* from) {
  Floats to;
  std::memcpy(&to, from, sizeof to);
  return to;
}

NPC_INLINE void store(float* to, const Floats& from) { std::memcpy(to, &from, sizeof from); }

NPC_INLINE float sum(const Floats& vector) {
  using Half = float __attribute__((vector_size(2 * kLanes)));
  using Quarter = float __attribute__((vector_size(kLanes)));
  Half halves[2];
  std::memcpy(halves, &vector, sizeof halves);
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, sizeof quarters);
  const Quarter quarter = quarters[0] + quarters[1];
  return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}

// e^x for x <= 0, to about one unit in the last place; 0 below the smallest normal number.
NPC_INLINE Floats exp_of(Floats x) {
  const Floats smallest = Floats{} - 87.0f;
  const Ints vanishes = x < smallest;
  x = vanishes ? smallest : x;
  const Ints power = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
  const Floats n = __builtin_convertvector(power, Floats);
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Ints bits = (power + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return vanishes ? Floats{} : p * scale;
}

// What some tokens give of each head: the largest score, the sum of e^(score - largest), and the values
// weighted so.
struct Part {
  float* largest;  // [heads]
  float* total;    // [heads]
  float* values;   // [heads, value_dim]
};

struct Work {
  const DecodeShape& shape;
  const float* keys;
  const float* values;

  NPC_INLINE const float* token(const float* plane, int32_t dim, const int32_t* blocks, int64_t at) const {
    const int64_t slot = blocks[at / shape.block_size] * shape.block_size + at % shape.block_size;
    return plane + slot * shape.kv_heads * dim;
  }
};

// Adds tokens [at, at + count), count <= kTile, to the part. `scores` is [heads, kTile].
NPC_INLINE void add_tile(const Work& work, const float* query, const int32_t* blocks, int64_t at,
                         int32_t count, float* scores, const Part& part) {
  const DecodeShape& shape = work.shape;
  const int32_t group = shape.heads / shape.kv_heads;
  for (int32_t t = 0; t < count; ++t) {
    const float* key = work.token(work.keys, shape.key_dim, blocks, at + t);
    for (int32_t head = 0; head < shape.heads; ++head) {
      const float* k = key + head / group * shape.key_dim;
      const float* q = query + head * shape.key_dim;
      Floats products = load(q) * load(k);
      for (int32_t i = kLanes; i < shape.key_dim; i += kLanes) products += load(q + i) * load(k + i);
      scores[head * kTile + t] = sum(products);
    }
  }
  for (int32_t head = 0; head < shape.heads; ++head) {
    float* of_head = scores + head * kTile;
    std::fill(of_head + count, of_head + kTile, kHidden);
    const float largest = std::max(part.largest[head], *std::max_element(of_head, of_head + count));
    const float shrink = std::exp(part.largest[head] - largest);
    Floats total{};
    for (int32_t t = 0; t < kTile; t += kLanes) {
      const Floats weights = exp_of(load(of_head + t) - largest);
      total += weights;
      store(of_head + t, weights);
    }
    part.largest[head] = largest;
    part.total[head] = part.total[head] * shrink + sum(total);
    float* weighted = part.values + head * shape.value_dim;
    for (int32_t i = 0; i < shape.value_dim; i += kLanes) store(weighted + i, load(weighted + i) * shrink);
  }
  for (int32_t t = 0; t < count; ++t) {
    const float* value = work.token(work.values, shape.value_dim, blocks, at + t);
    for (int32_t head = 0; head < shape.heads; ++head) {
      const float* v = value + head / group * shape.value_dim;
      float* weighted = part.values + head * shape.value_dim;
      const float weight = scores[head * kTile + t];
      for (int32_t i = 0; i < shape.value_dim; i += kLanes)
        store(weighted + i, load(weighted + i) + load(v + i) * weight);
    }
  }
}

NPC_INLINE void add_all(const Work& work, const float* query, const int32_t* blocks, int64_t first,
                        int64_t last, float* scores, const Part& part) {
  for (int64_t at = first; at < last; at += kTile) {
    add_tile(work, query, blocks, at, static_cast<int32_t>(std::min<int64_t>(kTile, last - at)), scores,
             part);
  }
}

using AddAll = void (*)(const Work&, const float*, const int32_t*, int64_t, int64_t, float*, const Part&);

void add_all_plain(const Work& work, const float* query, const int32_t* blocks, int64_t first, int64_t last,
                   float* scores, const Part& part) {
  add_all(work, query, blocks, first, last, scores, part);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void add_all_avx2(const Work& work, const float* query,
                                                      const int32_t* blocks, int64_t first, int64_t last,
                                                      float* scores, const Part& part) {
  add_all(work, query, blocks, first, last, scores, part);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) void add_all_avx512(
    const Work& work, const float* query, const int32_t* blocks, int64_t first, int64_t last, float* scores,
    const Part& part) {
  add_all(work, query, blocks, first, last, scores, part);
}

AddAll best_of_this_machine() {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return add_all_avx512;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? add_all_avx2 : add_all_plain;
}
#else
AddAll best_of_this_machine() { return add_all_plain; }
#endif

// Runs `run(data)` on so many threads of the OpenMP runtime that torch has loaded: one of our own beside it
// would wait for its spinning threads. On this thread alone where there is none.
void on_threads_of_torch(void (*run)(void*), void* data, int32_t threads) {
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (parallel == nullptr || threads <= 1) return run(data);
  parallel(run, data, static_cast<unsigned>(threads), 0);
}

// A row's tokens in parts, all parts of all rows, taken one by one by whichever thread is free.
struct Batch {
  Batch(const DecodeShape& of, int32_t threads, int64_t rows, const int64_t* first, const int64_t* last)
      : shape(of),
        first(first),
        last(last),
        part_floats(of.heads * (2 + of.value_dim)),
        scratch_floats(of.heads * (kTile + of.key_dim)) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t parts = std::clamp<int64_t>((last[row] - first[row]) / kSmallestPart, 1, threads);
      for (int64_t part = 0; part < parts; ++part) tasks.push_back({row, part, parts});
    }
    floats.assign(tasks.size() * part_floats, 0.0f);
    useful_threads = static_cast<int32_t>(std::min<size_t>(threads, tasks.size()));
    scratch.resize(useful_threads * scratch_floats);  // here, where memory may run out
  }

  struct Task {
    int64_t row, part, parts;
  };

  Part part(size_t task) {
    float* at = floats.data() + task * part_floats;
    return {at, at + shape.heads, at + 2 * shape.heads};
  }

  void run() {
    static const AddAll add = best_of_this_machine();
    float* scores = scratch.data() + next_thread++ * scratch_floats;
    float* scaled = scores + shape.heads * kTile;
    const int64_t query_floats = int64_t{shape.heads} * shape.key_dim;
    for (size_t task = next++; task < tasks.size(); task = next++) {
      const auto& [row, number, parts] = tasks[task];
      const float* of_row = query + row * query_floats;
      std::transform(of_row, of_row + query_floats, scaled, [this](float q) { return q * scale; });
      const int64_t tokens = last[row] - first[row];
      const Part into = part(task);
      std::fill_n(into.largest, shape.heads, kHidden);
      add(*work, scaled, blocks + row * shape.block_stride, first[row] + tokens * number / parts,
          first[row] + tokens * (number + 1) / parts, scores, into);
    }
  }

  void finish(float* out) {
    for (size_t task = 0; task < tasks.size(); task += tasks[task].parts) {
      for (int32_t head = 0; head < shape.heads; ++head) {
        float largest = kHidden, total = 0;
        for (int64_t i = 0; i < tasks[task].parts; ++i)
          largest = std::max(largest, part(task + i).largest[head]);
        float* to = out + (tasks[task].row * shape.heads + head) * shape.value_dim;
        std::fill_n(to, shape.value_dim, 0.0f);
        for (int64_t i = 0; i < tasks[task].parts; ++i) {
          const Part from = part(task + i);
          const float share = std::exp(from.largest[head] - largest);
          total += from.total[head] * share;
          for (int32_t d = 0; d < shape.value_dim; ++d)
            to[d] += from.values[head * shape.value_dim + d] * share;
        }
        for (int32_t d = 0; d < shape.value_dim; ++d) to[d] /= total;
      }
    }
  }

  const DecodeShape& shape;
  const int64_t *first, *last;
  const size_t part_floats, scratch_floats;
  std::vector<Task> tasks;
  std::vector<float> floats;   // of each task its part
  std::vector<float> scratch;  // of each thread its scores, and a query
  int32_t useful_threads = 1;
  std::atomic<size_t> next{0}, next_thread{0};
  const Work* work = nullptr;
  const float* query = nullptr;
  const int32_t* blocks = nullptr;
  float scale = 1;
};

}  // namespace

void decode_attention(const DecodeShape& shape, const float* query, const float* keys, const float* values,
                      const int32_t* blocks, const int64_t* first, const int64_t* last, int64_t rows,
                      float scale, int32_t threads, float* out) {
  const Work work{shape, keys, values};
  Batch batch(shape, threads, rows, first, last);
  batch.work = &work;
  batch.query = query;
  batch.blocks = blocks;
  batch.scale = scale;
  on_threads_of_torch([](void* data) { static_cast<Batch*>(data)->run(); }, &batch, batch.useful_threads);
  batch.finish(out);
}

void write_rows(const void* states, void* plane, const int64_t* slots, int64_t rows, size_t row_bytes) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(static_cast<char*>(plane) + slots[row] * row_bytes,
                static_cast<const char*>(states) + row * row_bytes, row_bytes);
  }
}

}  // namespace npc::cpu
