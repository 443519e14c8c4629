// The prompts of one batch: which earlier one a prompt shares its longest prefix with.
//
// The rows lie sorted by their tokens, so that of all rows one of the two neighbours of a new one shares the
// most with it: O(log rows) comparisons a row, whatever the prompts are.
#pragma once

#include <cstddef>
#include <vector>

#include "cache/types.h"

namespace npc {

class BatchPrefixes {
 public:
  struct Shared {
    size_t row = 0;      // meaningful where tokens > 0
    int64_t tokens = 0;  // length of the common prefix
  };

  // Adds the next row, whose tokens must stay where they are; returns what it shares with the rows before it.
  Shared add(const Token* tokens, int64_t count);

 private:
  struct Row {
    const Token* tokens;
    int64_t count;
    size_t number;
  };

  std::vector<Row> sorted_;
};

}  // namespace npc
