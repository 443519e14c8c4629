// The Ascend Transformer Boost library (libatb.so), as far as torch_npu's libop_plugin_atb.so is linked
// against it: C++ names, mangled as the vendor's are. Every operation is refused. They are here because the
// wheel loads its `atb` operators' schemas only where it finds this library.
#include <cstdint>

#include "sim/call.h"

// The parameter types too: a function template's instance is no more visible than its arguments.
#pragma GCC visibility push(default)

namespace atb {

class Context;
class Operation;
struct Tensor;

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor& tensor);
};

namespace infer {

struct ElewiseParam;
struct GroupTopkParam;
struct LinearParam;
struct PagedAttentionParam;
struct ReshapeAndCacheParam;
struct RmsNormParam;
struct RopeParam;
struct SelfAttentionParam;

}  // namespace infer

namespace {

int Refuse(const char* name) {
  return npc::sim::Finish(name, npc::sim::Fail(npc::acl::kRtFeatureNotSupported,
                                               "the simulated Ascend runtime computes nothing"));
}

}  // namespace

template <typename Parameters>
int CreateOperation(const Parameters&, Operation**) {
  return Refuse("atb::CreateOperation");
}

template int CreateOperation(const infer::ElewiseParam&, Operation**);
template int CreateOperation(const infer::GroupTopkParam&, Operation**);
template int CreateOperation(const infer::LinearParam&, Operation**);
template int CreateOperation(const infer::PagedAttentionParam&, Operation**);
template int CreateOperation(const infer::ReshapeAndCacheParam&, Operation**);
template int CreateOperation(const infer::RmsNormParam&, Operation**);
template int CreateOperation(const infer::RopeParam&, Operation**);
template int CreateOperation(const infer::SelfAttentionParam&, Operation**);

int CreateContext(Context**) { return Refuse("atb::CreateContext"); }
int DestroyContext(Context*) { return Refuse("atb::DestroyContext"); }
int DestroyOperation(Operation*) { return Refuse("atb::DestroyOperation"); }
uint64_t Utils::GetTensorSize(const Tensor&) { return 0; }

}  // namespace atb

#pragma GCC visibility pop
