#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/small/kernels/small_product.cuh"

namespace fused::cuda::kernels {
namespace {

using gemm::Pass;

constexpr int least_arch = 80;

template <typename T, Activation activation>
__global__ void __launch_bounds__(small_forward_threads<T>)
    small_forward_kernel(const SmallProduct product) {
#if __CUDA_ARCH__ >= 800
  alignas(32) __shared__ unsigned char shared[SmallShape<T, Pass::fprop>::bytes];
  wait_for_previous_kernel();
  const auto own = of_member<T>(product, blockIdx.y);
  SmallBlock<T, Pass::fprop, activation>(own, blockIdx.x, shared).run();
#endif
}

template <typename T, Activation activation>
__global__ void __launch_bounds__(small_forward_threads<T>)
    small_network_kernel(const __grid_constant__ SmallNetwork network, int cluster) {
#if __CUDA_ARCH__ >= 800
  alignas(32) __shared__ unsigned char shared[SmallShape<T, Pass::fprop>::bytes];
  wait_for_previous_kernel();
  small_network_block<T, activation>(network, blockIdx.x, cluster, shared);
#endif
}

template <typename T, Activation activation>
__global__ void __launch_bounds__(small_backward_threads)
    small_backward_kernel(const SmallProduct of_weight, const SmallProduct of_input,
                          int blocks_of_input, int blocks_of_weight) {
#if __CUDA_ARCH__ >= 800
  constexpr size_t bytes =
      std::max(SmallShape<T, Pass::wgrad>::bytes, SmallShape<T, Pass::dgrad>::bytes);
  alignas(32) __shared__ unsigned char shared[bytes];
  wait_for_previous_kernel();
  const int block = blockIdx.x;
  if (block < blocks_of_input) {
    const auto own = of_member<T>(of_input, blockIdx.y);
    SmallBlock<T, Pass::dgrad, activation>(own, block, shared).run();
  } else if (block < blocks_of_input + blocks_of_weight) {
    const auto own = of_member<T>(of_weight, blockIdx.y);
    SmallBlock<T, Pass::wgrad, Activation::none>(own, block - blocks_of_input, shared).run();
  }
#endif
}

template <typename Fn>
void with_small_type(gemm::Type type, const Fn& fn) {
  with_type(type, [&](auto element) {
    if constexpr (sizeof(element) <= 4) fn(element);
  });
}

}  // namespace

bool have_small_products() {
  return compiled_arch(small_forward_kernel<__nv_bfloat16, Activation::none>) >= least_arch;
}

void small_forward(const SmallProduct& product, cudaStream_t stream) {
  with_small_type(product.type, [&](auto element) {
    using T = decltype(element);
    const dim3 blocks(small_blocks<T, Pass::fprop>(product), product.members);
    with_activation(product.activation, [&](auto activation) {
      launch_early(small_forward_kernel<T, activation.value>, blocks, small_forward_threads<T>, 1,
                   stream, product);
    });
  });
}

void small_network(const SmallNetwork& network, cudaStream_t stream) {
  const auto& first = network.layers[0];
  int widest = 0;
  for (const auto& layer : network.layers) widest = std::max(widest, tiles(layer.cols));
  const int cluster = has_clusters(cluster_arch) ? std::min(widest, most_blocks_in_cluster) : 1;
  with_small_type(first.type, [&](auto element) {
    using T = decltype(element);
    with_activation(first.activation, [&](auto activation) {
      launch_early(small_network_kernel<T, activation.value>, tiles(first.rows) * cluster,
                   small_forward_threads<T>, cluster, stream, network, cluster);
    });
  });
}

void small_backward(const SmallGradients& gradients, cudaStream_t stream) {
  const auto& of_weight = gradients.of_weight;
  auto of_input = gradients.of_input;
  const auto& any = of_weight.rows > 0 ? of_weight : of_input;
  with_small_type(any.type, [&](auto element) {
    using T = decltype(element);
    constexpr int rows = SmallShape<T, Pass::dgrad>::rows;
    if (of_input.sums != nullptr) {
      const int most = has_clusters(cluster_arch) ? most_blocks_in_cluster : 1;
      of_input.cluster = std::min((of_input.rows + rows - 1) / rows, most);
    }
    const int cluster = std::max(of_input.cluster, 1);
    const int blocks_of_input = small_blocks<T, Pass::dgrad>(of_input);
    const int blocks_of_weight = small_blocks<T, Pass::wgrad>(of_weight);
    const int blocks = (blocks_of_input + blocks_of_weight + cluster - 1) / cluster * cluster;
    with_activation(of_input.activation, [&](auto activation) {
      launch_early(small_backward_kernel<T, activation.value>, dim3(blocks, any.members),
                   small_backward_threads, cluster, stream, of_weight, of_input, blocks_of_input,
                   blocks_of_weight);
    });
  });
}

}  // namespace fused::cuda::kernels
