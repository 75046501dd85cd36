#include "cuda/hopper/glu.cuh"

namespace fused::cuda::hopper {

template cudaError_t glu<gemm::Type::bf16, Activation::gelu_tanh>(const Product&);
template cudaError_t glu<gemm::Type::bf16, Activation::gelu_erf>(const Product&);
template cudaError_t glu<gemm::Type::bf16, Activation::silu>(const Product&);

}  // namespace fused::cuda::hopper
