// Settings that torch_npu makes when it starts. They are about how operators are compiled and run, so here
// they are checked, kept where they can be read back, and change nothing.
#include <cstring>
#include <string>

#include "sim/call.h"

namespace npc::sim {
namespace {

constexpr int kSatModes = 2;         // aclrtFloatOverflowMode: saturation, inf/nan
constexpr int kJitCompile = 10;      // ACL_OP_JIT_COMPILE
constexpr int kCompileOptions = 17;  // aclCompileOpt: 0 to ACL_OP_DEBUG_OPTION

// Empty where the option has no value.
std::string CompileOption(const State& state, int option) {
  auto found = state.compile_options.find(option);
  if (found != state.compile_options.end()) return found->second;
  return option == kJitCompile ? "disable" : "";  // as on A2/A3
}

Status SetSysParam(const Call& call, int option, int64_t value) {
  if (option < 0 || option >= kSysParams) {
    return Fail(acl::kInvalidParam, "system parameter %d is none of 0 to %d", option, kSysParams - 1);
  }
  call.state.sys_params[static_cast<size_t>(option)] = value;
  return {};
}

}  // namespace

NPC_SIM_API acl::Error aclrtSetDeviceSatMode(int mode) {
  return Serve(Function::aclrtSetDeviceSatMode, Needs::kContext, [=](const Call&) -> Status {
    if (mode < 0 || mode >= kSatModes) return Fail(acl::kInvalidParam, "overflow mode %d is unknown", mode);
    return {};
  });
}

NPC_SIM_API acl::Error aclSetCompileopt(int option, const char* value) {
  return Serve(Function::aclSetCompileopt, Needs::kInit, [=](const Call& call) -> Status {
    if (option < 0 || option >= kCompileOptions || value == nullptr) {
      return Fail(acl::kInvalidParam, "compile option %d is unknown, or its value null", option);
    }
    call.state.compile_options[option] = value;
    return {};
  });
}

// Returns a size, and so cannot fail.
NPC_SIM_API size_t aclGetCompileoptSize(int option) {
  if (Forked()) return 0;
  std::lock_guard<std::mutex> lock(TheState().mutex);
  std::string value = CompileOption(TheState(), option);
  return value.empty() ? 0 : value.size() + 1;
}

NPC_SIM_API acl::Error aclGetCompileopt(int option, char* value, size_t bytes) {
  return Serve(Function::aclGetCompileopt, Needs::kInit, [=](const Call& call) -> Status {
    std::string found = CompileOption(call.state, option);
    if (found.empty()) return Fail(acl::kInvalidParam, "compile option %d has no value", option);
    if (value == nullptr || bytes <= found.size()) {
      return Fail(acl::kInvalidParam, "room for %zu bytes given, compile option %d takes %zu", bytes, option,
                  found.size() + 1);
    }
    std::memcpy(value, found.c_str(), found.size() + 1);
    return {};
  });
}

NPC_SIM_API acl::Error aclrtSetSysParamOpt(int option, int64_t value) {
  return Serve(Function::aclrtSetSysParamOpt, Needs::kInit,
               [=](const Call& call) { return SetSysParam(call, option, value); });
}

NPC_SIM_API acl::Error aclrtCtxSetSysParamOpt(int option, int64_t value) {
  return Serve(Function::aclrtCtxSetSysParamOpt, Needs::kContext,
               [=](const Call& call) { return SetSysParam(call, option, value); });
}

NPC_SIM_API acl::Error aclrtGetSysParamOpt(int option, int64_t* value) {
  return Serve(Function::aclrtGetSysParamOpt, Needs::kInit, [=](const Call& call) -> Status {
    if (option < 0 || option >= kSysParams || value == nullptr) {
      return Fail(acl::kInvalidParam, "system parameter %d is none of 0 to %d, or the pointer is null",
                  option, kSysParams - 1);
    }
    *value = call.state.sys_params[static_cast<size_t>(option)];
    return {};
  });
}

NPC_SIM_API acl::Error aclrtSetOpWaitTimeout(uint32_t) {
  return Serve(Function::aclrtSetOpWaitTimeout, Needs::kContext, [](const Call&) { return Status{}; });
}

NPC_SIM_API acl::Error aclrtSetOpExecuteTimeOut(uint32_t) {
  return Serve(Function::aclrtSetOpExecuteTimeOut, Needs::kContext, [](const Call&) { return Status{}; });
}

}  // namespace npc::sim
