// Streams, events, and when queued work runs.
//
// Promptly (the default): an asynchronous operation runs inside the call that submits it.
// Late: it is queued, and runs at the latest `within_calls` API calls later (a seeded generator says when),
// or earlier where a synchronise needs it. In both modes:
//   - operations of one stream run in the order they were submitted
//   - a wait runs only after the record it was submitted for has run
//   - an operation is checked when submitted and again when it runs. What is wrong only by then (memory was
//     freed, an event destroyed) is a violation: it is listed, and the stream's next synchronise returns it
//     once. The operations behind it still run, so that nobody waits for ever.
// A record is submitted before every wait for it, so a wait depends only on operations older than itself:
// waits cannot form a cycle, and every queued operation is done after at most `within_calls` calls.
// Not thread-safe: the State's mutex guards it.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "sim/memory.h"

namespace npc::sim {

struct Operation {
  enum class Kind { kCopy, kFill, kRecord, kWait, kReset };
  Kind kind;
  Copy copy{};
  std::string staged{};  // what a copy of kind kHostBufToDevice read when it was submitted; else empty
  Fill fill{};
  void* event = nullptr;
  uint64_t ticket = 0;  // which record of the event: the n-th
  uint64_t due = 0;     // the tick it runs at, at the latest
};

struct StreamState {
  void* context;
  int32_t device;
  bool is_default;  // made with its context: not counted, not destroyed on its own
  std::deque<Operation> queue;
  Status error;  // the first violation since the last synchronise
};

struct EventState {
  int32_t device;
  bool outlives;           // made by aclrtCreateEventExWithFlag: destroyed when what is queued on it has run
  bool destroyed = false;  // no call finds it any more; gone when `queued` is 0
  uint64_t queued = 0;     // operations on it that are queued
  uint64_t recorded = 0;   // records submitted
  uint64_t reset = 0;      // records up to here no longer count
  std::chrono::steady_clock::time_point at{};  // when the last record that has run ran
  std::map<uint64_t, void*> pending{};         // records still queued: ticket to stream
};

class Timeline {
 public:
  explicit Timeline(Memory& memory) : memory_(memory) {}

  uint32_t max_events = 65535;  // a device
  std::vector<std::string> violations;

  void RunLate(uint64_t seed, uint32_t within_calls);
  void RunPromptly();              // runs what is queued first
  void Tick();                     // one API call was made
  Status RunStream(void* stream);  // all that is queued on it, whoever's it is

  void* CreateStream(void* context, int32_t device, bool is_default);
  Status DestroyStream(void* stream, void* context, bool force);
  void DestroyStreamsOf(void* context);  // runs what is queued first

  Status SubmitCopy(void* stream, void* context, const Copy& copy);
  Status SubmitFill(void* stream, void* context, const Fill& fill);
  Status Record(void* event, void* stream, void* context);
  Status Wait(void* event, void* stream, void* context);
  Status Reset(void* event, void* stream, void* context);

  Status Synchronize(void* stream, void* context);
  Status SynchronizeDevice(int32_t device);  // the first error of its streams; clears them all
  Status SynchronizeEvent(void* event);
  Status QueryStream(void* stream, void* context, bool* idle);
  Status QueryEvent(void* event, bool* complete);

  // Between the last records of two events, by the host's clock.
  Status ElapsedTime(void* start, void* end, float* milliseconds);

  Status CreateEvent(int32_t device, bool outlives, void** event);
  Status DestroyEvent(void* event);  // one that outlives: when what is queued on it has run
  void DestroyEventsOf(int32_t device);

  uint64_t CountStreams(int32_t device) const;  // without default streams
  uint64_t CountEvents(int32_t device) const;

 private:
  Status FindStream(void* stream, void* context, StreamState** found);
  Status FindEvent(void* event, EventState** found);
  Status Submit(StreamState& stream, Operation operation);
  bool MayRun(const Operation& operation) const;
  void Unqueue(const Operation& operation);  // one operation on its event less is queued
  void RunFront(StreamState& stream);
  void RunUntilRecorded(void* event, uint64_t ticket);
  void Drain(StreamState& stream);
  void Discard(StreamState& stream);
  Status Execute(const Operation& operation);
  void Violate(StreamState& stream, const Status& status);

  Memory& memory_;
  std::map<void*, StreamState> streams_;  // in order of creation
  std::map<void*, EventState> events_;
  std::map<int32_t, uint64_t> live_events_;  // events_ counted by device
  uint64_t serial_ = 0;                      // of the last handle
  uint64_t tick_ = 0;
  uint32_t within_calls_ = 0;  // 0: promptly
  std::mt19937_64 generator_;
};

}  // namespace npc::sim
