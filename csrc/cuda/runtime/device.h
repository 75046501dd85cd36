#pragma once

// Devices: their handles and settings, and scratch memory.

#include "core/shapes.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cublasLt.h>

#include <mutex>
#include <optional>

namespace fused::cuda {

gemm::Type gemm_type(c10::ScalarType type);
c10::ScalarType scalar_type(gemm::Type type);

// A device's properties, read once at its first use. A device that we have no code for gives a
// warning.
struct Device {
  std::once_flag once;
  cublasLtHandle_t handle = nullptr;  // threads share it, because cuBLASLt is thread-safe
  int arch = 0;
  int64_t workspace_limit = 0;
  bool has_code = false, has_hopper_products = false, has_small_products = false;
  plans::Machine machine;
  std::mutex measuring;  // one for each device, as one device may wait for another
};
Device& device_of(int index);

gemm::Available available(const gemm::PassProblem& problem);

// Returns whether the device has our kernels, and fp32 products are not set to a precision that
// only torch implements.
bool multiplies_as_torch(const at::Tensor& like);

// Reads PyTorch's own switches (TF32, split-K), as they are now.
gemm::Settings gemm_settings(int device, gemm::Type type);

// Returns whether the current stream is being captured. Nothing may be measured then.
bool is_capturing();

// Allocates a tensor in a third of the time that at::empty takes.
at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                 std::optional<c10::ScalarType> type = {},
                 std::optional<at::MemoryFormat> format = {});

struct Allocator : ConcreteAllocator {
  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                          std::optional<c10::ScalarType> dtype = {}) {
    return cuda::empty(sizes, like, dtype);
  }
};

// Scratch memory of the current stream. PyTorch's allocator makes it safe in CUDA graphs.
class Workspace {
 public:
  explicit Workspace(int64_t bytes)
      : data_(bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : at::DataPtr()) {
  }
  void* data() const { return data_.get(); }

 private:
  at::DataPtr data_;
};

// Memory from the driver, so that the statistics of PyTorch's allocator do not change.
class DriverMemory {
 public:
  explicit DriverMemory(int64_t bytes) {
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    if (cudaMalloc(&data_, bytes) != cudaSuccess) {
      data_ = nullptr;
      static_cast<void>(cudaGetLastError());
    }
  }
  ~DriverMemory() {
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    static_cast<void>(cudaFree(data_));
  }
  DriverMemory& operator=(DriverMemory&&) = delete;

  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace fused::cuda
