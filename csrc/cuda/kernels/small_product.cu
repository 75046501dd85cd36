#include "cuda/kernels/small_product.cuh"

namespace fused::cuda::kernels {
namespace {

using gemm::Pass;

constexpr int least_arch = 80;

template <typename T, Pass pass, Activation activation>
__global__ void __launch_bounds__(SmallShape<pass>::threads)
    small_product_kernel(const SmallProduct product) {
#if __CUDA_ARCH__ >= 800
  small_product_block<T, pass, activation>(product);
#endif
}

template <typename T, Pass pass, Activation activation>
void launch(const SmallProduct& p, cudaStream_t stream) {
  small_product_kernel<T, pass, activation>
      <<<small_grid<pass>(p), SmallShape<pass>::threads, 0, stream>>>(p);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

bool have_small_products() {
  cudaFuncAttributes attributes{};
  const auto status = cudaFuncGetAttributes(
      &attributes, small_product_kernel<__nv_bfloat16, Pass::fprop, Activation::none>);
  if (status == cudaSuccess) return attributes.ptxVersion >= least_arch;
  static_cast<void>(cudaGetLastError());  // a refusal is an answer
  return false;
}

void small_product(const SmallProduct& p, cudaStream_t stream) {
  with_type(p.type, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      if (p.pass == Pass::wgrad) return launch<T, Pass::wgrad, Activation::none>(p, stream);
      with_activation(p.activation, [&](auto constant) {
        constexpr Activation activation = decltype(constant)::value;
        if (p.pass == Pass::fprop) return launch<T, Pass::fprop, activation>(p, stream);
        launch<T, Pass::dgrad, activation>(p, stream);
      });
    }
  });
}

}  // namespace fused::cuda::kernels
