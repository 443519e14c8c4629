// The machine that environment variables ask for; control.h says which there are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sim/status.h"

namespace npc::sim {

struct EnvironmentMachine {
  size_t devices = 1;                   // that the program sees
  size_t hbm_bytes = size_t{16} << 30;  // of each device
  uint32_t max_events = 65535;          // a device
  bool late = false;
  uint64_t late_seed = 0;
};

// Fills in what is set. A bad value leaves its default, and is what the Status says; of several, the first.
Status ReadEnvironment(EnvironmentMachine* machine);

}  // namespace npc::sim
