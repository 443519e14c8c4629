#include "device/runtime.h"

#include <pthread.h>

#include "cache/types.h"

namespace npc::device {
namespace {

std::atomic<bool> g_exiting{false};
std::atomic<unsigned> g_fork_generation{0};

// Counting forks costs a load per call where comparing process ids would cost a system call.
void count_forks_once() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { ++g_fork_generation; });
  (void)registered;
}

}  // namespace

Runtime::Runtime(const std::string& explicit_path, int32_t device) : loaded_(acl::load(explicit_path)) {
  count_forks_once();
  fork_generation_ = g_fork_generation;
  acl::Error code = api().aclInit(nullptr);
  if (code != acl::kRepeatInitialize) check(code, "aclInit");
  uint32_t count = 0;
  check(api().aclrtGetDeviceCount(&count), "aclrtGetDeviceCount");
  if (device < 0 || static_cast<uint32_t>(device) >= count)
    throw std::invalid_argument("device " + std::to_string(device) + ": the runtime " + path() + " has " +
                                std::to_string(count) + " device(s), numbered from 0");
  acl::Context callers = nullptr;
  bool had_context = api().aclrtGetCurrentContext(&callers) == acl::kSuccess && callers != nullptr;
  check(api().aclrtSetDevice(device), "aclrtSetDevice(" + std::to_string(device) + ")");
  code = api().aclrtGetCurrentContext(&context_);
  if (had_context) check(api().aclrtSetCurrentContext(callers), "aclrtSetCurrentContext to the caller's");
  check(code, "aclrtGetCurrentContext");
}

void Runtime::check(acl::Error code, const std::string& doing) const {
  if (code != acl::kSuccess) throw acl::AclError(code, doing, api().aclGetRecentErrMsg());
}

bool Runtime::may_call() const { return !g_exiting && fork_generation_ == g_fork_generation; }

void Runtime::check_process() const {
  if (fork_generation_ == g_fork_generation) return;
  throw CacheClosed(
      "this cache belongs to the parent process, and a forked child cannot use its device context; make a "
      "cache in "
      "the child, or start workers by 'spawn'");
}

void Runtime::process_is_exiting() { g_exiting = true; }

Runtime::Scope::Scope(const Runtime& runtime) : runtime_(runtime) {
  runtime.check_process();
  if (runtime.api().aclrtGetCurrentContext(&callers_) != acl::kSuccess) callers_ = nullptr;
  if (callers_ != runtime.context_)
    runtime.check(runtime.api().aclrtSetCurrentContext(runtime.context_), "aclrtSetCurrentContext");
}

Runtime::Scope::~Scope() {
  if (callers_ == nullptr || callers_ == runtime_.context_) return;
  runtime_.api().aclrtSetCurrentContext(callers_);  // nothing can be done about a failure here
}

}  // namespace npc::device
