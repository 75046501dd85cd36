#include "cuda/runtime/device.h"

#include "core/torch_internals.h"
#include "cuda/hopper/hopper.h"
#include "cuda/kernels/activation.h"
#include "cuda/kernels/check.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/small/kernels/small_product.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <mutex>
#include <sstream>

namespace fused::cuda {
namespace {

constexpr int most_devices = 64;
constexpr c10::ScalarType types[] = {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16};

std::string model_of(int device) {
  const auto* properties = at::cuda::getDeviceProperties(device);
  std::ostringstream text;
  text << properties->name << " sm_" << properties->major << properties->minor << " with "
       << properties->multiProcessorCount << " multiprocessors";
  return text.str();
}

// Returns the driver's version as the kernel module names it, or else the CUDA that it supports.
std::string driver_version() {
  std::string text;
  std::ifstream("/sys/module/nvidia/version") >> text;
  int cuda = 0;
  if (text.empty() && cudaDriverGetVersion(&cuda) == cudaSuccess) text = std::to_string(cuda);
  return text;
}

[[maybe_unused]] const bool is_set_up = [] {
  // The kernels' library knows nothing of torch, so its errors become torch's here.
  kernels::set_raise([](cudaError_t error) { C10_CUDA_CHECK(error); });
  plans::set_machine_source([](int device) -> std::optional<plans::Machine> {
    if (c10::cuda::device_count() == 0) return std::nullopt;
    return device_of(device < 0 ? c10::cuda::current_device() : device).machine;
  });
  return true;
}();

}  // namespace

Device& device_of(int index) {
  // Never destroyed, because the driver may shut down before the process ends.
  static auto* devices = new std::array<Device, most_devices>;
  TORCH_CHECK(index < most_devices, "fused: at most ", most_devices, " devices, got ", index);
  auto& device = (*devices)[index];
  std::call_once(device.once, [&] {
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    const auto* properties = at::cuda::getDeviceProperties(index);
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(index));
    device.handle = new_lt_handle();
    device.has_code = kernels::have_code();
    if (!device.has_code) {
      TORCH_WARN("fused: this build has no kernels for ", properties->name, " (capability ",
                 properties->major, ".", properties->minor,
                 "), which goes eager's way; build with ",
                 "TORCH_CUDA_ARCH_LIST=", properties->major, ".", properties->minor);
    }
    device.arch = properties->major * 10 + properties->minor;
    device.has_hopper_products = hopper::available(device.arch);
    device.has_small_products = kernels::have_small_products();
    // NVIDIA's own recommendation.
    device.workspace_limit = int64_t{properties->major >= 9 ? 32 : 4} << 20;
    device.machine = {{model_of(index), lt_version(), driver_version()}, 0};
    while (model_of(device.machine.first_equal_device) != device.machine.made_for.gpu) {
      ++device.machine.first_equal_device;
    }
  });
  return device;
}

gemm::Type gemm_type(c10::ScalarType type) {
  const auto* const it = std::ranges::find(types, type);
  TORCH_INTERNAL_ASSERT(it != std::end(types));
  return static_cast<gemm::Type>(it - types);
}

c10::ScalarType scalar_type(gemm::Type type) { return types[static_cast<int>(type)]; }

bool multiplies_as_torch(const at::Tensor& like) {
  if (!device_of(like.get_device()).has_code) return false;
  return like.scalar_type() != at::kFloat || !internals::float32_is_bf16x9();
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

gemm::Available available(const gemm::PassProblem& problem) {
  const auto& device = device_of(problem.matmul.device);
  return {lt_version(), device.has_hopper_products, device.has_small_products};
}

gemm::Settings gemm_settings(int device, gemm::Type type) {
  const auto& known = device_of(device);
  gemm::Settings result;
  result.device = device;
  result.arch = known.arch;
  result.workspace_limit = known.workspace_limit;
  if (type == gemm::Type::f32 &&
      internals::float32_products(at::Float32Backend::CUDA) == at::Float32Precision::TF32) {
    result.math = gemm::Math::tf32;
  }
  // We never ask for sums in 16 bits, so only the switch that forbids splitting matters.
  auto& context = at::globalContext();
  const auto reduction = type == gemm::Type::f16 ? context.allowFP16ReductionCuBLAS()
                         : type == gemm::Type::bf16
                             ? context.allowBF16ReductionCuBLAS()
                             : at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  if (reduction == at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK) {
    result.split_k = gemm::SplitK::forbidden;
  }
  return result;
}

at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like, std::optional<c10::ScalarType> type,
                 std::optional<at::MemoryFormat> format) {
  return at::Tensor(
      at::detail::empty_cuda(sizes, type.value_or(like.scalar_type()), like.device(), format));
}

}  // namespace fused::cuda
