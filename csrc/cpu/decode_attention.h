// Attention of one new token a sequence over the blocks of a pool, in float32, on the CPU.
//
// A step of decoding reads every K and V of a sequence once. torch's kernel wants them as one tensor for each
// sequence, so that scattered blocks would have to be copied together at every step and layer; this reads
// them where they lie, a token's heads together as the pool has them. A sequence's result depends on its own
// numbers and on `threads` alone, not on where its blocks are or what else is in the batch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace npc::cpu {

struct DecodeShape {
  int32_t heads = 0, kv_heads = 0;     // heads is a multiple of kv_heads
  int32_t key_dim = 0, value_dim = 0;  // multiples of kLanes
  int64_t block_size = 0;              // tokens
  int64_t block_stride = 0;            // block ids of a row of the table
};

constexpr int32_t kLanes = 16;

// For each of `rows` sequences: its query `[heads, key_dim]`, the tokens [first, last) that it sees, and its
// row of the block table. `keys` and `values` are planes `[blocks, block_size, kv_heads, dim]`; `out` is
// `[rows, heads, value_dim]`. `threads` is how many torch computes with: its own are used.
void decode_attention(const DecodeShape& shape, const float* query, const float* keys, const float* values,
                      const int32_t* blocks, const int64_t* first, const int64_t* last, int64_t rows,
                      float scale, int32_t threads, float* out);

// Copies row i of `states`, of `row_bytes` each, to row slots[i] of a plane: a step's new keys or values.
void write_rows(const void* states, void* plane, const int64_t* slots, int64_t rows, size_t row_bytes);

}  // namespace npc::cpu
