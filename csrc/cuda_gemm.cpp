#include "cuda_gemm.h"

#include "explain.h"
#include "gemm/plan.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <array>
#include <mutex>
#include <string>

namespace fused {
namespace {

struct Operand {
  Tensor storage;  // keeps a copy alive
  gemm::Matrix matrix;
};

// An operand is only read; asking for it so keeps a copy-on-write tensor shared.
void* readable(const Tensor& tensor) { return const_cast<void*>(tensor.const_data_ptr()); }

// Reads the matrix in place where it, or its transpose, has rows of unit stride.
Operand as_operand(const Tensor& tensor) {
  const auto rows = tensor.size(0), cols = tensor.size(1);
  const auto across = tensor.stride(1), down = tensor.stride(0);
  if ((across == 1 || cols == 1) && (down >= cols || rows == 1)) {
    return {tensor,
            {rows, cols, std::max(rows == 1 ? cols : down, int64_t{1}), false, readable(tensor)}};
  }
  if ((down == 1 || rows == 1) && (across >= rows || cols == 1)) {
    return {tensor,
            {rows, cols, std::max(cols == 1 ? rows : across, int64_t{1}), true, readable(tensor)}};
  }
  const auto copy = tensor.contiguous();
  return {copy, {rows, cols, cols, false, copy.data_ptr()}};
}

gemm::Settings settings(int device, gemm::Type type) {
  auto& context = at::globalContext();
  gemm::Settings result;
  result.device = device;
  if (type == gemm::Type::f32 &&
      context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32) {
    result.math = gemm::Math::tf32;
  }
  // Sums in 16 bits are never asked for, so of the reduced-precision switches only the one that
  // forbids splitting altogether is left to obey.
  const auto reduction = type == gemm::Type::f16 ? context.allowFP16ReductionCuBLAS()
                         : type == gemm::Type::bf16
                             ? context.allowBF16ReductionCuBLAS()
                             : at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  if (reduction == at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK) {
    result.split_k = gemm::SplitK::forbidden;
  }
  // NVIDIA's own recommendation.
  const bool hopper = at::cuda::getDeviceProperties(device)->major >= 9;
  result.workspace_limit = int64_t{hopper ? 32 : 4} << 20;
  return result;
}

// One handle per device, for all threads: cuBLASLt's calls are thread-safe. Never destroyed, as
// the driver may be gone before the process is.
cublasLtHandle_t handle_of(int device) {
  constexpr int most_devices = 64;
  static std::array<cublasLtHandle_t, most_devices> handles{};
  static std::array<std::once_flag, most_devices> once;
  TORCH_CHECK(device < most_devices, "fused: at most ", most_devices, " devices, got ", device);
  std::call_once(once[device], [device] {
    const auto status = cublasLtCreate(&handles[device]);
    TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "fused: cublasLtCreate failed with ",
                cublasLtGetStatusName(status));
  });
  return handles[device];
}

size_t library_version() {
  static const size_t version = cublasLtGetVersion();
  return version;
}

// Where eager would call cuBLAS; a forward with bias it runs through cuBLASLt, as we do.
bool is_plain(gemm::Epilogue epilogue) {
  return epilogue == gemm::Epilogue::identity || epilogue == gemm::Epilogue::bgradb;
}

std::string not_run(gemm::Epilogue epilogue, const char* reason) {
  return std::string("(not ") + gemm::name(epilogue) + ": " + reason + ")";
}

}  // namespace

std::optional<gemm::Type> gemm_type(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return gemm::Type::f64;
    case at::kFloat:
      return gemm::Type::f32;
    case at::kHalf:
      return gemm::Type::f16;
    case at::kBFloat16:
      return gemm::Type::bf16;
    default:
      return std::nullopt;
  }
}

bool multiply(const Tensor& left, const Tensor& right, const Tensor& result,
              gemm::Epilogue epilogue, const Tensor& bias, const Tensor& aux) {
  const auto type = *gemm_type(result.scalar_type());
  const int device = result.get_device();
  const auto l = as_operand(left), r = as_operand(right);
  const gemm::Matrix d{result.size(0), result.size(1),
                       result.size(0) == 1 ? result.size(1) : result.stride(0), false,
                       result.data_ptr()};
  gemm::Operands operands{r.matrix.data, l.matrix.data, d.data};
  int64_t ld_aux = 0;
  if (bias.defined()) operands.bias = bias.data_ptr();
  if (aux.defined()) {
    operands.aux = aux.data_ptr();
    // A mask's leading dimension counts bits. A single row has no stride to speak of.
    const bool mask = aux.scalar_type() == at::kByte;
    ld_aux = mask               ? aux.size(1) * 8
             : aux.size(0) == 1 ? gemm::padded_features(aux.size(1))
                                : aux.stride(0);
  }
  const auto problem = gemm::describe(l.matrix, r.matrix, d, epilogue, type, operands.bias,
                                      operands.aux, ld_aux, settings(device, type));
  const char* reason = gemm::refusal(problem, library_version());
  if (reason == nullptr && is_plain(epilogue) && gemm::is_long_and_thin(problem)) {
    reason = "a long and thin product";
  }
  if (reason != nullptr) {
    if (explain::enabled()) explain::step(not_run(epilogue, reason).c_str());
    return false;
  }

  const auto handle = handle_of(device);
  const auto stream = at::cuda::getCurrentCUDAStream(device);
  const auto make_plan = [&] {
    const bool capturing =
        c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
    return gemm::make_plan(
        handle, problem, operands, /*may_search=*/!capturing,
        [&](gemm::Descriptors& descriptors, const gemm::Algorithm& algorithm) {
          if (!gemm::needs_nan_trial(problem)) return true;
          const Workspace scratch(static_cast<int64_t>(gemm::nan_trial_bytes(problem)));
          return gemm::passes_nan(handle, problem, descriptors, algorithm, operands, scratch.data(),
                                  stream);
        });
  };
  const auto known = gemm::known_plan(problem);
  for (auto* plan = known ? *known : make_plan(); plan != nullptr; plan = make_plan()) {
    const Workspace workspace(static_cast<int64_t>(plan->algorithm.workspace));
    const auto status = gemm::run(handle, problem, plan->descriptors, plan->algorithm, operands,
                                  workspace.data(), stream);
    if (status == CUBLAS_STATUS_SUCCESS) {
      explain::step(gemm::name(epilogue));
      return true;
    }
    TORCH_WARN_ONCE("fused: cuBLASLt failed with ", cublasLtGetStatusName(status), " on ", problem,
                    "; another way is taken");
    // Anything else, such as a want of memory, may pass: the algorithm stays, this call goes on.
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) break;
    gemm::reject_plan(problem, gemm::Algorithm(plan->algorithm));
  }
  if (explain::enabled()) explain::step(not_run(epilogue, "no valid algorithm is known").c_str());
  return false;
}

Tensor product(const Tensor& left, const Tensor& right) {
  const auto rows = left.size(0), cols = right.size(1);
  if (left.size(1) == 0) return at::zeros({rows, cols}, left.options());
  auto result = at::empty({rows, cols}, left.options());
  if (result.numel() == 0 || multiply(left, right, result, gemm::Epilogue::identity)) {
    return result;
  }
  explain::step("ATen mm");
  return at::mm(left, right).contiguous();
}

}  // namespace fused
