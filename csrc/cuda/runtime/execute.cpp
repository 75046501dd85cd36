#include "cuda/runtime/execute.h"

#include "core/aten_activation.h"
#include "core/explain.h"
#include "cuda/hopper/hopper.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/gating.h"
#include "cuda/runtime/device.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/from_blob.h>

namespace fused::cuda {
namespace {

// Returns memory as a tensor for ATen's functions. Without the device ATen would query it.
Tensor as_tensor(const PassCall& call, void* data, at::IntArrayRef sizes, at::IntArrayRef strides,
                 std::optional<gemm::Type> type = {}) {
  const auto& matmul = call.problem.matmul;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(matmul.device));
  return at::for_blob(data, sizes)
      .strides(strides)
      .target_device(device)
      .options(at::TensorOptions().dtype(scalar_type(type.value_or(matmul.type))).device(device))
      .make_tensor();
}

Tensor as_tensor(const Matrix& m, const PassCall& call, std::optional<gemm::Type> type = {}) {
  return as_tensor(call, m.data, {m.rows, m.cols},
                   {m.transposed ? 1 : m.ld, m.transposed ? m.ld : 1}, type);
}

// Returns the bias as a tensor. Features are the columns of a result, and the rows of a weight
// gradient.
Tensor bias_tensor(const PassCall& call) {
  const bool rows = call.problem.pass == gemm::Pass::wgrad;
  return as_tensor(call, call.bias, {rows ? call.result.rows : call.result.cols}, {1});
}

const char* aten_matmul(const PassCall& call, const Strategy& strategy) {
  const auto& matmul = call.problem.matmul;
  auto result = as_tensor(matmul_result(call, strategy), call, gemm::result_type(matmul));
  const auto left = as_tensor(call.left, call), right = as_tensor(call.right, call);
  if (gemm::is_forward(call.problem.pass) && call.bias != nullptr) {
    const auto bias = bias_tensor(call);
    at::addmm_out(result, call.bias_is_matrix ? bias.expand_as(result) : bias, left, right);
    return "ATen addmm";
  }
  if (matmul.adds || matmul.to_f32) {
    const auto product = at::mm(left, right);
    matmul.adds ? result.add_(product) : result.copy_(product);
    return "ATen mm and sum";
  }
  at::mm_out(result, left, right);
  return "ATen mm";
}

bool run_matmul(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream) {
  const auto& p = call.problem;
  const auto& strategy = *plan.strategy;
  switch (strategy.provider) {
    case Provider::aten:
      explain::append(aten_matmul(call, strategy));
      return true;
    case Provider::own:
      if (!hopper::run(p, plan.algorithm, operands_of(call, strategy), workspace,
                       at::cuda::getDeviceProperties(p.matmul.device)->multiProcessorCount,
                       stream)) {
        return false;
      }
      explain::append("own Hopper kernel");
      return true;
    case Provider::cublaslt:
      if (matmul(device_of(p.matmul.device).handle, plan.matmul, *plan.descriptors, plan.algorithm,
                 operands_of(call, strategy), workspace, stream) != CUBLAS_STATUS_SUCCESS) {
        static_cast<void>(cudaGetLastError());  // or the next strategy would report this error
        return false;
      }
      explain::append(gemm::name(plan.matmul.epilogue));
      return true;
  }
  return false;
}

void own_small(const PassCall& call, kernels::SmallGradients* deferred, cudaStream_t stream) {
  const auto& p = call.problem;
  explain::append(call.layers == nullptr ? "own small kernel" : "own small kernel of all layers");
  if (call.layers != nullptr) {
    kernels::SmallNetwork network;
    for (const auto& layer : *call.layers) network.layers[network.count++] = small_product(layer);
    kernels::small_network(network, stream);
    return;
  }
  const auto product = small_product(call);
  if (gemm::is_forward(p.pass)) {
    kernels::small_forward(product, stream);
    return;
  }
  kernels::SmallGradients alone;
  auto& gradients = deferred != nullptr ? *deferred : alone;
  (p.pass == gemm::Pass::wgrad ? gradients.of_weight : gradients.of_input) = product;
  if (deferred == nullptr) kernels::small_backward(alone, stream);
}

// Runs each layer by its plan. All layers have one by the time they are measured as a chain.
bool run_layers(const PassCall& call, cudaStream_t stream) {
  return std::ranges::all_of(*call.layers, [stream](const PassCall& layer) {
    auto* plan = take_plan(layer.problem);
    if (plan == nullptr) return false;
    const Workspace workspace(plan->algorithm.workspace);
    return execute(layer, *plan, workspace.data(), stream);
  });
}

// ---- gated layers ------------------------------------------------------------------------------

Tensor values_of(const PassCall& call, const void* data, int64_t ld) {
  return as_tensor(call, const_cast<void*>(data), {call.result.rows, call.result.cols}, {ld, 1});
}

// Returns how many bytes the pre-activations need that one step passes to the next and no backward
// reads.
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
  auto args = gating_of(call.problem.activation, call.problem.matmul.type, call.aux,
                        {.ld = call.aux.ld, .data = call.up.preactivation});
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

// Computes the gradients of gate and up, and h again. Gate's gradient overwrites h's.
void own_gating(const PassCall& call) {
  const auto& gating = call.gating;
  kernels::GatingBackward args{
      gating_of(call.problem.activation, call.problem.matmul.type, call.aux,
                {.ld = gating.ld_up, .data = const_cast<void*>(gating.up)})};
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

}  // namespace

kernels::Gating gating_of(Activation activation, gemm::Type type, const Matrix& gate,
                          const Matrix& up) {
  kernels::Gating args;
  args.activation = activation, args.type = type;
  args.rows = gate.rows, args.cols = gate.cols;
  args.gate = gate.data, args.ld_gate = gate.ld;
  args.up = up.data, args.ld_up = up.ld;
  return args;
}

kernels::SmallProduct small_product(const PassCall& call) {
  const auto& p = call.problem;
  kernels::SmallProduct product;
  product.pass = p.pass, product.activation = p.activation, product.type = p.matmul.type;
  product.rows = static_cast<int>(p.matmul.n), product.cols = static_cast<int>(p.matmul.m);
  product.inner = static_cast<int>(p.matmul.k);
  product.left = call.left.data, product.ld_left = call.left.ld;
  product.right = call.right.data, product.ld_right = call.right.ld;
  product.result = call.result.data, product.ld_result = call.result.ld;
  if (p.keeps == Keeps::values) product.aux = call.aux.data, product.ld_aux = call.aux.ld;
  if (gemm::is_forward(p.pass)) {
    product.bias = call.bias;
  } else {
    product.sums = call.bias;
  }
  return product;
}

void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, const kernels::Sums& sums) {
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
  args.dz = dz, args.sums = sums;
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

bool execute(const PassCall& call, Plan& plan, void* workspace, cudaStream_t stream,
             kernels::SmallGradients* deferred) {
  const auto& p = call.problem;
  if (const auto bytes = missing_preactivations(call, *plan.strategy); bytes > 0) {
    const Workspace memory(bytes);
    return execute(with_preactivations(call, memory.data(), bytes), plan, workspace, stream);
  }
  const auto type = p.matmul.type;
  const bool active = p.activation != Activation::none;
  for (const auto step : plan.strategy->steps) {
    switch (step) {
      case Step::none:
        break;
      case Step::matmul:
        if (!run_matmul(call, plan, workspace, stream)) return false;
        break;
      case Step::matmul_up:
        if (!run_matmul(of_up(call), plan, workspace, stream)) return false;
        break;
      case Step::own_small:
        own_small(call, deferred, stream);
        break;
      case Step::layers:
        if (!run_layers(call, stream)) return false;
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
          one_pass(call.result, call.aux, p.keeps == Keeps::mask, p.activation, type,
                   call.result.data, {call.bias});
        }
        break;
      case Step::own_column_sum:
        if (p.bias) one_pass(summed(call), {}, false, Activation::none, type, nullptr, {call.bias});
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
        activation_gradient_out(dz, dz, as_tensor(call.aux, call), p.activation);
        break;
      }
      case Step::own_glu:
        own_glu(call);
        break;
      case Step::aten_glu:
        aten_glu(call);
        break;
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
  if (gemm::wants_bits(p) && !gemm::is_own_product(*plan.strategy)) {
    explain::append("own mask kernel");
    const auto& y = call.result;
    kernels::write_relu_mask(type, y.rows, y.cols, y.data, y.ld, call.aux.data, stream);
  }
  return true;
}

}  // namespace fused::cuda
