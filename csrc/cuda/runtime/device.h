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

// One handle per device, for all threads: cuBLASLt's calls are thread-safe.
cublasLtHandle_t lt_handle(int device);

// Of products, on the problem's device.
gemm::Available available(const gemm::PassProblem& problem);

// Whether our kernels were compiled for the device; a warning, once, where they were not.
bool has_code_for(int device);

// Whether those of hopper/ were built, and run there.
bool has_hopper_products(int device);

// Whether they were, and fp32 is not to be multiplied in a way that only torch knows.
bool multiplies_as_torch(const at::Tensor& like);

// PyTorch's own switches (TF32, split-K), as they are now.
gemm::Settings gemm_settings(int device, gemm::Type type);

// What plans of this device are valid for.
const plans::Machine& machine_of(int device);

// Held while something is measured on the device. One each: who measures waits for the device, and
// what that is busy with may itself wait for another device.
std::mutex& measuring(int device);

// An empty tensor on the device of `like`, of its dtype if no other is given. The dispatcher's way
// to the same takes three times as long.
at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                 std::optional<c10::ScalarType> type = {},
                 std::optional<at::MemoryFormat> format = {});

// Allocates results (core/shapes.h).
struct Allocator : ConcreteAllocator {
  static at::Tensor empty(at::IntArrayRef sizes, const at::Tensor& like,
                          std::optional<c10::ScalarType> dtype = {}) {
    return cuda::empty(sizes, like, dtype);
  }
};

// Scratch of the current stream, from PyTorch's allocator: safe in CUDA graphs, and given back to
// the stream's pool at once.
class Workspace {
 public:
  explicit Workspace(int64_t bytes)
      : data_(bytes > 0 ? c10::cuda::CUDACachingAllocator::get()->allocate(bytes) : at::DataPtr()) {
  }
  void* data() const { return data_.get(); }

 private:
  at::DataPtr data_;
};

// Memory that PyTorch's allocator knows nothing of: its statistics, which users read, stay as they
// were, and so do its pools.
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
