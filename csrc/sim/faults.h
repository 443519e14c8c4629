// Calls that are to fail, and how many calls of each function there were.
// Not thread-safe: the State's mutex guards it.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "sim/functions.h"
#include "sim/status.h"

namespace npc::sim {

constexpr uint64_t kForGood = UINT64_MAX;

struct Fault {
  uint64_t id;
  Function function;
  uint64_t passes;  // calls still to be let through
  uint64_t times;   // calls still to fail after those; kForGood: all
  acl::Error error;
};

class Faults {
 public:
  std::array<uint64_t, kFunctionCount> calls{};  // failed ones too

  uint64_t Add(Function function, uint64_t call, uint64_t times, acl::Error error);  // returns the fault's id
  bool Remove(uint64_t id);                                                          // false: it is used up
  void Clear() { faults_.clear(); }

  // Counts one call, and says whether it is to fail. Every fault set on the function sees every call of it;
  // where several hit the same call, the one set first decides the code.
  Status Count(Function function);

 private:
  std::vector<Fault> faults_;  // in the order they were set; used-up ones are removed
  uint64_t last_id_ = 0;
};

}  // namespace npc::sim
