#pragma once

// What the passes need of the process and the device: handles, settings, scratch memory.

#include "core/shapes.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cublasLt.h>

#include <mutex>
#include <optional>

namespace fused::cuda {

std::optional<gemm::Type> gemm_type(c10::ScalarType type);
c10::ScalarType scalar_type(gemm::Type type);

// One handle serves all threads of a device: cuBLASLt's calls are thread-safe.
cublasLtHandle_t lt_handle(int device);

// Says what there is for products on the problem's device.
gemm::Available available(const gemm::PassProblem& problem);

// Tells whether our kernels were compiled for the device; warns once where they were not.
bool has_code_for(int device);

// Tells whether the kernels of hopper/ were built, and run there.
bool has_hopper_products(int device);

// Tells whether our kernels serve, and fp32 is not multiplied in a way that only torch knows.
bool multiplies_as_torch(const at::Tensor& like);

// Reads PyTorch's own switches (TF32, split-K), as they are now.
gemm::Settings gemm_settings(int device, gemm::Type type);

const plans::Machine& machine_of(int device);

// Is held while something is measured on the device; one each, as a device may be busy with waiting
// for another.
std::mutex& measuring(int device);

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
  DriverMemory(const DriverMemory&) = delete;
  DriverMemory& operator=(const DriverMemory&) = delete;

  char* data() const { return static_cast<char*>(data_); }

 private:
  void* data_ = nullptr;
};

}  // namespace fused::cuda
