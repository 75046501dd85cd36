#include "cuda/run.h"

#include "core/explain.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/decide.h"

#include <ATen/cuda/CUDAContext.h>

namespace fused::cuda {

namespace {

// This thread's plan, or one for this call only.
Plan* plan_of(const PassCall& call, std::optional<Plan>& for_this_call) {
  if (auto* known = take_plan(call.problem)) return known;
  if (!tune::is_capturing()) {
    const explain::Quiet nothing_shown;
    for (const auto& layer : call.layers) run(layer);  // by their plans, with which it is compared
  }
  return tune::make_plan(call, for_this_call);
}

}  // namespace

bool is_small(const PassCall& call) {
  std::optional<Plan> for_this_call;
  const auto* plan = plan_of(call, for_this_call);
  return plan != nullptr && gemm::has_step(*plan->strategy, Step::own_small);
}

bool run(const PassCall& call, kernels::SmallGradients* waiting) {
  std::optional<Plan> for_this_call;
  auto* plan = plan_of(call, for_this_call);
  if (plan == nullptr) return false;
  if (!plan->remark.empty()) explain::append(plan->remark.c_str());
  const auto stream = at::cuda::getCurrentCUDAStream(call.problem.matmul.device);
  const Workspace workspace(plan->algorithm.workspace);
  if (execute(call, *plan, workspace.data(), stream, waiting)) return true;
  // Checked beforehand, so this is a want of memory or the like: the plan stays, this call goes on.
  TORCH_WARN_ONCE("fused: a product failed that had run before (", plan->strategy->name, ", ",
                  call.problem.matmul, "); eager's way is taken");
  for_this_call = tune::fallback_plan(call.problem, "it failed");
  return for_this_call && execute(call, *for_this_call, nullptr, stream);
}

}  // namespace fused::cuda
