#include "sim/timeline.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "sim/handle.h"

namespace npc::sim {

void Timeline::RunLate(uint64_t seed, uint32_t within_calls) {
  RunPromptly();
  generator_.seed(seed);
  within_calls_ = within_calls;
}

void Timeline::RunPromptly() {
  for (auto& [handle, stream] : streams_) Drain(stream);
  within_calls_ = 0;
}

void Timeline::Tick() {
  tick_ += 1;
  if (within_calls_ == 0) return;
  bool progress = true;
  while (progress) {  // a record that runs may free a wait in a stream already passed
    progress = false;
    for (auto& [handle, stream] : streams_) {
      while (!stream.queue.empty() && stream.queue.front().due <= tick_ && MayRun(stream.queue.front())) {
        RunFront(stream);
        progress = true;
      }
    }
  }
}

Status Timeline::RunStream(void* handle) {
  auto at = streams_.find(handle);
  if (at == streams_.end()) return Fail(acl::kInvalidParam, "%p is no live stream", handle);
  Drain(at->second);
  return {};
}

void* Timeline::CreateStream(void* context, int32_t device, bool is_default) {
  void* handle = MakeHandle(HandleKind::kStream, ++serial_);
  streams_[handle] = StreamState{context, device, is_default, {}, {}};
  return handle;
}

Status Timeline::DestroyStream(void* handle, void* context, bool force) {
  if (handle == nullptr)
    return Fail(acl::kInvalidParam, "the stream is null: a default stream cannot be destroyed");
  StreamState* stream = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (!status.ok()) return status;
  if (!force && !stream->queue.empty()) {
    violations.push_back(Fail(acl::kRtParamInvalid,
                              "stream %p destroyed with %zu operations queued: synchronise first", handle,
                              stream->queue.size())
                             .text);
    Drain(*stream);
  }
  Discard(*stream);
  streams_.erase(handle);
  return {};
}

void Timeline::DestroyStreamsOf(void* context) {
  for (auto at = streams_.begin(); at != streams_.end();) {
    if (at->second.context == context) {
      Drain(at->second);
      at = streams_.erase(at);
    } else {
      ++at;
    }
  }
}

Status Timeline::SubmitCopy(void* handle, void* context, const Copy& copy) {
  StreamState* stream = nullptr;
  acl::MemcpyKind kind = acl::kMemcpyDefault;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) status = memory_.CheckCopy(copy, true, &kind);
  if (!status.ok()) return status;
  Operation operation{Operation::Kind::kCopy};
  operation.copy = copy;
  if (copy.kind == acl::kHostBufToDevice)
    operation.staged.assign(static_cast<const char*>(copy.src), copy.bytes);
  return Submit(*stream, std::move(operation));
}

Status Timeline::SubmitFill(void* handle, void* context, const Fill& fill) {
  StreamState* stream = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) status = memory_.CheckFill(fill);
  if (!status.ok()) return status;
  Operation operation{Operation::Kind::kFill};
  operation.fill = fill;
  return Submit(*stream, operation);
}

Status Timeline::Record(void* event, void* handle, void* context) {
  StreamState* stream = nullptr;
  EventState* state = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) status = FindEvent(event, &state);
  if (!status.ok()) return status;
  if (state->device != stream->device) {
    return Fail(acl::kRtParamInvalid, "event %p is of device %d, the stream of device %d", event,
                state->device, stream->device);
  }
  Operation operation{Operation::Kind::kRecord};
  operation.event = event;
  operation.ticket = ++state->recorded;
  state->pending[operation.ticket] = handle;
  return Submit(*stream, operation);
}

Status Timeline::Wait(void* event, void* handle, void* context) {
  StreamState* stream = nullptr;
  EventState* state = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) status = FindEvent(event, &state);
  if (!status.ok()) return status;
  if (state->recorded == state->reset) {
    return Fail(acl::kRtParamInvalid, "event %p is not recorded: waiting for it would order nothing", event);
  }
  Operation operation{Operation::Kind::kWait};
  operation.event = event;
  operation.ticket = state->recorded;
  return Submit(*stream, operation);
}

