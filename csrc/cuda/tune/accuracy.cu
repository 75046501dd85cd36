#include "cuda/kernels/activation_math.cuh"
#include "cuda/tune/accuracy.cuh"

namespace fused::cuda::tune {
namespace {

using gemm::Matrix;
using kernels::Accumulator, kernels::narrow, kernels::widen, kernels::with_type;
using plans::TrialErrors;

template <typename T>
__device__ T* element(const Matrix& m, int64_t row, int64_t col) {
  return static_cast<T*>(m.data) + (m.transposed ? col * m.ld + row : row * m.ld + col);
}

template <typename T>
__device__ double value(const Matrix& m, int64_t row, int64_t col) {
  return widen(*element<T>(m, row, col));
}

__device__ bool bit(const Matrix& mask, int64_t row, int64_t col) {
  return static_cast<const uint8_t*>(mask.data)[row * mask.ld + col / 8] >> col % 8 & 1;
}

template <size_t k = 0>
__device__ double activated(Activation activation, double z) {
  constexpr auto here = activations[k];
  if constexpr (k + 1 < std::size(activations)) {
    if (activation != here) return activated<k + 1>(activation, z);
  }
  return kernels::activate<here, false>(z);
}

template <size_t k = 0>
__device__ double gradient(Activation activation, double grad, double at) {
  constexpr auto here = activations[k];
  if constexpr (k + 1 < std::size(activations)) {
    if (activation != here) return gradient<k + 1>(activation, grad, at);
  }
  return kernels::activation_gradient<here, false, double>(grad, at);
}

template <typename T>
__global__ void fill_kernel(T* data, int64_t count, double amplitude, bool positive,
                            uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const double u = static_cast<double>(scatter(seed + i) >> 11) * 0x1p-52 - 1;
    data[i] = narrow<T>(static_cast<Accumulator<T>>(positive && u < 0 ? 0 : amplitude * u));
  }
}

__global__ void fill_bits_kernel(uint8_t* data, int64_t bytes, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < bytes;
       i += int64_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<uint8_t>(scatter(seed + i));
  }
}

template <typename T>
__global__ void spread_kernel(Matrix mask, Matrix values) {
  const int64_t count = values.rows * values.cols;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / values.cols, col = i % values.cols;
    *element<T>(values, row, col) = narrow<T>(bit(mask, row, col) ? 1 : 0);
  }
}

// The first, the middle and the last of so many.
constexpr int most_lines = 3;
__device__ int64_t line_of(int i, int64_t lines) { return i * (lines - 1) / (most_lines - 1); }

template <typename T>
__global__ void put_kernel(Matrix matrix, bool columns, double value) {
  const int64_t lines = columns ? matrix.cols : matrix.rows;
  const int64_t length = columns ? matrix.rows : matrix.cols;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < length;
       i += int64_t{gridDim.x} * blockDim.x) {
    for (int n = 0; n < most_lines; ++n) {
      const int64_t line = line_of(n, lines);
      *(columns ? element<T>(matrix, i, line) : element<T>(matrix, line, i)) =
          narrow<T>(static_cast<Accumulator<T>>(value));
    }
  }
}

__device__ int64_t row_of(const TrialData& d, int64_t cell) { return cell / d.result.cols; }
__device__ int64_t col_of(const TrialData& d, int64_t cell) { return cell % d.result.cols; }

struct Sum {
  double value, scale;
};

// By a warp.
template <typename T>
__device__ Sum exact_sum(const Matrix& left, const Matrix& right, const void* bias, int64_t row,
                         int64_t col, int lane) {
  double sum = 0, magnitude = 0;
  if (right.data == nullptr) {
    if (lane == 0) sum = value<T>(left, row, col), magnitude = fabs(sum);
  } else {
    for (int64_t k = lane; k < left.cols; k += warp) {
      const double product = value<T>(left, row, k) * value<T>(right, k, col);
      sum += product;
      magnitude += fabs(product);
    }
  }
  const double added = bias == nullptr ? 0 : widen(static_cast<const T*>(bias)[col]);
  return {sum_over_warp(sum) + added, sum_over_warp(magnitude) + fabs(added)};
}

// A warp for each sample.
template <typename T>
__global__ void exact_kernel(TrialData d, int samples, Exact* exact) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const int64_t cell = drawn(sample, samples, d.result.rows * d.result.cols);
  const int64_t row = row_of(d, cell), col = col_of(d, cell);
  const auto sum = exact_sum<T>(d.left, d.right, d.bias, row, col, lane);
  Sum up{0, 0};
  if (d.up.weight != nullptr) {
    up = exact_sum<T>(d.left, d.right_of_up, d.up.bias, row, col, lane);
  }
  if (lane == 0) exact[sample] = {sum.value, sum.scale, up.value, up.scale};
}

