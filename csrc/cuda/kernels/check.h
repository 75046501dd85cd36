#pragma once

// Reports CUDA's errors from a library that knows nothing of torch.

#include <cuda_runtime_api.h>

namespace fused::cuda::kernels {

// The function that raises an error. Until the caller sets it, it throws std::runtime_error.
using Raise = void (*)(cudaError_t error);
void set_raise(Raise raise);

[[noreturn]] void raise(cudaError_t error);

inline void check(cudaError_t result) {
  if (result != cudaSuccess) raise(result);
}

inline void check_launch() { check(cudaGetLastError()); }

// While one lives, waiting and loading kernels do not end a capture in another thread.
class OthersMayCapture {
 public:
  OthersMayCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~OthersMayCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OthersMayCapture& operator=(OthersMayCapture&&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace fused::cuda::kernels
