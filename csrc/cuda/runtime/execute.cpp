#include "cuda/runtime/execute.h"

#include "core/aten_activation.h"
#include "core/explain.h"
#include "cuda/hopper/hopper.h"
#include "cuda/kernels/activation.h"
#include "cuda/runtime/device.h"

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>

namespace fused::cuda {
namespace {

// What ATen's steps work on; they own nothing. The device is given, or it would be asked for.
Tensor as_tensor(const PassCall& call, void* data, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const auto& matmul = call.problem.matmul;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(matmul.device));
  return at::for_blob(data, sizes)
      .strides(strides)
      .target_device(device)
      .options(at::TensorOptions().dtype(scalar_type(matmul.type)).device(device))
      .make_tensor();
}

Tensor as_tensor(const Matrix& m, const PassCall& call) {
  return as_tensor(call, m.data, {m.rows, m.cols},
                   {m.transposed ? 1 : m.ld, m.transposed ? m.ld : 1});
}

// Along the features: of a weight gradient, [features, in], they are the rows.
Tensor bias_tensor(const PassCall& call) {
  const bool rows = call.problem.pass == gemm::Pass::wgrad;
  return as_tensor(call, call.bias, {rows ? call.result.rows : call.result.cols}, {1});
}

// What act' is applied to: a product's result, or what came.
const Matrix& gradient_of(const PassCall& call) {
  return call.problem.pass == gemm::Pass::activation ? call.left : call.result;
}

const char* aten_matmul(const PassCall& call, const Strategy& strategy) {
  auto result = as_tensor(matmul_result(call, strategy), call);
  const auto left = as_tensor(call.left, call), right = as_tensor(call.right, call);
  if (call.problem.pass == gemm::Pass::fprop && call.bias != nullptr) {
    const auto bias = bias_tensor(call);
    at::addmm_out(result, call.bias_is_matrix ? bias.expand_as(result) : bias, left, right);
    return "ATen addmm";
  }
  at::mm_out(result, left, right);
  return "ATen mm";
}

// In place of the gradient of h.
void own_gating(const PassCall& call) {
  kernels::GatingBackward args;
  args.activation = call.problem.activation;
  args.type = call.problem.matmul.type;
  args.rows = call.result.rows, args.cols = call.result.cols;
  args.grad = call.result.data, args.ld_grad = call.result.ld;
  args.gate = call.aux.data, args.ld_gate = call.aux.ld;
  args.up = call.gating.up, args.ld_up = call.gating.ld_up;
  args.grad_gate = call.result.data, args.grad_up = call.gating.grad_up;
  args.ld_result = call.result.ld;
  args.hidden = call.gating.hidden;
  gating_pass(args);
}

void aten_gating(const PassCall& call) {
  const auto& [rows, cols, ld, transposed, data] = call.result;
  const auto at_stride = [&, rows = rows, cols = cols](const void* values, int64_t stride) {
    return as_tensor(call, const_cast<void*>(values), {rows, cols}, {stride, 1});
  };
  explain::append("ATen gating gradient");
  auto grad = at_stride(data, ld), grad_up = at_stride(call.gating.grad_up, ld);
  const auto gate = as_tensor(call.aux, call), up = at_stride(call.gating.up, call.gating.ld_up);
  const auto activated = activate(gate, call.problem.activation);
  if (call.gating.hidden != nullptr) {
    auto hidden = at_stride(call.gating.hidden, cols);
    at::mul_out(hidden, activated, up);
  }
  at::mul_out(grad_up, grad, activated);
  activation_gradient_out(grad, grad * up, gate, call.problem.activation);
}

}  // namespace

void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, void* sums) {
  kernels::ActivationBackward args;
  args.activation = activation;
  args.mask = mask;
  args.type = type;
  const auto* device = at::cuda::getCurrentDeviceProperties();
  args.processors = device->multiProcessorCount;
  args.arch = device->major * 10 + device->minor;
  args.rows = grad.rows, args.cols = grad.cols;
  args.grad = grad.data, args.ld_grad = grad.ld;
  args.saved = saved.data, args.ld_saved = saved.ld;
  args.dz = dz, args.grad_bias = sums;
  explain::append(activation == Activation::none ? "own column sum" : "own one-pass kernel");
  const Workspace scratch(kernels::scratch_bytes(args));
  kernels::activation_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
}

void gating_pass(kernels::GatingBackward args) {
  args.processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  explain::append("own one-pass gating kernel");
  const Workspace scratch(kernels::scratch_bytes(args));
  kernels::gating_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
}

bool execute(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream) {
  const auto& p = call.problem;
  const auto type = p.matmul.type;
  const bool active = p.activation != Activation::none;
  for (const auto step : plan.strategy->steps) {
    switch (step) {
      case Step::none:
        break;
      case Step::matmul:
        if (plan.strategy->provider == Provider::aten) {
          explain::append(aten_matmul(call, *plan.strategy));
          break;
        }
        if (plan.strategy->provider == Provider::own) {
          if (!hopper::run(p, plan.algorithm, operands_of(call, *plan.strategy), workspace,
                           stream)) {
            return false;
          }
          explain::append("own Hopper kernel");
          break;
        }
        if (matmul(lt_handle(p.matmul.device), plan.matmul, *plan.descriptors, plan.algorithm,
                   operands_of(call, *plan.strategy), workspace, stream) != CUBLAS_STATUS_SUCCESS) {
          return false;
        }
        explain::append(gemm::name(plan.matmul.epilogue));
        break;
      case Step::own_activation: {
        const auto& z = matmul_result(call, *plan.strategy);
        explain::append("own activation kernel");
        kernels::activation_forward(p.activation, type, z.rows, z.cols, z.data, z.ld,
                                    call.result.data, call.result.ld, stream);
        break;
      }
      case Step::own_one_pass:
        if (active) {
          one_pass(gradient_of(call), call.aux, p.mask, p.activation, type, call.result.data,
                   call.bias);
        }
        break;
      case Step::own_column_sum:
        if (p.bias) one_pass(summed(call), {}, false, Activation::none, type, nullptr, call.bias);
        break;
      case Step::aten_activation:
        if (!active) break;
        explain::append("ATen activation");
        activate_out(as_tensor(call.result, call),
                     as_tensor(matmul_result(call, *plan.strategy), call), p.activation);
        break;
      case Step::aten_gradient: {
        explain::append("ATen activation gradient");
        const auto dz = as_tensor(call.result, call);
        activation_gradient_out(dz, as_tensor(gradient_of(call), call), as_tensor(call.aux, call),
                                p.activation);
        break;
      }
      case Step::own_gating:
        own_gating(call);
        break;
      case Step::aten_gating:
        aten_gating(call);
        break;
      case Step::aten_column_sum: {
        if (!p.bias) break;
        explain::append("ATen sum");
        auto sums = bias_tensor(call);
        at::sum_out(sums, as_tensor(summed(call), call), at::IntArrayRef{0});
        break;
      }
    }
  }
  return true;
}

}  // namespace fused::cuda
