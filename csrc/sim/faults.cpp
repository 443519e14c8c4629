#include "sim/faults.h"

#include <algorithm>

namespace npc::sim {

uint64_t Faults::Add(Function function, uint64_t call, uint64_t times, acl::Error error) {
  faults_.push_back(Fault{++last_id_, function, call - 1, times, error});
  return last_id_;
}

bool Faults::Remove(uint64_t id) {
  auto at = std::find_if(faults_.begin(), faults_.end(), [id](const Fault& fault) { return fault.id == id; });
  if (at == faults_.end()) return false;
  faults_.erase(at);
  return true;
}

Status Faults::Count(Function function) {
  uint64_t call = ++calls[static_cast<size_t>(function)];
  Status status;
  for (Fault& fault : faults_) {
    if (fault.function != function) continue;
    if (fault.passes > 0) {
      fault.passes -= 1;
      continue;
    }
    if (fault.times != kForGood) fault.times -= 1;
    if (!status.ok()) continue;
    status = Fail(fault.error, "injected fault %llu at call %llu", static_cast<unsigned long long>(fault.id),
                  static_cast<unsigned long long>(call));
  }
  faults_.erase(
      std::remove_if(faults_.begin(), faults_.end(), [](const Fault& fault) { return fault.times == 0; }),
      faults_.end());
  return status;
}

}  // namespace npc::sim
