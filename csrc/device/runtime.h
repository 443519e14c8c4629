// One device of one loaded runtime, and the rules of calling it.
//
// Contract
//   - every vendor call of the device room happens inside a Scope: it refuses in a forked child (whose
//   context is
//     not valid), makes the device's context current for this thread, and leaves the caller's own as it was
//     found
//   - a failed call throws acl::AclError naming the call and what it was asked for
//   - once the process is exiting the runtime may be gone: destructors ask may_call() and then make no call
//   - aclFinalize and aclrtResetDevice are never called: others in the process use the runtime too
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "acl/loader.h"

namespace npc::device {

class Runtime {
 public:
  // Loads, initialises and sets `device`. Throws acl::RuntimeNotFound, acl::AclError, std::invalid_argument.
  Runtime(const std::string& explicit_path, int32_t device);

  const acl::Api& api() const { return loaded_.api; }
  const std::string& path() const { return loaded_.path; }
  const std::string& how() const { return loaded_.how; }

  // Throws AclError unless `code` is success.
  void check(acl::Error code, const std::string& doing) const;

  // False in a forked child and once the process is exiting.
  bool may_call() const;
  // Throws CacheClosed in a forked child.
  void check_process() const;

  static void process_is_exiting();

  class Scope {
   public:
    explicit Scope(const Runtime& runtime);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const Runtime& runtime_;
    acl::Context callers_ = nullptr;  // null: the thread had none
  };

 private:
  acl::Loaded loaded_;
  acl::Context context_ = nullptr;
  unsigned fork_generation_;  // of the process that made this
};

}  // namespace npc::device
