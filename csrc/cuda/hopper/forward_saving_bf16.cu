// With what is kept for the backward: the pre-activation, or ReLU's bits.

#include "cuda/hopper/forward.cuh"

namespace fused::cuda::hopper {

template cudaError_t forward<gemm::Type::bf16, Activation::relu, true>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::gelu_tanh, true>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::gelu_erf, true>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::silu, true>(const Product&);

}  // namespace fused::cuda::hopper