// An activation at z: its value, and how fast it changes there, or, where z is near a bend, beside.
struct Curve {
  double value, slope;
};
__device__ Curve curve(const TrialData& d, double z, double magnitude) {
  if (d.of_sum || d.activation == Activation::none) return {0, 1};
  const double reach = d.sign_error * magnitude;
  double slope = 0;
  for (const double at : {z - reach, z, z + reach}) {
    slope = fmax(slope, fabs(gradient(d.activation, 1, at)));
  }
  return {activated(d.activation, z), slope};
}

// Of sum · act'(at).
__device__ double gradient_unit(const TrialData& d, double slope, double sum, double magnitude) {
  return unit_of_gradient(d.unit, d.of_sum ? 1 : slope, sum, magnitude);
}

template <typename T>
__device__ void add_forward(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                            TrialErrors* errors) {
  const auto [z, magnitude, up_z, magnitude_of_up] = exact;
  const double active = activated(d.activation, z), got = value<T>(d.result, row, col);
  const auto at = curve(d, z, magnitude);
  const double unit = unit_of_value(d.unit, at.value, at.slope, z, magnitude);
  const double unit_of_z = d.unit.of_type * magnitude;
  const bool gated = d.up.weight != nullptr;
  if (gated) {
    add(errors, &TrialErrors::elements, got - active * up_z,
        unit * fabs(up_z) + d.unit.of_type * fabs(active) * magnitude_of_up);
  } else {
    add(errors, &TrialErrors::elements, got - active, unit);
  }
  if (d.aux.data == nullptr) return;
  if (!d.mask) {
    add(errors, &TrialErrors::aux, value<T>(d.aux, row, col) - z, unit_of_z);
  } else if (d.of_result) {
    if (bit(d.aux, row, col) == (got <= 0)) atomicAdd(&errors->missed, 1.0);
  } else if (bit(d.aux, row, col) != (z > 0) && fabs(z) > d.sign_error * magnitude) {
    atomicAdd(&errors->missed, 1.0);
  }
  if (!gated) return;
  const auto* kept = static_cast<const T*>(d.up.preactivation);
  add(errors, &TrialErrors::sums, widen(kept[row * d.aux.ld + col]) - up_z,
      d.unit.of_type * magnitude_of_up);
}

template <typename T>
__device__ void add_gating(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                           TrialErrors* errors) {
  const double grad = exact.value, magnitude = exact.scale;
  const auto at = [row, col](const void* data, int64_t ld) {
    return widen(static_cast<const T*>(data)[row * ld + col]);
  };
  const auto& g = d.gating;
  const double gate = value<T>(d.aux, row, col), up = at(g.up, g.ld_up);
  const double active = activated(d.activation, gate), slope = gradient(d.activation, 1, gate);
  add(errors, &TrialErrors::elements, value<T>(d.result, row, col) - grad * up * slope,
      gradient_unit(d, slope * up, grad * up, magnitude));
  add(errors, &TrialErrors::aux, at(g.grad_up, d.result.ld) - grad * active,
      gradient_unit(d, active, grad * gate, magnitude));
  add(errors, &TrialErrors::sums, at(g.hidden, d.result.cols) - active * up,
      unit_of_value(d.unit, active * up, 0, gate * up, 0));
}

template <typename T>
__device__ void add_backward(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                             TrialErrors* errors) {
  const double sum = exact.value;
  const double slope = d.activation == Activation::none ? 1
                       : d.mask                         ? bit(d.aux, row, col)
                                : gradient(d.activation, 1, value<T>(d.aux, row, col));
  add(errors, &TrialErrors::elements, value<T>(d.result, row, col) - sum * slope,
      gradient_unit(d, slope, sum, exact.scale));
}

template <typename T>
__global__ void elements_kernel(TrialData d, int samples, const Exact* exact, TrialErrors* errors) {
  const int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  const int64_t cell = drawn(sample, samples, d.result.rows * d.result.cols);
  const int64_t row = row_of(d, cell), col = col_of(d, cell);
  if (d.forward) {
    add_forward<T>(d, row, col, exact[sample], errors);
  } else if (d.gating.up != nullptr) {
    add_gating<T>(d, row, col, exact[sample], errors);
  } else {
    add_backward<T>(d, row, col, exact[sample], errors);
  }
}

template <typename T>
__global__ void sums_kernel(TrialData d, int samples, TrialErrors* errors) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const int64_t col = drawn(sample, samples, d.summed.cols);
  double sum = 0, magnitude = 0, squares = 0;
  for (int64_t row = lane; row < d.summed.rows; row += warp) {
    const double x = value<T>(d.summed, row, col);
    sum += x, magnitude += fabs(x), squares += x * x;
  }
  sum = sum_over_warp(sum);
  magnitude = sum_over_warp(magnitude);
  squares = sum_over_warp(squares);
  if (lane != 0 || magnitude == 0) return;
  const double got = widen(static_cast<const T*>(d.sums)[col]);
  add(errors, &TrialErrors::sums, got - sum, d.unit.of_type * magnitude);
  // Each element has been rounded by up to a unit of its own size, evenly spread.
  if (d.sums_results) atomicAdd(&errors->sums.noise, squares / (3 * magnitude * magnitude));
}

