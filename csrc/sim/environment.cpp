#include "sim/environment.h"

#include <cerrno>
#include <cstdlib>
#include <set>

#include "sim/state.h"

namespace npc::sim {
namespace {

// A whole decimal number in [low, high]; not set or empty: `*value` stays, and `*given` is false.
Status ReadNumber(const char* name, uint64_t low, uint64_t high, uint64_t* value, bool* given) {
  const char* text = std::getenv(name);
  *given = text != nullptr && *text != '\0';
  if (!*given) return {};
  char* end = nullptr;
  errno = 0;
  uint64_t number = std::strtoull(text, &end, 10);
  bool whole = *text >= '0' && *text <= '9' && *end == '\0' && errno == 0;
  if (!whole || number < low || number > high) {
    *given = false;
    return Fail(acl::kInvalidParam, "%s='%.64s' is no whole number in [%llu, %llu]", name, text,
                static_cast<unsigned long long>(low), static_cast<unsigned long long>(high));
  }
  *value = number;
  return {};
}

// The runtime's own variable: which devices the program sees, counted anew from 0. They are all alike, so
// only how many there are matters.
Status ReadVisibleDevices(uint64_t* devices) {
  constexpr char kName[] = "ASCEND_RT_VISIBLE_DEVICES";
  const char* text = std::getenv(kName);
  if (text == nullptr || *text == '\0') return {};
  std::set<uint64_t> seen;
  const char* at = text;
  while (true) {
    char* end = nullptr;
    uint64_t device = std::strtoull(at, &end, 10);
    bool whole = *at >= '0' && *at <= '9' && (*end == ',' || *end == '\0');
    if (!whole || device >= *devices || !seen.insert(device).second) {
      return Fail(acl::kInvalidParam, "%s='%.64s' is no list of different devices in [0, %llu], such as 0,1",
                  kName, text, static_cast<unsigned long long>(*devices - 1));
    }
    if (*end == '\0') break;
    at = end + 1;
  }
  *devices = seen.size();
  return {};
}

}  // namespace

Status ReadEnvironment(EnvironmentMachine* machine) {
  uint64_t devices = machine->devices;
  uint64_t hbm_bytes = machine->hbm_bytes;
  uint64_t max_events = machine->max_events;
  bool given = false;
  Status read[] = {
      ReadNumber("NPU_PROMPT_CACHE_SIM_DEVICES", 1, kMaxDevices, &devices, &given),
      ReadNumber("NPU_PROMPT_CACHE_SIM_HBM_BYTES", 1, SIZE_MAX, &hbm_bytes, &given),
      ReadNumber("NPU_PROMPT_CACHE_SIM_MAX_EVENTS", 0, UINT32_MAX, &max_events, &given),
      ReadNumber("NPU_PROMPT_CACHE_SIM_LATE_STREAMS", 0, UINT64_MAX, &machine->late_seed, &machine->late),
      ReadVisibleDevices(&devices),
  };
  machine->devices = devices;
  machine->hbm_bytes = hbm_bytes;
  machine->max_events = static_cast<uint32_t>(max_events);
  for (const Status& status : read) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace npc::sim
