// Tickets: points in the work of streams, and whether they have passed (P5).
//
// Contract
//   - take() records an event on the stream after everything the caller has enqueued there, and returns its
//   number
//   - poll() returns the newest ticket up to which all have passed; it never blocks and never fails
//   - wait() blocks until a ticket has passed, by synchronising the streams in question
//   - take() never fails: where the runtime gives no event (they are finite) or does not record it, the
//   ticket stays
//     open and poll() tries again. Its blocks are late, not wrong
//   - thread-safe by a mutex of its own, which is never held together with the cache's
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "cache/types.h"
#include "device/runtime.h"

namespace npc::device {

class Fences {
 public:
  // Tests only: `fenced` false lets every ticket pass at once, so that they can see what fences are for.
  explicit Fences(std::shared_ptr<Runtime> runtime, bool fenced = true)
      : runtime_(std::move(runtime)), fenced_(fenced) {}
  ~Fences();
  Fences(const Fences&) = delete;
  Fences& operator=(const Fences&) = delete;

  Ticket take(acl::Stream stream);
  Ticket poll();
  void wait(Ticket ticket);  // throws acl::AclError where a stream cannot be synchronised
  Ticket newest() const;

 private:
  struct Open {
    Ticket ticket;
    acl::Stream stream;
    acl::Event event;  // null: not recorded yet
  };

  void record(Open& open);
  bool has_passed(const Open& open) const;
  void pass_oldest();

  std::shared_ptr<Runtime> runtime_;
  bool fenced_;
  mutable std::mutex mutex_;
  std::deque<Open> open_;           // guarded, as below; tickets ascend
  std::vector<acl::Event> spare_;   // events that can be recorded again
  Ticket newest_ = 0, passed_ = 0;  // passed_: every ticket up to it has passed
};

}  // namespace npc::device
