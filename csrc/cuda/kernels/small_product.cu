#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/small_product.cuh"

namespace fused::cuda::kernels {
namespace {

using gemm::Pass;

constexpr int least_arch = 80;

template <typename T, Activation activation>
__global__ void __launch_bounds__(small_forward_threads)
    small_forward_kernel(const SmallProduct product) {
#if __CUDA_ARCH__ >= 800
  alignas(32) __shared__ unsigned char shared[SmallShape<Pass::fprop, false>::bytes];
  wait_for_previous_kernel();
  small_product_block<T, Pass::fprop, activation, false>(product, blockIdx.x, shared);
#endif
}

// The blocks of the weight's gradient, then those of the input's.
template <typename T, Activation activation, bool sums>
__global__ void __launch_bounds__(small_backward_threads)
    small_backward_kernel(const SmallProduct of_weight, const SmallProduct of_input,
                          int blocks_of_weight) {
#if __CUDA_ARCH__ >= 800
  constexpr size_t bytes =
      std::max(SmallShape<Pass::wgrad, true>::bytes, SmallShape<Pass::dgrad, sums>::bytes);
  alignas(32) __shared__ unsigned char shared[bytes];
  wait_for_previous_kernel();
  const int block = blockIdx.x;
  if (block < blocks_of_weight) {
    small_product_block<T, Pass::wgrad, Activation::none, true>(of_weight, block, shared);
  } else {
    small_product_block<T, Pass::dgrad, activation, sums>(of_input, block - blocks_of_weight,
                                                          shared);
  }
#endif
}

template <typename Fn>
void with_narrow_type(gemm::Type type, const Fn& fn) {
  with_type(type, [&](auto element) {
    if constexpr (sizeof(element) == 2) fn(element);
  });
}

}  // namespace

bool have_small_products() {
  return compiled_arch(small_forward_kernel<__nv_bfloat16, Activation::none>) >= least_arch;
}

void small_forward(const SmallProduct& product, cudaStream_t stream) {
  with_narrow_type(product.type, [&](auto element) {
    with_activation(product.activation, [&](auto constant) {
      launch_early(small_forward_kernel<decltype(element), decltype(constant)::value>,
                   small_blocks<Pass::fprop, false>(product), small_forward_threads, stream,
                   product);
    });
  });
}

void small_backward(const SmallGradients& gradients, cudaStream_t stream) {
  const auto [of_weight, of_input] = gradients;
  const int blocks_of_weight = small_blocks<Pass::wgrad, true>(of_weight);
  const auto run = [&](auto element, auto activation, auto sums) {
    const int blocks_of_input = small_blocks<Pass::dgrad, sums.value>(of_input);
    launch_early(small_backward_kernel<decltype(element), activation.value, sums.value>,
                 blocks_of_weight + blocks_of_input, small_backward_threads, stream, of_weight,
                 of_input, blocks_of_weight);
  };
  with_narrow_type((of_weight.rows > 0 ? of_weight : of_input).type, [&](auto element) {
    with_activation(of_input.activation, [&](auto activation) {
      if (of_input.sums != nullptr) return run(element, activation, std::true_type());
      run(element, activation, std::false_type());
    });
  });
}

}  // namespace fused::cuda::kernels
