// What a step of the simulator came to: an error code of the runtime and a sentence that says what was asked,
// what was found and what the limit is. Nothing inside the simulator throws for a caller's mistake.
#pragma once

#include <string>

#include "acl/abi.h"

namespace npc::sim {

// Codes that only the simulator gives out; the numbers are CANN's (rt_error_codes.h).
constexpr acl::Error kRepeatFinalize = 100037;
constexpr acl::Error kInvalidDevice = 107001;
constexpr acl::Error kAddressUnaligned = 107008;
constexpr acl::Error kNoEventResource = 207007;  // the event table is full: not memory, and not for good
constexpr acl::Error kSystemDma = 507013;  // the copy engine met a bad address while running a queued copy

struct Status {
  acl::Error code = acl::kSuccess;
  std::string text;

  bool ok() const { return code == acl::kSuccess; }
};

// A failed Status with a printf-formatted text.
[[gnu::format(printf, 2, 3)]] Status Fail(acl::Error code, const char* format, ...);

}  // namespace npc::sim
