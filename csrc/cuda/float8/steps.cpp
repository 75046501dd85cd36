// The steps of FP8 layers on a GPU: casts by our kernels, products by cuBLASLt.

#include "core/explain.h"
#include "cuda/float8/cast.h"
#include "cuda/float8/multiply.h"
#include "cuda/runtime/device.h"
#include "float8/kernels.h"
#include "float8/support.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>

#include <array>
#include <atomic>

namespace fused::cuda::float8 {
namespace {

using fused::float8::Octuple, fused::float8::Reference;

constexpr int least_arch = 89, most_devices = 64;  // device_of refuses more

// Why there are no FP8 kernels for the device, or nullptr.
const char* reason_against(int device) {
  static std::array<std::atomic<int>, most_devices> answers;  // 0: not asked
  auto& answer = answers[device];
  if (answer == 0) {
    const auto& known = device_of(device);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    answer = known.arch < least_arch ? 1 : have_code() ? 2 : 3;
  }
  if (answer == 1) return "the GPU's capability is below 8.9";
  return answer == 2 ? nullptr : "this build has no FP8 code for the GPU";
}

// A matrix as the kernels read it, and what keeps it alive.
struct Operand {
  Tensor tensor;
  Values values;

  explicit Operand(const Tensor& matrix) : tensor(matrix) {
    const int64_t per_16_bytes = 16 / matrix.element_size();
    const bool fits = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1) &&
                      matrix.stride(0) % per_16_bytes == 0 && gemm::is_aligned(matrix.data_ptr());
    if (!fits) {
      tensor = matrix.contiguous();
      if (!gemm::is_aligned(tensor.data_ptr())) tensor = tensor.clone();
    }
    values = {tensor.data_ptr(), tensor.stride(0)};
  }
};

bool fits(const Tensor& matrix) { return matrix.size(1) % multiple == 0; }

// A cast's results, of `times` targets next to each other.
struct Result {
  Tensor rows, columns, inverse, sums;

  Result(const Tensor& like, at::ScalarType type, bool wants_sums, int64_t times = 1)
      : rows(empty({like.size(0), times * like.size(1)}, like, type)),
        columns(empty({times * like.size(1), like.size(0)}, like, type)),
        inverse(empty({}, like, at::kFloat)),
        sums(empty({wants_sums ? times * like.size(1) : 0}, like)) {}

  Target target(int64_t which = 0) const {
    const int64_t cols = rows.size(1), part = columns.size(0) / 2 * which;
    Target target{static_cast<char*>(rows.data_ptr()) + part, cols,
                  static_cast<char*>(columns.data_ptr()) + part * columns.size(1),
                  inverse.data_ptr<float>(), nullptr};
    if (sums.numel() > 0) {
      target.sums = static_cast<char*>(sums.data_ptr()) + part * sums.element_size();
    }
    return target;
  }
};

Size size_of(const Tensor& matrix) {
  const auto* properties = at::cuda::getDeviceProperties(matrix.device().index());
  return {gemm_type(matrix.scalar_type()), matrix.size(0), matrix.size(1),
          properties->multiProcessorCount};
}

struct Cuda {
  static constexpr bool obeys_policy = true;
  static bool is_usable(const at::TensorBase& like) {
    return reason_against(like.get_device()) == nullptr;
  }

  static Quadruple cast(const Tensor& input, bool gradient, bool sum) {
    if (!fits(input)) return Reference::cast(input, gradient, sum);
    const Launch launch(input, 1);
    const Operand operand(input);
    const Result result(input, gradient ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn, sum);
    float8::cast(launch.size, operand.values, gradient, result.target(), launch.scratch.data(),
                 launch.stream);
    return {result.rows, result.columns, result.inverse, result.sums};
  }

  static Triple activation(const Tensor& z, Activation activation) {
    if (!fits(z)) return Reference::activation(z, activation);
    const Launch launch(z, 1);
    const Operand operand(z);
    const Result result(z, at::kFloat8_e4m3fn, false);
    cast_activation(launch.size, activation, operand.values, result.target(), launch.scratch.data(),
                    launch.stream);
    return {result.rows, result.columns, result.inverse};
  }

  static Quadruple activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                       bool sum) {
    if (!fits(grad)) return Reference::activation_backward(grad, z, activation, sum);
    const Launch launch(grad, 1);
    const bool mask = z.scalar_type() == at::kByte;
    const Operand gradient(grad), saved(z);
    const Result result(grad, at::kFloat8_e5m2, sum);
    cast_activation_backward(launch.size, activation, gradient.values, saved.values, mask,
                             result.target(), launch.scratch.data(), launch.stream);
    return {result.rows, result.columns, result.inverse, result.sums};
  }

  static Triple gating(const Tensor& gate, const Tensor& up, Activation activation) {
    if (!fits(gate) || activation == Activation::none) {
      return Reference::gating(gate, up, activation);
    }
    const Launch launch(gate, 1);
    const Operand first(gate), second(up);
    const Result result(gate, at::kFloat8_e4m3fn, false);
    cast_gating(launch.size, activation, first.values, second.values, result.target(),
                launch.scratch.data(), launch.stream);
    return {result.rows, result.columns, result.inverse};
  }

  static Octuple gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                 Activation activation, bool together, bool sum) {
    if (!fits(gate) || activation == Activation::none) {
      return Reference::gating_backward(grad, gate, up, activation, together, sum);
    }
    const Launch launch(gate, 2);
    const Operand gradient(grad), first(gate), second(up);
    const auto run = [&](const Target& of_gate, const Target& of_up) {
      cast_gating_backward(launch.size, activation, gradient.values, first.values, second.values,
                           of_gate, of_up, together, launch.scratch.data(), launch.stream);
    };
    constexpr auto type = at::kFloat8_e5m2;
    if (together) {
      const Result both(gate, type, sum, 2);
      run(both.target(0), both.target(1));
      const auto none = empty({0}, gate);
      return {both.rows, both.columns, both.inverse, both.sums, none, none, none, none};
    }
    const Result a(gate, type, sum), b(gate, type, sum);
    run(a.target(), b.target());
    return {a.rows, a.columns, a.inverse, a.sums, b.rows, b.columns, b.inverse, b.sums};
  }

  static Tensor product(const Tensor& a, const Tensor& b, const Tensor& inverse_a,
                        const Tensor& inverse_b, const OptionalTensor& bias,
                        const OptionalTensor& add, at::ScalarType dtype, bool fast) {
    if (auto result = multiply({a, b, inverse_a, inverse_b, bias, add, dtype, fast})) {
      return *result;
    }
    return Reference::product(a, b, inverse_a, inverse_b, bias, add, dtype, fast);
  }

 private:
  // What a cast to so many targets needs of the device, which is the current one meanwhile.
  struct Launch {
    c10::cuda::CUDAGuard guard;
    Size size;
    Workspace scratch;
    cudaStream_t stream;

    Launch(const Tensor& like, int targets)
        : guard(like.device()),
          size(size_of(like)),
          scratch(scratch_bytes(size, targets)),
          stream(at::cuda::getCurrentCUDAStream()) {
      explain::append("own FP8 cast");
    }
  };
};

[[maybe_unused]] const bool is_set_up = [] {
  fused::float8::set_reason_against_gpu([](c10::Device device) -> const char* {
    return reason_against(device.has_index() ? device.index() : c10::cuda::current_device());
  });
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { fused::float8::register_steps<Cuda>(m); }

}  // namespace fused::cuda::float8
