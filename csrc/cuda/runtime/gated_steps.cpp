#include "cuda/runtime/gated_steps.h"

#include "core/aten_activation.h"
#include "core/explain.h"
#include "cuda/runtime/as_tensor.h"

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>

namespace fused::cuda {
namespace {

// Of the result's size, with rows of unit stride.
Tensor values_of(const PassCall& call, const void* data, int64_t ld) {
  return as_tensor(call, const_cast<void*>(data), {call.result.rows, call.result.cols}, {ld, 1});
}

// What both of our kernels read.
void describe(kernels::Gating& args, const PassCall& call, const void* up, int64_t ld_up) {
  args.activation = call.problem.activation;
  args.type = call.problem.matmul.type;
  args.rows = call.result.rows, args.cols = call.result.cols;
  args.gate = call.aux.data, args.ld_gate = call.aux.ld;
  args.up = up, args.ld_up = ld_up;
}

}  // namespace

int64_t missing_preactivations(const PassCall& call, const Strategy& strategy) {
  const bool missing = call.problem.pass == Pass::glu && call.aux.data == nullptr &&
                       gemm::has_step(strategy, Step::matmul_up);
  return missing ? 2 * call.result.rows * call.result.cols * size_of(call.problem.matmul.type) : 0;
}

PassCall with_preactivations(const PassCall& call, void* memory, int64_t bytes) {
  PassCall own = call;
  own.aux = {call.result.rows, call.result.cols, call.result.cols, false, memory};
  own.up.preactivation = static_cast<char*>(memory) + bytes / 2;
  return own;
}

void own_glu(const PassCall& call) {
  kernels::Gating args;
  describe(args, call, call.up.preactivation, call.aux.ld);
  args.hidden = call.result.data;
  explain::append("own gating kernel");
  kernels::gating_forward(args, at::cuda::getCurrentCUDAStream());
}

void aten_glu(const PassCall& call) {
  explain::append("ATen gating");
  auto hidden = as_tensor(call.result, call);
  const auto gate = as_tensor(call.aux, call);
  at::mul_out(hidden, activate(gate, call.problem.activation),
              values_of(call, call.up.preactivation, call.aux.ld));
}

void own_gating(const PassCall& call) {
  kernels::GatingBackward args;
  describe(args, call, call.gating.up, call.gating.ld_up);
  args.grad = call.result.data, args.ld_grad = call.result.ld;
  args.grad_gate = call.result.data, args.grad_up = call.gating.grad_up;
  args.ld_result = call.result.ld;
  args.hidden = call.gating.hidden;
  gating_pass(args);
}

void aten_gating(const PassCall& call) {
  explain::append("ATen gating gradient");
  auto grad = as_tensor(call.result, call);
  auto grad_up = values_of(call, call.gating.grad_up, call.result.ld);
  const auto gate = as_tensor(call.aux, call);
  const auto up = values_of(call, call.gating.up, call.gating.ld_up);
  const auto activated = activate(gate, call.problem.activation);
  if (call.gating.hidden != nullptr) {
    auto hidden = values_of(call, call.gating.hidden, call.result.cols);
    at::mul_out(hidden, activated, up);
  }
  at::mul_out(grad_up, grad, activated);
  activation_gradient_out(grad, grad * up, gate, call.problem.activation);
}

void gating_pass(kernels::GatingBackward args) {
  args.processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  explain::append("own one-pass gating kernel");
  const Workspace scratch(kernels::scratch_bytes(args));
  kernels::gating_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
}

}  // namespace fused::cuda
