#include "cuda/runtime/gemm_call.h"

#include "cuda/kernels/activation.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/decide.h"
#include "core/explain.h"

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>

#include <string>

namespace fused {
namespace {

using gemm::Matrix;
using gemm::Step;
using gemm::Strategy;

// What ATen's steps work on; they own nothing. The device is given, or it would be asked for.
Tensor as_tensor(const StageCall& call, void* data, at::IntArrayRef sizes,
                 at::IntArrayRef strides) {
  const auto& product = call.problem.product;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(product.device));
  return at::for_blob(data, sizes)
      .strides(strides)
      .target_device(device)
      .options(at::TensorOptions().dtype(scalar_type(product.type)).device(device))
      .make_tensor();
}

Tensor as_tensor(const Matrix& m, const StageCall& call) {
  return as_tensor(call, m.data, {m.rows, m.cols},
                   {m.transposed ? 1 : m.ld, m.transposed ? m.ld : 1});
}

// Along the features: of a weight gradient, [features, in], they are the rows.
Tensor bias_tensor(const StageCall& call) {
  const bool rows = call.problem.stage == gemm::Stage::weight_gradient;
  return as_tensor(call, call.bias, {rows ? call.result.rows : call.result.cols}, {1});
}

// Where a step finds or leaves the result of the product: the pre-activation, if it is kept, is not
// overwritten by the activation.
const Matrix& product_result(const StageCall& call, const Strategy& strategy) {
  const bool apart =
      call.problem.stage == gemm::Stage::forward && call.problem.aux && !strategy.fuses_activation;
  return apart ? call.aux : call.result;
}

const char* aten_product(const StageCall& call, const Strategy& strategy) {
  auto result = as_tensor(product_result(call, strategy), call);
  const auto left = as_tensor(call.left, call), right = as_tensor(call.right, call);
  if (call.problem.stage == gemm::Stage::forward && call.bias != nullptr) {
    at::addmm_out(result, bias_tensor(call), left, right);
    return "ATen addmm";
  }
  at::mm_out(result, left, right);
  return "ATen mm";
}

void aten_activation(const StageCall& call, const Strategy& strategy) {
  auto result = as_tensor(call.result, call);
  const auto z = as_tensor(product_result(call, strategy), call);
  if (call.problem.activation == Activation::relu) {
    at::relu_(result);
  } else {
    at::gelu_out(result, z, approximate_of(call.problem.activation));
  }
}

void aten_gradient(const StageCall& call) {
  auto result = as_tensor(call.result, call);
  const auto saved = as_tensor(call.aux, call);
  if (call.problem.activation == Activation::relu) {
    at::threshold_backward_out(result, result, saved, 0);
  } else {
    at::gelu_backward_out(result, result, saved, approximate_of(call.problem.activation));
  }
}

}  // namespace

// A weight gradient's left operand is dz, transposed.
Matrix summed(const StageCall& call) {
  return call.problem.stage == gemm::Stage::weight_gradient ? transposed(call.left) : call.result;
}

gemm::Operands operands_of(const StageCall& call, const Strategy& strategy) {
  return {call.right.data, call.left.data, product_result(call, strategy).data, call.bias,
          call.aux.data};
}

// ---- operands ----------------------------------------------------------------------------------

Operand rows_of(const Tensor& tensor) {
  const auto dim = tensor.dim();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t cols = sizes[dim - 1], across = strides[dim - 1];
  int64_t rows = 1, down = 0;
  bool regular = true;  // whether one stride leads from each row to the next
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (rows == 1) {
      down = strides[d];
    } else {
      regular = regular && strides[d] == down * rows;
    }
    rows *= sizes[d];
  }
  auto* data = const_cast<void*>(tensor.const_data_ptr());  // copy-on-write stays shared
  if (regular && (across == 1 || cols == 1) && (down >= cols || rows == 1)) {
    return {{rows, cols, std::max(rows == 1 ? cols : down, int64_t{1}), false, data}, {}};
  }
  if (regular && (down == 1 || rows == 1) && (across >= rows || cols == 1)) {
    return {{rows, cols, std::max(cols == 1 ? rows : across, int64_t{1}), true, data}, {}};
  }
  auto copy = tensor.contiguous();
  return {{rows, cols, cols, false, copy.data_ptr()}, copy};
}

