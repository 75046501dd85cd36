// With the pre-activation, which is kept for the backward; ReLU keeps its output.

#include "cuda/hopper/forward.cuh"

namespace fused::cuda::hopper {

template cudaError_t forward<gemm::Type::f16, Activation::gelu_tanh, true>(const Product&);
template cudaError_t forward<gemm::Type::f16, Activation::gelu_erf, true>(const Product&);
template cudaError_t forward<gemm::Type::f16, Activation::silu, true>(const Product&);

}  // namespace fused::cuda::hopper
