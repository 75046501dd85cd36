#pragma once

// Errors of CUDA in a library that knows nothing of torch.

#include <cuda_runtime_api.h>

namespace fused::cuda::kernels {

// What raises an error, in its caller's words; until it is set, a std::runtime_error.
using Raise = void (*)(cudaError_t error);
void set_raise(Raise raise);

[[noreturn]] void raise(cudaError_t error);

inline void check(cudaError_t result) {
  if (result != cudaSuccess) raise(result);
}

inline void check_launch() { check(cudaGetLastError()); }

// Waits and loading, which would end a capture in another thread, do not while one lives.
class OthersMayCapture {
 public:
  OthersMayCapture() { check(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~OthersMayCapture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  OthersMayCapture& operator=(OthersMayCapture&&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace fused::cuda::kernels
