#include "device/fences.h"

namespace npc::device {

Fences::~Fences() {
  if (!runtime_->may_call()) return;
  try {
    Runtime::Scope scope(*runtime_);
    for (const Open& open : open_) {
      if (open.event != nullptr) runtime_->api().aclrtDestroyEvent(open.event);
    }
    for (acl::Event event : spare_) runtime_->api().aclrtDestroyEvent(event);
  } catch (const std::exception&) {
    // No context to be had: the runtime takes its events back with the process.
  }
}

Ticket Fences::take(acl::Stream stream) {
  std::lock_guard lock(mutex_);
  if (!fenced_) return passed_ = ++newest_;
  open_.push_back({++newest_, stream, nullptr});
  try {
    Runtime::Scope scope(*runtime_);
    record(open_.back());
  } catch (const acl::AclError&) {
    // stays open; poll() tries again
  }
  return newest_;
}

Ticket Fences::poll() {
  std::lock_guard lock(mutex_);
  if (open_.empty()) return passed_;
  try {
    Runtime::Scope scope(*runtime_);
    while (!open_.empty()) {
      Open& oldest = open_.front();
      if (oldest.event == nullptr) record(oldest);
      if (!has_passed(oldest)) break;
      pass_oldest();
    }
  } catch (const acl::AclError&) {
    // A runtime that cannot be asked has not said that anything passed.
  }
  return passed_;
}

void Fences::wait(Ticket ticket) {
  Runtime::Scope scope(*runtime_);
  while (poll() < ticket) {
    std::unique_lock lock(mutex_);
    if (open_.empty()) continue;  // another thread was quicker
    Open oldest = open_.front();
    lock.unlock();  // others may take tickets meanwhile
    runtime_->check(runtime_->api().aclrtSynchronizeStream(oldest.stream),
                    "aclrtSynchronizeStream to wait for blocks in use");
    lock.lock();
    while (!open_.empty() && open_.front().ticket <= oldest.ticket) pass_oldest();
  }
}

void Fences::pass_oldest() {
  passed_ = open_.front().ticket;
  if (open_.front().event != nullptr) spare_.push_back(open_.front().event);
  open_.pop_front();
}

Ticket Fences::newest() const {
  std::lock_guard lock(mutex_);
  return newest_;
}

void Fences::record(Open& open) {
  acl::Event event = nullptr;
  if (!spare_.empty()) {
    event = spare_.back();
    spare_.pop_back();
  } else if (runtime_->api().aclrtCreateEventExWithFlag(&event, acl::kEventSync) != acl::kSuccess) {
    return;
  }
  if (runtime_->api().aclrtRecordEvent(event, open.stream) == acl::kSuccess) {
    open.event = event;
  } else {
    spare_.push_back(event);
  }
}

bool Fences::has_passed(const Open& open) const {
  if (open.event == nullptr) return false;
  acl::EventRecordedStatus status = acl::kEventNotReady;
  return runtime_->api().aclrtQueryEventStatus(open.event, &status) == acl::kSuccess &&
         status == acl::kEventComplete;
}

}  // namespace npc::device
