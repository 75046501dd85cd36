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

using fused::float8::Nonuple, fused::float8::Reference;

constexpr int least_arch = 89, most_devices = 64;  // device_of refuses more

// Says why there are no FP8 kernels for the device; nullptr if there are.
const char* objection(int device) {
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

// A matrix as the kernels read it, and the tensor that keeps it alive.
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

Tensor columns_of(const Tensor& like, at::ScalarType type, bool wanted, int64_t times = 1) {
  return wanted ? empty({times * like.size(1), like.size(0)}, like, type) : empty({0}, like, type);
}

// A cast's results, of `times` targets next to each other.
struct Result {
  Tensor rows, columns, inverse, sums;

  Result(const Tensor& like, at::ScalarType type, bool wants_sums, bool wants_columns = true,
         int64_t times = 1)
      : rows(empty({like.size(0), times * like.size(1)}, like, type)),
        columns(columns_of(like, type, wants_columns, times)),
        inverse(empty({}, like, at::kFloat)),
        sums(empty({wants_sums ? times * like.size(1) : 0}, like)) {}

  Target target(int64_t which = 0) const {
    const int64_t cols = rows.size(1), part = cols / 2 * which;
    Target target{static_cast<char*>(rows.data_ptr()) + part, cols, nullptr,
                  inverse.data_ptr<float>()};
    if (columns.numel() > 0) {
      target.columns = static_cast<char*>(columns.data_ptr()) + part * columns.size(1);
    }
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

// The hidden values that the backward computes again: their scale, and their columns or [0].
struct Again {
  OptionalTensor scale;
  Tensor columns;

  Again(const Tensor& like, const OptionalTensor& scale)
      : scale(scale), columns(columns_of(like, at::kFloat8_e4m3fn, has_value(scale))) {}

  Hidden hidden() const {
    return has_value(scale) ? Hidden{scale->data_ptr<float>(), columns.data_ptr()} : Hidden{};
  }
};

struct Cuda {
  static constexpr bool obeys_policy = true;
  static bool is_usable(const at::TensorBase& like) {
    return objection(like.get_device()) == nullptr;
  }

  static Quadruple cast(const Tensor& input, bool gradient, bool sum, bool columns) {
    if (!fits(input)) return Reference::cast(input, gradient, sum, columns);
    const Launch launch(input, 1);
    const Operand operand(input);
    const Result result(input, gradient ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn, sum, columns);
    float8::cast(launch.size, operand.values, gradient, result.target(), launch.scratch.data(),
                 launch.stream);
    return {result.rows, result.columns, result.inverse, result.sums};
  }

  static Quadruple activation(const Tensor& z, Activation activation, bool columns) {
    if (!fits(z)) return Reference::activation(z, activation, columns);
    const Launch launch(z, 1);
    const Operand operand(z);
    return with_scale(z, columns, [&](const Target& target) {
      cast_activation(launch.size, activation, operand.values, target, launch.scratch.data(),
                      launch.stream);
    });
  }

  static Quintuple activation_backward(const Tensor& grad, const Tensor& z, Activation activation,
                                       bool sum, const OptionalTensor& scale) {
    if (!fits(grad)) return Reference::activation_backward(grad, z, activation, sum, scale);
    const Launch launch(grad, 1);
    const bool mask = z.scalar_type() == at::kByte;
    const Operand gradient(grad), saved(z);
    const Result result(grad, at::kFloat8_e5m2, sum);
    const Again again(grad, scale);
    cast_activation_backward(launch.size, activation, gradient.values, saved.values, mask,
                             result.target(), again.hidden(), launch.scratch.data(), launch.stream);
    return {result.rows, result.columns, result.inverse, result.sums, again.columns};
  }

  static Quadruple gating(const Tensor& gate, const Tensor& up, Activation activation,
                          bool columns) {
    if (!fits(gate) || activation == Activation::none) {
      return Reference::gating(gate, up, activation, columns);
    }
    const Launch launch(gate, 1);
    const Operand first(gate), second(up);
    return with_scale(gate, columns, [&](const Target& target) {
      cast_gating(launch.size, activation, first.values, second.values, target,
                  launch.scratch.data(), launch.stream);
    });
  }

  static Nonuple gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                 Activation activation, bool together, bool sum,
                                 const OptionalTensor& scale) {
    if (!fits(gate) || activation == Activation::none) {
      return Reference::gating_backward(grad, gate, up, activation, together, sum, scale);
    }
    const Launch launch(gate, 2);
    const Operand gradient(grad), first(gate), second(up);
    const Again again(gate, scale);
    const auto run = [&](const Target& of_gate, const Target& of_up) {
      cast_gating_backward(launch.size, activation, gradient.values, first.values, second.values,
                           of_gate, of_up, together, again.hidden(), launch.scratch.data(),
                           launch.stream);
    };
    constexpr auto type = at::kFloat8_e5m2;
    if (together) {
      const Result both(gate, type, sum, true, 2);
      run(both.target(0), both.target(1));
      const auto none = empty({0}, gate);
      return {both.rows, both.columns, both.inverse, both.sums,    none,
              none,      none,         none,         again.columns};
    }
    const Result a(gate, type, sum), b(gate, type, sum);
    run(a.target(), b.target());
    return {a.rows,    a.columns, a.inverse, a.sums,       b.rows,
            b.columns, b.inverse, b.sums,    again.columns};
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
  // Casts values that the backward can compute again by their scale.
  template <typename Fn>
  static Quadruple with_scale(const Tensor& like, bool columns, const Fn& run) {
    const Result result(like, at::kFloat8_e4m3fn, /*wants_sums=*/false, columns);
    const auto scale = empty({}, like, at::kFloat);
    auto target = result.target();
    target.scale = scale.data_ptr<float>();
    run(target);
    return {result.rows, result.columns, result.inverse, scale};
  }

  // The device's part of a cast to so many targets; it is the current device meanwhile.
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
  fused::float8::set_gpu_objection([](c10::Device device) -> const char* {
    return objection(device.has_index() ? device.index() : c10::cuda::current_device());
  });
  return true;
}();

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { fused::float8::register_steps<Cuda>(m); }

}  // namespace fused::cuda::float8