// Whether a mark of the operand did not reach what is made of this element.
template <typename T>
__device__ bool is_lost(const TrialData& d, const Mark& mark, int64_t row, int64_t col) {
  using enum Operand;
  const auto lost = [&mark](double got) { return mark.infinite ? !isinf(got) : !isnan(got); };
  const auto lost_at = [&](const void* data, int64_t place) {
    return lost(widen(static_cast<const T*>(data)[place]));
  };
  const auto is_zero = [&](int64_t c) { return value<T>(d.result, row, c) == 0; };
  const auto operand = mark.operand;
  if (!d.forward && d.activation == Activation::relu) {
    // Where the output is NaN the gradient passes; a single product may be 0 all the same.
    if (operand == saved) return is_zero(col) && is_zero((col + 1) % d.result.cols);
    const bool passes = d.mask ? bit(d.aux, row, col) : value<T>(d.aux, row, col) > 0;
    if (!passes) return false;
  }
  const bool of_up = operand == up_weight || operand == up_bias;
  bool any = lost(value<T>(d.result, row, col));
  if (d.of_result) any |= !bit(d.aux, row, col);
  if (d.forward && d.aux.data != nullptr && !d.mask && !of_up) {
    any |= lost(value<T>(d.aux, row, col));
  }
  if (d.up.preactivation != nullptr && (of_up || operand == left)) {
    any |= lost_at(d.up.preactivation, row * d.aux.ld + col);
  }
  if (const auto& g = d.gating; g.up != nullptr) {
    if (operand != up) any |= lost_at(g.grad_up, row * d.result.ld + col);
    if (operand == up || operand == saved) any |= lost_at(g.hidden, row * d.result.cols + col);
  }
  // A weight gradient's bias gradient sums the left operand itself.
  if (d.sums != nullptr && (d.sums_results || operand == left)) {
    any |= lost_at(d.sums, d.sums_results ? col : row);
  }
  return any;
}

template <typename T>
__global__ void lost_kernel(TrialData d, Mark mark, TrialErrors* errors) {
  const bool columns = by_columns(mark.operand);
  const int64_t lines = columns ? d.result.cols : d.result.rows;
  const int64_t length = columns ? d.result.rows : d.result.cols;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < length;
       i += int64_t{gridDim.x} * blockDim.x) {
    for (int n = 0; n < most_lines; ++n) {
      const int64_t line = line_of(n, lines);
      const bool lost = columns ? is_lost<T>(d, mark, i, line) : is_lost<T>(d, mark, line, i);
      if (lost) atomicAdd(&errors->missed, 1.0);
    }
  }
}

}  // namespace

int samples_of(const TrialData& data) {
  return static_cast<int>(std::min<int64_t>(data.result.rows * data.result.cols, most_samples));
}

void fill(gemm::Type type, void* data, int64_t count, double amplitude, bool positive,
          uint64_t seed, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    fill_kernel<T><<<blocks_for(count), threads, 0, stream>>>(static_cast<T*>(data), count,
                                                              amplitude, positive, seed);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void fill_bits(void* data, int64_t bytes, uint64_t seed, cudaStream_t stream) {
  fill_bits_kernel<<<blocks_for(bytes), threads, 0, stream>>>(static_cast<uint8_t*>(data), bytes,
                                                              seed);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void spread_bits(gemm::Type type, const Matrix& mask, const Matrix& values, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    spread_kernel<T><<<blocks_for(values.rows * values.cols), threads, 0, stream>>>(mask, values);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void put(const Mark& mark, gemm::Type type, const Matrix& matrix, cudaStream_t stream) {
  const bool columns = by_columns(mark.operand);
  const double value = mark.infinite ? INFINITY : NAN;
  with_type(type, [&](auto element) {
    using T = decltype(element);
    put_kernel<T><<<blocks_for(columns ? matrix.rows : matrix.cols), threads, 0, stream>>>(
        matrix, columns, value);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void exact_values(const TrialData& data, Exact* exact, cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.type, [&](auto element) {
    using T = decltype(element);
    exact_kernel<T>
        <<<blocks_for(int64_t{samples} * warp), threads, 0, stream>>>(data, samples, exact);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void add_errors(const TrialData& data, const Exact* exact, TrialErrors* errors,
                cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.type, [&](auto element) {
    using T = decltype(element);
    elements_kernel<T><<<blocks_for(samples), threads, 0, stream>>>(data, samples, exact, errors);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (data.sums == nullptr) return;
    const auto sums = std::min<int64_t>(data.summed.cols, most_samples);
    sums_kernel<T>
        <<<blocks_for(sums * warp), threads, 0, stream>>>(data, static_cast<int>(sums), errors);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void add_lost(const Mark& mark, const TrialData& data, TrialErrors* errors, cudaStream_t stream) {
  const auto length = by_columns(mark.operand) ? data.result.rows : data.result.cols;
  with_type(data.type, [&](auto element) {
    using T = decltype(element);
    lost_kernel<T><<<blocks_for(length), threads, 0, stream>>>(data, mark, errors);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace fused::cuda::tune