Matrix transposed(const Matrix& matrix) {
  return {matrix.cols, matrix.rows, matrix.ld, !matrix.transposed, matrix.data};
}

void describe(StageCall& call, gemm::Type type, int device) {
  const bool has_aux = call.aux.data != nullptr;
  // A mask's leading dimension counts bits. A single row has no stride to speak of.
  // Whoever makes an aux buffer for the library pads it; a tensor of one row that was saved in some
  // other way has nothing behind its end.
  const bool padded = call.problem.stage == gemm::Stage::forward || call.problem.literal;
  const int64_t ld_aux = !has_aux                       ? 0
                         : call.problem.mask            ? call.aux.ld * 8
                         : call.aux.rows == 1 && padded ? gemm::padded_features(call.aux.cols)
                                                        : call.aux.ld;
  call.problem.product =
      gemm::describe(call.left, call.right, call.result, gemm::Epilogue::identity, type, nullptr,
                     nullptr, 0, gemm_settings(device, type));
  if (call.bias != nullptr) call.problem.product.align_bias = gemm::alignment_class(call.bias);
  if (has_aux) {
    call.problem.product.align_aux = gemm::alignment_class(call.aux.data);
    call.problem.product.ld_aux = ld_aux;
  }
  call.problem.bias = call.bias != nullptr;
  call.problem.deterministic = at::globalContext().deterministicAlgorithms();
}

// ---- running -----------------------------------------------------------------------------------

void one_pass(const Matrix& grad, const Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, void* sums) {
  ActivationBackward args;
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
  explain::step(activation == Activation::none ? "own column sum" : "own one-pass kernel");
  const Workspace scratch(scratch_bytes(args));
  activation_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
}

bool execute(const StageCall& call, gemm::Plan& plan, void* workspace, cudaStream_t stream) {
  const auto& p = call.problem;
  const auto type = p.product.type;
  const bool active = p.activation != Activation::none;
  for (const auto step : plan.strategy->steps) {
    switch (step) {
      case Step::none:
        break;
      case Step::product:
        if (gemm::run(lt_handle(p.product.device), plan.product, *plan.descriptors, plan.algorithm,
                      operands_of(call, *plan.strategy), workspace,
                      stream) != CUBLAS_STATUS_SUCCESS) {
          return false;
        }
        explain::step(gemm::name(plan.product.epilogue));
        break;
      case Step::own_activation: {
        const auto& z = product_result(call, *plan.strategy);
        explain::step("own activation kernel");
        activation_forward(p.activation, type, z.rows, z.cols, z.data, z.ld, call.result.data,
                           call.result.ld, stream);
        break;
      }
      case Step::own_one_pass:
        if (active) {
          one_pass(call.result, call.aux, p.mask, p.activation, type, call.result.data, call.bias);
        }
        break;
      case Step::own_column_sum:
        if (p.bias) one_pass(summed(call), {}, false, Activation::none, type, nullptr, call.bias);
        break;
      case Step::aten_product:
        explain::step(aten_product(call, *plan.strategy));
        break;
      case Step::aten_activation:
        if (!active) break;
        explain::step("ATen activation");
        aten_activation(call, *plan.strategy);
        break;
      case Step::aten_gradient:
        explain::step("ATen activation gradient");
        aten_gradient(call);
        break;
      case Step::aten_column_sum:
        if (!p.bias) break;
        explain::step("ATen sum");
        auto sums = bias_tensor(call);
        at::sum_out(sums, as_tensor(summed(call), call), at::IntArrayRef{0});
        break;
    }
  }
  return true;
}

bool run(const StageCall& call) {
  std::optional<gemm::Plan> spare;  // for this call only
  auto* plan = gemm::known_plan(call.problem);
  if (plan == nullptr) plan = make_plan(call, spare);
  if (plan == nullptr) return false;
  if (!plan->remark.empty()) explain::step(plan->remark.c_str());
  const auto stream = at::cuda::getCurrentCUDAStream(call.problem.product.device);
  const Workspace workspace(plan->algorithm.workspace);
  if (execute(call, *plan, workspace.data(), stream)) return true;
  // Checked beforehand, so this is a want of memory or the like: the plan stays, this call goes on.
  TORCH_WARN_ONCE("fused: cuBLASLt failed on ", plan->product, "; eager's way is taken");
  spare = aten_plan(call.problem, "the library failed");
  return spare && execute(call, *spare, nullptr, stream);
}

}  // namespace fused
