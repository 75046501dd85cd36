#pragma once

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace fused::cuda::kernels {

// What is asked of each device once.
class PerDevice {
 public:
  // ask() of the current device.
  template <typename Ask>
  bool operator()(const Ask& ask) {
    int device = 0;
    C10_CUDA_CHECK(cudaGetDevice(&device));
    auto& answer = answers_[device % answers_.size()];
    if (answer == unknown) answer = ask() ? yes : no;
    return answer == yes;
  }

 private:
  enum Answer : int { unknown, no, yes };
  std::array<std::atomic<int>, 64> answers_{};
};

// The architecture that the current device's code of a kernel was compiled for, which the list of
// architectures does not tell; 0 where it has none.
template <typename Kernel>
int compiled_arch(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion;
  static_cast<void>(cudaGetLastError());  // a refusal is an answer
  return 0;
}

}  // namespace fused::cuda::kernels
