#pragma once

// What the passes need of the process and the device: handles, settings, scratch memory.

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

// What is found out of a device once, at its first use, with a warning where it has no code.
struct Device {
  std::once_flag once;
  cublasLtHandle_t handle = nullptr;  // for all threads: cuBLASLt's calls are thread-safe
  int arch = 0;
  int64_t workspace_limit = 0;
  bool has_code = false, has_hopper_products = false, has_small_products = false;
  plans::Machine machine;
  std::mutex measuring;  // held meanwhile; not of all devices, as one may be waiting for another
};
Device& device_of(int index);

gemm::Available available(const gemm::PassProblem& problem);

// Tells whether our kernels serve, and fp32 is not multiplied in a way that only torch knows.
bool multiplies_as_torch(const at::Tensor& like);

// Reads PyTorch's own switches (TF32, split-K), as they are now.
gemm::Settings gemm_settings(int device, gemm::Type type);

// Tells whether the current stream is being captured, when nothing may be tried.
bool is_capturing();

// Makes an empty tensor in a third of the time that the dispatcher takes.
at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                 std::optional<c10::ScalarType> type = {},
                 std::optional<at::MemoryFormat> format = {});

struct Allocator : ConcreteAllocator {
  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                          std::optional<c10::ScalarType> dtype = {}) {
    return cuda::empty(sizes, like, dtype);
  }
};

// Scratch of the current stream, from PyTorch's allocator: safe in CUDA graphs.
class Workspace {
 public:
  explicit Workspace(int64_t bytes)
      : data_(bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : at::DataPtr()) {
  }
  void* data() const { return data_.get(); }

 private:
  at::DataPtr data_;
};

// Memory from the driver: the allocator's statistics, which users read, stay as they were.
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
