#include "acl/loader.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>

namespace npc::acl {
namespace {

constexpr const char* kSoname = "libascendcl.so";
constexpr const char* kVariable = "NPU_PROMPT_CACHE_ACL_LIB";

template <typename Function>
void bind(void* library, const char* name, Function& slot, std::string& missing) {
  slot = reinterpret_cast<Function>(dlsym(library, name));
  if (slot == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
}

// Empty, or the names that the library lacks.
std::string bind_all(void* library, Api& api) {
  std::string missing;
  bind(library, "aclInit", api.aclInit, missing);
  bind(library, "aclrtSetDevice", api.aclrtSetDevice, missing);
  bind(library, "aclrtGetDeviceCount", api.aclrtGetDeviceCount, missing);
  bind(library, "aclrtGetCurrentContext", api.aclrtGetCurrentContext, missing);
  bind(library, "aclrtSetCurrentContext", api.aclrtSetCurrentContext, missing);
  bind(library, "aclrtSynchronizeDevice", api.aclrtSynchronizeDevice, missing);
  bind(library, "aclrtMalloc", api.aclrtMalloc, missing);
  bind(library, "aclrtFree", api.aclrtFree, missing);
  bind(library, "aclrtMemcpyAsync", api.aclrtMemcpyAsync, missing);
  bind(library, "aclrtGetMemInfo", api.aclrtGetMemInfo, missing);
  bind(library, "aclrtCreateStream", api.aclrtCreateStream, missing);
  bind(library, "aclrtDestroyStream", api.aclrtDestroyStream, missing);
  bind(library, "aclrtSynchronizeStream", api.aclrtSynchronizeStream, missing);
  bind(library, "aclrtCreateEventExWithFlag", api.aclrtCreateEventExWithFlag, missing);
  bind(library, "aclrtRecordEvent", api.aclrtRecordEvent, missing);
  bind(library, "aclrtQueryEventStatus", api.aclrtQueryEventStatus, missing);
  bind(library, "aclrtDestroyEvent", api.aclrtDestroyEvent, missing);
  bind(library, "aclGetRecentErrMsg", api.aclGetRecentErrMsg, missing);
  return missing;
}

std::string file_of(void* library) {
  link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr) return map->l_name;
  return "(unknown file)";
}

struct Search {
  std::string looked;  // one line a place
  Loaded found;

  // True when this place served. RTLD_LOCAL: the names stay ours alone.
  bool try_place(const char* name, int flags, const std::string& how) {
    dlerror();
    void* library = dlopen(name, flags);
    if (library == nullptr) {
      const char* why = dlerror();
      looked += "\n  - " + how + ": " + (why != nullptr ? why : "not loaded");
      return false;
    }
    std::string missing = bind_all(library, found.api);
    if (!missing.empty()) {
      looked += "\n  - " + how + ": " + file_of(library) + " lacks " + missing;
      return false;
    }
    found.path = file_of(library);
    found.how = how;
    return true;
  }

  [[noreturn]] void fail() const {
    throw RuntimeNotFound(
        "no Ascend runtime found. Looked at:" + looked +
        "\nInstall CANN and source its set_env.sh, or name the library with the argument acl_lib= or "
        "the environment variable " +
        kVariable + ". To run without an NPU ask for it: device=\"cpu\".");
  }
};

}  // namespace

const char* error_name(Error code) {
  switch (code) {
    case kInvalidParam:
      return "ACL_ERROR_INVALID_PARAM";
    case kUninitialized:
      return "ACL_ERROR_UNINITIALIZE";
    case kRepeatInitialize:
      return "ACL_ERROR_REPEAT_INITIALIZE";
    case kRtParamInvalid:
      return "ACL_ERROR_RT_PARAM_INVALID";
    case kRtContextNull:
      return "ACL_ERROR_RT_CONTEXT_NULL";
    case kRtStreamContext:
      return "ACL_ERROR_RT_STREAM_CONTEXT";
    case kRtFeatureNotSupported:
      return "ACL_ERROR_RT_FEATURE_NOT_SUPPORT";
    case kRtMemoryAllocation:
      return "ACL_ERROR_RT_MEMORY_ALLOCATION";
    case kRtDeviceOom:
      return "ACL_ERROR_RT_DEVICE_OOM";
    case kInternalError:
      return "ACL_ERROR_INTERNAL_ERROR";
    case kDriverInternalError:
      return "ACL_ERROR_RT_DRV_INTERNAL_ERROR";
    default:
      return "see acl_base_rt.h and rt_error_codes.h";
  }
}

namespace {

std::string error_text(Error code, const std::string& doing, const char* detail) {
  std::string text = doing + " failed: " + std::to_string(code) + " (" + error_name(code) + ")";
  if (detail != nullptr && *detail != '\0') text += ": " + std::string(detail);
  return text;
}

}  // namespace

AclError::AclError(Error code, const std::string& doing, const char* detail)
    : std::runtime_error(error_text(code, doing, detail)), code_(code) {}

Loaded load(const std::string& explicit_path) {
  Search search;
  if (!explicit_path.empty()) {
    if (!search.try_place(explicit_path.c_str(), RTLD_NOW | RTLD_LOCAL, "the path given")) search.fail();
    return search.found;
  }
  if (const char* path = std::getenv(kVariable); path != nullptr && *path != '\0') {
    if (!search.try_place(path, RTLD_NOW | RTLD_LOCAL, std::string("the variable ") + kVariable))
      search.fail();
    return search.found;
  }
  search.looked += std::string("\n  - the variable ") + kVariable + ": not set";
  if (!search.try_place(kSoname, RTLD_NOW | RTLD_NOLOAD, "a libascendcl.so this process loaded before") &&
      !search.try_place(kSoname, RTLD_NOW | RTLD_LOCAL, "libascendcl.so by the loader's search path")) {
    search.fail();
  }
  return search.found;
}

}  // namespace npc::acl
