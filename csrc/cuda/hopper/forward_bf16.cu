#include "cuda/hopper/forward.cuh"

namespace fused::cuda::hopper {

template cudaError_t forward<gemm::Type::bf16, Activation::relu, false>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::gelu_tanh, false>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::gelu_erf, false>(const Product&);
template cudaError_t forward<gemm::Type::bf16, Activation::silu, false>(const Product&);

}  // namespace fused::cuda::hopper
