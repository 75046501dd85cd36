#include "cuda/kernels/check.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace fused::cuda::kernels {
namespace {

std::atomic<Raise> raises{nullptr};

}  // namespace

void set_raise(Raise raise) { raises = raise; }

void raise(cudaError_t error) {
  if (const auto theirs = raises.load()) theirs(error);
  throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

}  // namespace fused::cuda::kernels