Status Timeline::Reset(void* event, void* handle, void* context) {
  StreamState* stream = nullptr;
  EventState* state = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) status = FindEvent(event, &state);
  if (!status.ok()) return status;
  Operation operation{Operation::Kind::kReset};
  operation.event = event;
  operation.ticket = state->recorded;
  return Submit(*stream, operation);
}

Status Timeline::Synchronize(void* handle, void* context) {
  StreamState* stream = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (!status.ok()) return status;
  Drain(*stream);
  return std::exchange(stream->error, Status{});
}

Status Timeline::SynchronizeDevice(int32_t device) {
  Status first;
  for (auto& [handle, stream] : streams_) {
    if (stream.device == device) Drain(stream);
  }
  for (auto& [handle, stream] : streams_) {
    if (stream.device != device) continue;
    Status error = std::exchange(stream.error, Status{});
    if (first.ok()) first = error;
  }
  return first;
}

Status Timeline::SynchronizeEvent(void* event) {
  EventState* state = nullptr;
  Status status = FindEvent(event, &state);
  if (!status.ok()) return status;
  if (state->recorded == state->reset) {
    return Fail(acl::kRtParamInvalid, "event %p is not recorded: the wait would never end", event);
  }
  RunUntilRecorded(event, state->recorded);
  return {};
}

Status Timeline::QueryStream(void* handle, void* context, bool* idle) {
  StreamState* stream = nullptr;
  Status status = FindStream(handle, context, &stream);
  if (status.ok()) *idle = stream->queue.empty();
  return status;
}

Status Timeline::QueryEvent(void* event, bool* complete) {
  EventState* state = nullptr;
  Status status = FindEvent(event, &state);
  if (status.ok()) *complete = state->recorded > state->reset && state->pending.count(state->recorded) == 0;
  return status;
}

