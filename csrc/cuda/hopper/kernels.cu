// One kernel for one type of results, with every activation. build_tools/hopper.py compiles this
// for each FUSED_KERNEL and FUSED_TYPE at the same time, as each takes a minute.

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/gating.cuh"
#include "cuda/hopper/glu.cuh"

namespace fused::cuda::hopper {

#define INSTANCE(activation) \
  template cudaError_t FUSED_KERNEL<gemm::Type::FUSED_TYPE, Activation::activation>(const Product&)

INSTANCE(gelu_tanh);
INSTANCE(gelu_erf);
INSTANCE(silu);
#ifndef FUSED_GATED  // ReLU as a gate is left to other kernels
INSTANCE(relu);
#endif

}  // namespace fused::cuda::hopper
