// Operators, kernels and everything else that would compute, or that would need what computes. The simulator
// computes nothing: these are here because torch_npu is linked against them, and each fails, whatever it is
// given. None may ever return 0: the caller would go on with memory that nobody wrote.
//
// They are declared without arguments, which they do not look at.
#include "sim/call.h"

namespace npc::sim {
namespace {

acl::Error Refuse(Function function) {
  return Serve(function, Needs::kInit, [](const Call&) {
    return Fail(acl::kRtFeatureNotSupported,
                "the simulated Ascend runtime has no such service: it computes, compiles and shares nothing");
  });
}

}  // namespace

#define NPC_SIM_REFUSED(name) \
  NPC_SIM_API acl::Error name() { return Refuse(Function::name); }
NPC_SIM_REFUSED_FUNCTIONS(NPC_SIM_REFUSED)
#undef NPC_SIM_REFUSED

}  // namespace npc::sim
