// Words shared by the cache room: token and block ids, tickets, and the errors this room throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace npc {

using Token = int32_t;
using BlockId = int32_t;

// A point in the work of a stream. Tickets grow over all streams; "ticket t has passed" means that for every
// ticket up to t, what its stream had been given before it was taken has run. 0 has always passed. The device
// room hands them out, this room compares them.
using Ticket = uint64_t;

// Names a stream of work; compared, never followed.
using StreamId = const void*;

// Of entries: those of a higher one are evicted when none of a lower one is left.
using Priority = uint8_t;
inline constexpr size_t kPriorities = 4;
inline constexpr Priority kDefaultPriority = 1;

enum class EvictionPolicy : uint8_t { kLru, kLfu };

// What a request asks for the entries that it uses and publishes.
struct EntryOptions {
  Priority priority = kDefaultPriority;
};

// The pool cannot hold the request, even after every entry that may be evicted was.
struct PoolExhausted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A pin would hold more than pins may hold.
struct PinLimitExceeded : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The cache was closed, or belongs to the process this one was forked from.
struct CacheClosed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A lease was used after its release.
struct LeaseReleased : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// An invariant of ours does not hold: a defect of this software, reported by check_integrity().
struct IntegrityError : std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace npc
