// Finding and binding the Ascend runtime (libascendcl.so): the only place that opens it.
//
// Search order: the explicit path (argument) -> environment variable NPU_PROMPT_CACHE_ACL_LIB -> a
// libascendcl.so that this process has loaded already -> the soname, by the loader's own rules. An explicit
// place that fails is an error, not a reason to look further. All functions of the table are bound, or none.
// A library is never closed.
#pragma once

#include <stdexcept>
#include <string>

#include "acl/abi.h"

namespace npc::acl {

// No usable runtime; the message lists every place looked at and what was wrong there.
struct RuntimeNotFound : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The runtime's own name for an error code.
const char* error_name(Error code);

// A call of the runtime that failed.
class AclError : public std::runtime_error {
 public:
  // `doing`: the call and what it was asked for, such as "aclrtMalloc of 1024 bytes".
  AclError(Error code, const std::string& doing, const char* detail);
  Error code() const { return code_; }

 private:
  Error code_;
};

struct Api {
  Error (*aclInit)(const char* config_path);
  Error (*aclrtSetDevice)(int32_t device);
  Error (*aclrtGetDeviceCount)(uint32_t* count);
  Error (*aclrtGetCurrentContext)(Context* context);
  Error (*aclrtSetCurrentContext)(Context context);
  Error (*aclrtSynchronizeDevice)();
  Error (*aclrtMalloc)(void** pointer, size_t bytes, MallocPolicy policy);
  Error (*aclrtFree)(void* pointer);
  Error (*aclrtMemcpyAsync)(void* to, size_t to_bytes, const void* from, size_t bytes, MemcpyKind kind,
                            Stream stream);
  Error (*aclrtGetMemInfo)(MemAttr attr, size_t* free_bytes, size_t* total_bytes);
  Error (*aclrtCreateStream)(Stream* stream);
  Error (*aclrtDestroyStream)(Stream stream);
  Error (*aclrtSynchronizeStream)(Stream stream);
  Error (*aclrtCreateEventExWithFlag)(Event* event, uint32_t flag);
  Error (*aclrtRecordEvent)(Event event, Stream stream);
  Error (*aclrtQueryEventStatus)(Event event, EventRecordedStatus* status);
  Error (*aclrtDestroyEvent)(Event event);
  const char* (*aclGetRecentErrMsg)();
};

struct Loaded {
  Api api{};
  std::string path;  // the file, as the dynamic loader reports it
  std::string how;   // which step of the search order found it
};

// `explicit_path`: empty for none.
Loaded load(const std::string& explicit_path);

}  // namespace npc::acl
