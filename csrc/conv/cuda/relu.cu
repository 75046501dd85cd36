// Bias and ReLU after a convolution, and ReLU's backward with the bias gradient, in one pass each.

#include "conv/cuda/relu.h"
#include "cuda/kernels/reduce.cuh"

#include <algorithm>

namespace fused::conv::cuda {

using namespace fused::cuda::kernels;

namespace {

// A column of the image as a matrix has one bias where it is channels-last, else a row.
template <typename T, bool channels_last, int width>
__global__ void __launch_bounds__(block_threads)
    bias_relu_kernel(int64_t rows, int64_t cols, int64_t channels, const T* bias, T* y) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (col >= cols) return;
  const int64_t first = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  A added[width];
  if constexpr (channels_last) widen(*reinterpret_cast<const V*>(bias + col), added);
  // One division for all rows: the channel is carried along.
  int64_t channel = channels_last ? 0 : first % channels;
  const int64_t channel_step = channels_last ? 0 : step % channels;
  for (int64_t row = first; row < rows; row += step) {
    auto* at = reinterpret_cast<V*>(y + row * cols + col);
    A values[width];
    widen(*at, values);
    const A plane_bias = channels_last ? A(0) : A(widen(bias[channel]));
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const A z = values[j] + (channels_last ? added[j] : plane_bias);
      values[j] = activate<Activation::relu, false>(z);
    }
    *at = narrow<T, width>(values);
    if constexpr (!channels_last) {
      channel += channel_step;
      if (channel >= channels) channel -= channels;
    }
  }
}

// The compiler would store 16 bytes piece by piece.
template <typename V>
__device__ void store(const V& from, void* to) {
  if constexpr (sizeof(V) == sizeof(uint4)) {
    __stwb(static_cast<uint4*>(to), reinterpret_cast<const uint4&>(from));
  } else {
    *static_cast<V*>(to) = from;
  }
}

// A row of threads walks through so much of a plane without a division.
constexpr int vectors_per_thread = 16;

// blockIdx.x is the channel, blockIdx.y a chunk of its segments in all images.
template <typename T, int width>
__global__ void __launch_bounds__(block_threads)
    planes_backward_kernel(PlanesBackward args, int64_t segments_per_plane,
                           int64_t segments_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  const int64_t channel = blockIdx.x, channels = args.image.channels, plane = args.image.plane;
  const int64_t vectors = plane / width;
  const int64_t segment_length = int64_t{blockDim.x} * vectors_per_thread;
  const int64_t first = blockIdx.y * segments_per_chunk;
  const int64_t last = min(first + segments_per_chunk, args.image.batch * segments_per_plane);
  const auto* grad = static_cast<const T*>(args.grad);
  const auto* output = static_cast<const T*>(args.output);
  auto* dz = static_cast<T*>(args.dz);
  A sum = 0;
  for (int64_t s = first + threadIdx.y; s < last; s += blockDim.y) {
    const int64_t image = s / segments_per_plane;
    const int64_t begin = (s - image * segments_per_plane) * segment_length;
    const int64_t end = min(begin + segment_length, vectors);
    const int64_t origin = (image * channels + channel) * plane;
    A of_segment = 0;  // by itself, which is more exact
#pragma unroll 4
    for (int64_t v = begin + threadIdx.x; v < end; v += blockDim.x) {
      const int64_t at = origin + v * width;
      A gradient[width], saved[width];
      widen(*reinterpret_cast<const V*>(grad + at), gradient);
      widen(*reinterpret_cast<const V*>(output + at), saved);
#pragma unroll
      for (int j = 0; j < width; ++j) {
        gradient[j] = activation_gradient<Activation::relu, false>(gradient[j], saved[j]);
        of_segment += gradient[j];
      }
      store(narrow<T, width>(gradient), dz + at);
    }
    sum += of_segment;
  }
  if (args.grad_bias == nullptr) return;
  __shared__ A shared[block_threads];
  A sums[1] = {sum_over_block(sum, shared)};
  put_sums<T>(sums, shared, threadIdx.x == 0, channel, channels, partials, {args.grad_bias});
}

// Segments are the rows, of which each channel has some.
struct Launch {
  bool vectors;
  int64_t segments_per_plane;
  Chunks chunks;
};

Launch shape_of(const PlanesBackward& args) {
  const auto& image = args.image;
  const int64_t full = 16 / gemm::size_of(image.type);
  const bool vectors = image.plane % full == 0 && gemm::is_aligned(args.grad) &&
                       gemm::is_aligned(args.output) && gemm::is_aligned(args.dz);
  const int64_t per_plane = vectors ? image.plane / full : image.plane;
  int across = 1;
  while (across < block_threads && across < per_plane) across *= 2;
  const dim3 block(across, block_threads / across);
  const int64_t length = int64_t{across} * vectors_per_thread;
  const int64_t segments_per_plane = (per_plane + length - 1) / length;
  const int64_t segments = image.batch * segments_per_plane;
  // Each row of threads gets a segment at least.
  constexpr int64_t blocks_per_processor = 8;
  const int64_t room =
      (args.processors * blocks_per_processor + image.channels - 1) / image.channels;
  const int64_t useful = (segments + block.y - 1) / block.y;
  int64_t most = std::min(room, useful);
  // Half as many blocks cost less than a second kernel.
  const bool cluster =
      args.grad_bias != nullptr && has_clusters(args.arch) && most <= 2 * most_blocks_in_cluster;
  if (cluster) most = std::min<int64_t>(most, most_blocks_in_cluster);
  return {vectors, segments_per_plane,
          in_chunks(segments, image.channels * block.x, block, most, cluster)};
}

}  // namespace

void bias_relu(const Image& image, bool channels_last, const void* bias, void* y,
               cudaStream_t stream) {
  const int64_t rows = image.batch * (channels_last ? image.plane : image.channels);
  const int64_t cols = channels_last ? image.channels : image.plane;
  with_type(image.type, [&](auto element) {
    using T = decltype(element);
    constexpr int full = full_vector<T>;
    const bool vectors =
        cols % full == 0 && gemm::is_aligned(y) && (!channels_last || gemm::is_aligned(bias));
    auto* kernel = vectors ? bias_relu_kernel<T, false, full> : bias_relu_kernel<T, false, 1>;
    if (channels_last) {
      kernel = vectors ? bias_relu_kernel<T, true, full> : bias_relu_kernel<T, true, 1>;
    }
    launch_rows(kernel, rows, vectors ? cols / full : cols, 1, stream, rows, cols, image.channels,
                static_cast<const T*>(bias), static_cast<T*>(y));
  });
}

int64_t scratch_bytes(const PlanesBackward& args) {
  const auto& image = args.image;
  return args.grad_bias ? shape_of(args).chunks.partial_bytes(image.channels, image.type) : 0;
}

void relu_backward(const PlanesBackward& args, void* scratch, cudaStream_t stream) {
  const auto [vectors, segments_per_plane, chunks] = shape_of(args);
  const int64_t channels = args.image.channels;
  with_type(args.image.type, [&](auto element) {
    using T = decltype(element);
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    auto* kernel =
        vectors ? planes_backward_kernel<T, full_vector<T>> : planes_backward_kernel<T, 1>;
    launch_chunks(kernel, chunks, stream, args, segments_per_plane, chunks.rows_each, partials);
    if (partials == nullptr) return;
    sum_partials<T>(partials, chunks.grid.y, channels, channels, {args.grad_bias}, stream);
  });
}

}  // namespace fused::conv::cuda
