#pragma once

#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/check.h"

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>

namespace fused::cuda::kernels {

// Remembers an answer for each device, which is asked once.
class PerDevice {
 public:
  template <typename Ask>
  bool operator()(const Ask& ask) {
    int device = 0;
    check(cudaGetDevice(&device));
    auto& answer = answers_[device % answers_.size()];
    if (answer != unknown) return answer == yes;
    const OthersMayCapture guard;
    answer = ask() ? yes : no;
    return answer == yes;
  }

 private:
  enum Answer : int { unknown, no, yes };
  std::array<std::atomic<int>, 64> answers_{};
};

// Returns the architecture that a kernel was compiled for on this device, 0 if there is none. The
// list of architectures does not say it.
template <typename Kernel>
int compiled_arch(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) return attributes.ptxVersion;
  static_cast<void>(cudaGetLastError());  // a refusal is an answer
  return 0;
}

template <typename... Parameters, typename... Arguments>
void launch_rows(void (*kernel)(Parameters...), int64_t rows, int64_t vectors_per_row,
                 int rows_at_once, cudaStream_t stream, const Arguments&... arguments) {
  const dim3 block = block_shape(vectors_per_row);
  const dim3 grid = grid_shape(rows, vectors_per_row, block, rows_at_once);
  kernel<<<grid, block, 0, stream>>>(arguments...);
  check_launch();
}

// Launches a kernel that calls wait_for_previous_kernel, and lets it start early if its code was
// compiled for an architecture that can wait. `cluster` blocks along x form a cluster.
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster,
                  cudaStream_t stream, const Arguments&... arguments) {
  constexpr int waiting_arch = 90;
  static PerDevice waits;  // one for all kernels, which are compiled for the same architectures
  std::array<cudaLaunchAttribute, 2> attributes;
  unsigned count = 0;
  if (waits([kernel] { return compiled_arch(kernel) >= waiting_arch; })) {
    auto& early = attributes[count++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    auto& shape = attributes[count++];
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  const cudaLaunchConfig_t config{grid, block, 0, stream, attributes.data(), count};
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace fused::cuda::kernels