Status Timeline::ElapsedTime(void* start, void* end, float* milliseconds) {
  EventState* events[2] = {};
  Status status = FindEvent(start, &events[0]);
  if (status.ok()) status = FindEvent(end, &events[1]);
  if (!status.ok()) return status;
  for (void* event : {start, end}) {
    bool complete = false;
    status = QueryEvent(event, &complete);
    if (status.ok() && !complete) {
      status = Fail(acl::kRtParamInvalid, "event %p has no record that has run: synchronise it first", event);
    }
    if (!status.ok()) return status;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(events[1]->at - events[0]->at).count();
  return {};
}

Status Timeline::CreateEvent(int32_t device, bool outlives, void** event) {
  uint64_t live = CountEvents(device);
  if (live >= max_events) {
    return Fail(kNoEventResource, "one more event asked, but device %d has %llu of %u events live", device,
                static_cast<unsigned long long>(live), max_events);
  }
  *event = MakeHandle(HandleKind::kEvent, ++serial_);
  events_[*event] = EventState{device, outlives};
  live_events_[device] += 1;
  return {};
}

Status Timeline::DestroyEvent(void* event) {
  EventState* state = nullptr;
  Status status = FindEvent(event, &state);
  if (!status.ok()) return status;
  if (state->outlives && state->queued > 0) {
    state->destroyed = true;
  } else {
    live_events_[state->device] -= 1;
    events_.erase(event);
  }
  return {};
}

void Timeline::DestroyEventsOf(int32_t device) {
  for (auto at = events_.begin(); at != events_.end();) {
    at = at->second.device == device ? events_.erase(at) : std::next(at);
  }
  live_events_.erase(device);
}

uint64_t Timeline::CountStreams(int32_t device) const {
  return static_cast<uint64_t>(std::count_if(streams_.begin(), streams_.end(), [device](const auto& entry) {
    return entry.second.device == device && !entry.second.is_default;
  }));
}

uint64_t Timeline::CountEvents(int32_t device) const {
  auto count = live_events_.find(device);
  return count == live_events_.end() ? 0 : count->second;
}

Status Timeline::FindStream(void* handle, void* context, StreamState** found) {
  auto at = streams_.find(handle);
  if (at == streams_.end()) return Fail(acl::kRtParamInvalid, "%p is no live stream", handle);
  if (at->second.context != context) {
    return Fail(acl::kRtStreamContext, "stream %p belongs to context %p, but the thread's context is %p",
                handle, at->second.context, context);
  }
  *found = &at->second;
  return {};
}

Status Timeline::FindEvent(void* event, EventState** found) {
  if (event == nullptr) return Fail(acl::kInvalidParam, "the event is null");
  auto at = events_.find(event);
  if (at == events_.end() || at->second.destroyed) {
    return Fail(acl::kRtParamInvalid, "%p is no live event", event);
  }
  *found = &at->second;
  return {};
}

Status Timeline::Submit(StreamState& stream, Operation operation) {
  auto event = events_.find(operation.event);
  if (event != events_.end()) event->second.queued += 1;
  if (within_calls_ > 0) operation.due = tick_ + 1 + generator_() % within_calls_;
  stream.queue.push_back(std::move(operation));
  if (within_calls_ == 0) Drain(stream);
  return {};
}

bool Timeline::MayRun(const Operation& operation) const {
  if (operation.kind != Operation::Kind::kWait) return true;
  auto event = events_.find(operation.event);
  return event == events_.end() || event->second.pending.count(operation.ticket) == 0;
}

void Timeline::RunFront(StreamState& stream) {
  const Operation& front = stream.queue.front();
  if (!MayRun(front)) RunUntilRecorded(front.event, front.ticket);
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (!operation.staged.empty()) operation.copy.src = operation.staged.data();
  Status status = Execute(operation);
  Unqueue(operation);
  if (!status.ok()) Violate(stream, status);
}

void Timeline::Unqueue(const Operation& operation) {
  auto event = events_.find(operation.event);
  if (event == events_.end()) return;
  event->second.queued -= 1;
  if (event->second.queued > 0 || !event->second.destroyed) return;
  live_events_[event->second.device] -= 1;
  events_.erase(event);
}

void Timeline::RunUntilRecorded(void* event, uint64_t ticket) {
  EventState& state = events_.at(event);
  for (auto at = state.pending.find(ticket); at != state.pending.end(); at = state.pending.find(ticket)) {
    RunFront(streams_.at(at->second));
  }
}

void Timeline::Drain(StreamState& stream) {
  while (!stream.queue.empty()) RunFront(stream);
}

// Drops what is queued. Dropped records count as run: whoever waits for them must not wait for ever.
void Timeline::Discard(StreamState& stream) {
  for (const Operation& operation : stream.queue) {
    auto event = events_.find(operation.event);
    if (operation.kind == Operation::Kind::kRecord && event != events_.end()) {
      event->second.pending.erase(operation.ticket);
    }
    Unqueue(operation);
  }
  stream.queue.clear();
}

Status Timeline::Execute(const Operation& operation) {
  if (operation.kind == Operation::Kind::kCopy || operation.kind == Operation::Kind::kFill) {
    bool copy = operation.kind == Operation::Kind::kCopy;
    Status status = copy ? memory_.RunCopy(operation.copy, true) : memory_.RunFill(operation.fill);
    if (!status.ok()) status = {kSystemDma, (copy ? "queued copy: " : "queued memset: ") + status.text};
    return status;
  }
  auto event = events_.find(operation.event);
  if (event == events_.end()) {
    return Fail(acl::kRtParamInvalid, "queued event operation: event %p was destroyed meanwhile",
                operation.event);
  }
  if (operation.kind == Operation::Kind::kRecord) {
    event->second.pending.erase(operation.ticket);
    event->second.at = std::chrono::steady_clock::now();
  }
  if (operation.kind == Operation::Kind::kReset)
    event->second.reset = std::max(event->second.reset, operation.ticket);
  return {};
}

void Timeline::Violate(StreamState& stream, const Status& status) {
  violations.push_back(status.text);
  if (stream.error.ok()) stream.error = status;
}

}  // namespace npc::sim
