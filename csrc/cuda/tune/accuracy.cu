#include "cuda/tune/accuracy.h"

#include "cuda/kernels/activation_math.cuh"

#include <algorithm>

namespace fused::cuda::tune {
namespace {

using gemm::Keeps, gemm::Matrix, gemm::Pass;
using kernels::Accumulator, kernels::narrow, kernels::widen, kernels::with_type;
using plans::TrialErrors;

constexpr int warp = 32;
constexpr int threads = 256;
constexpr int most_blocks = 4096;

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t work, cudaStream_t stream,
            const Arguments&... arguments) {
  const auto blocks = std::clamp<int64_t>((work + threads - 1) / threads, 1, most_blocks);
  kernel<<<static_cast<unsigned>(blocks), threads, 0, stream>>>(arguments...);
  kernels::check_launch();
}

template <typename Fn>
__device__ void for_all(int64_t work, const Fn& fn) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < work;
       i += int64_t{gridDim.x} * blockDim.x) {
    fn(i);
  }
}

__device__ uint64_t scatter(uint64_t i) {  // splitmix64
  i += 0x9e3779b97f4a7c15ull;
  i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9ull;
  i = (i ^ i >> 27) * 0x94d049bb133111ebull;
  return i ^ i >> 31;
}

// Draws one element from each of `samples` equal parts, so that none comes twice.
__device__ int64_t drawn(int64_t sample, int64_t samples, int64_t total) {
  const int64_t begin = sample * total / samples, end = (sample + 1) * total / samples;
  return begin + static_cast<int64_t>(scatter(sample) % static_cast<uint64_t>(end - begin));
}

// Compares the bits: for numbers that are not negative they have the numbers' order.
__device__ void raise(double* to, double at_least) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), __double_as_longlong(at_least));
}

__device__ void add(TrialErrors* errors, plans::PooledError TrialErrors::* of, double difference,
                    double scale) {
  const double error = difference == 0 ? 0 : fabs(difference) / scale;  // of an empty sum, too
  if (!isfinite(error)) {
    atomicAdd(&errors->missed, 1.0);
    return;
  }
  auto& pool = errors->*of;
  atomicAdd(&pool.squares, error * error);
  atomicAdd(&pool.count, 1.0);
  raise(&pool.worst, error);
}

__device__ double sum_over_warp(double value) {
  for (int half = warp / 2; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

// ---- operands ----------------------------------------------------------------------------------

template <typename T>
__device__ T* element(const Matrix& m, int64_t row, int64_t col) {
  return static_cast<T*>(m.data) + (m.transposed ? col * m.ld + row : row * m.ld + col);
}

template <typename T>
__device__ double value(const Matrix& m, int64_t row, int64_t col) {
  return widen(*element<T>(m, row, col));
}

template <typename T>
__device__ double result_of(const TrialData& d, int64_t row, int64_t col) {
  const auto& result = d.call.result;
  return d.call.problem.matmul.to_f32 ? value<float>(result, row, col) : value<T>(result, row, col);
}

__device__ bool bit(const Matrix& mask, int64_t row, int64_t col) {
  return static_cast<const uint8_t*>(mask.data)[row * mask.ld + col / 8] >> col % 8 & 1;
}

int samples_of(const TrialData& d) {
  return static_cast<int>(std::min<int64_t>(d.call.result.rows * d.call.result.cols, most_samples));
}

__device__ double activated(Activation activation, double z) {
  return with_activation(activation, [z](auto constant) {
    return kernels::activate<decltype(constant)::value, false>(z);
  });
}

__device__ double slope_of(Activation activation, double at) {
  return with_activation(activation, [at](auto constant) {
    return kernels::activation_gradient<decltype(constant)::value, false>(1.0, at);
  });
}

template <typename T>
__global__ void fill_kernel(T* data, int64_t count, double amplitude, bool positive,
                            uint64_t seed) {
  for_all(count, [&](int64_t i) {
    const double u = static_cast<double>(scatter(seed + i) >> 11) * 0x1p-52 - 1;
    data[i] = narrow<T>(static_cast<Accumulator<T>>(positive && u < 0 ? 0 : amplitude * u));
  });
}

__global__ void fill_bits_kernel(uint8_t* data, int64_t bytes, uint64_t seed) {
  for_all(bytes, [&](int64_t i) { data[i] = static_cast<uint8_t>(scatter(seed + i)); });
}

template <typename T>
__global__ void spread_kernel(Matrix mask, Matrix values) {
  for_all(values.rows * values.cols, [&](int64_t i) {
    const int64_t row = i / values.cols, col = i % values.cols;
    *element<T>(values, row, col) = narrow<T>(bit(mask, row, col) ? 1 : 0);
  });
}

// Marks are in the first line, the middle one and the last.
constexpr int most_lines = 3;
__device__ int64_t line_of(int i, int64_t lines) { return i * (lines - 1) / (most_lines - 1); }

template <typename T>
__global__ void put_kernel(Matrix matrix, bool columns, double value) {
  const int64_t lines = columns ? matrix.cols : matrix.rows;
  for_all(columns ? matrix.rows : matrix.cols, [&](int64_t i) {
    for (int n = 0; n < most_lines; ++n) {
      const int64_t line = line_of(n, lines);
      *(columns ? element<T>(matrix, i, line) : element<T>(matrix, line, i)) =
          narrow<T>(static_cast<Accumulator<T>>(value));
    }
  });
}

// ---- exact results -----------------------------------------------------------------------------

struct Cell {
  int64_t row, col;
};
__device__ Cell cell_of(const TrialData& d, int sample, int samples) {
  const auto& result = d.call.result;
  const int64_t cell = drawn(sample, samples, result.rows * result.cols);
  return {cell / result.cols, cell % result.cols};
}
__device__ Activation activation_of(const TrialData& d) { return d.call.problem.activation; }
__host__ __device__ bool is_forward(const TrialData& d) {
  return gemm::is_forward(d.call.problem.pass);
}
__device__ bool is_mask(const TrialData& d) {
  return d.call.problem.keeps == Keeps::mask || d.call.problem.keeps == Keeps::bits;
}
// A backward may sum its result before that is rounded.
__device__ const void* sums_of(const TrialData& d) { return is_forward(d) ? nullptr : d.call.bias; }
__device__ bool sums_results(const TrialData& d) { return d.call.problem.pass != Pass::wgrad; }

struct Sum {
  double value, scale;
};

template <typename T>
__device__ Sum exact_sum(const Matrix& left, const Matrix& right, const void* bias, int64_t row,
                         int64_t col, int lane) {
  double sum = 0, magnitude = 0;
  for (int64_t k = lane; k < left.cols; k += warp) {
    const double product = value<T>(left, row, k) * value<T>(right, k, col);
    sum += product;
    magnitude += fabs(product);
  }
  const double added = bias == nullptr ? 0 : widen(static_cast<const T*>(bias)[col]);
  return {sum_over_warp(sum) + added, sum_over_warp(magnitude) + fabs(added)};
}

template <typename T>
__global__ void exact_kernel(TrialData d, int samples, Exact* exact) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const auto [row, col] = cell_of(d, sample, samples);
  const auto& c = d.call;
  const auto sum = exact_sum<T>(c.left, c.right, is_forward(d) ? c.bias : nullptr, row, col, lane);
  const double before = c.problem.matmul.adds ? result_of<T>(d, row, col) : 0;
  Sum up{0, 0};
  if (c.up.weight != nullptr) {
    up = exact_sum<T>(c.left, right_of_up(c), c.up.bias, row, col, lane);
  }
  if (lane == 0) exact[sample] = {sum.value + before, sum.scale + fabs(before), up.value, up.scale};
}

// ---- errors ------------------------------------------------------------------------------------

// An activation at z: its value and its slope; near a bend, the slope beside it.
struct Curve {
  double value, slope;
};
__device__ Curve curve(const TrialData& d, double z, double magnitude) {
  if (d.of_sum || activation_of(d) == Activation::none) return {0, 1};
  const double reach = d.sign_error * magnitude;
  double slope = 0;
  for (const double at : {z - reach, z, z + reach}) {
    slope = fmax(slope, fabs(slope_of(activation_of(d), at)));
  }
  return {activated(activation_of(d), z), slope};
}

__device__ double gradient_unit(const TrialData& d, double slope, double sum, double magnitude) {
  return unit_of_gradient(d.unit, d.of_sum ? 1 : slope, sum, magnitude);
}

template <typename T>
__device__ void add_forward(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                            TrialErrors* errors) {
  const auto [z, magnitude, up_z, magnitude_of_up] = exact;
  const double active = activated(activation_of(d), z), got = value<T>(d.call.result, row, col);
  const auto at = curve(d, z, magnitude);
  const double unit = unit_of_value(d.unit, at.value, at.slope, z, magnitude);
  const double unit_of_z = d.unit.of_type * magnitude;
  const bool gated = d.call.up.weight != nullptr;
  if (gated) {
    add(errors, &TrialErrors::elements, got - active * up_z,
        unit * fabs(up_z) + d.unit.of_type * fabs(active) * magnitude_of_up);
  } else {
    add(errors, &TrialErrors::elements, got - active, unit);
  }
  if (d.call.aux.data == nullptr) return;
  if (!is_mask(d)) {
    add(errors, &TrialErrors::aux, value<T>(d.call.aux, row, col) - z, unit_of_z);
  } else if (gemm::wants_bits(d.call.problem)) {
    if (bit(d.call.aux, row, col) == (got <= 0)) atomicAdd(&errors->missed, 1.0);
  } else if (bit(d.call.aux, row, col) != (z > 0) && fabs(z) > d.sign_error * magnitude) {
    atomicAdd(&errors->missed, 1.0);
  }
  if (!gated) return;
  const auto* kept = static_cast<const T*>(d.call.up.preactivation);
  add(errors, &TrialErrors::sums, widen(kept[row * d.call.aux.ld + col]) - up_z,
      d.unit.of_type * magnitude_of_up);
}

template <typename T>
__device__ void add_gating(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                           TrialErrors* errors) {
  const double grad = exact.value, magnitude = exact.scale;
  const auto at = [row, col](const void* data, int64_t ld) {
    return widen(static_cast<const T*>(data)[row * ld + col]);
  };
  const auto& g = d.call.gating;
  const double gate = value<T>(d.call.aux, row, col), up = at(g.up, g.ld_up);
  const double active = activated(activation_of(d), gate), slope = slope_of(activation_of(d), gate);
  add(errors, &TrialErrors::elements, value<T>(d.call.result, row, col) - grad * up * slope,
      gradient_unit(d, slope * up, grad * up, magnitude));
  add(errors, &TrialErrors::aux, at(g.grad_up, d.call.result.ld) - grad * active,
      gradient_unit(d, active, grad * gate, magnitude));
  add(errors, &TrialErrors::sums, at(g.hidden, d.call.result.cols) - active * up,
      unit_of_value(d.unit, active * up, 0, gate * up, 0));
}

template <typename T>
__device__ void add_backward(const TrialData& d, int64_t row, int64_t col, const Exact& exact,
                             TrialErrors* errors) {
  const double sum = exact.value;
  const double slope = activation_of(d) == Activation::none ? 1
                       : is_mask(d)                         ? bit(d.call.aux, row, col)
                                    : slope_of(activation_of(d), value<T>(d.call.aux, row, col));
  add(errors, &TrialErrors::elements, result_of<T>(d, row, col) - sum * slope,
      gradient_unit(d, slope, sum, exact.scale));
}

template <typename T>
__global__ void elements_kernel(TrialData d, int samples, const Exact* exact, TrialErrors* errors) {
  const int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  const auto [row, col] = cell_of(d, sample, samples);
  if (is_forward(d)) {
    add_forward<T>(d, row, col, exact[sample], errors);
  } else if (d.call.gating.up != nullptr) {
    add_gating<T>(d, row, col, exact[sample], errors);
  } else {
    add_backward<T>(d, row, col, exact[sample], errors);
  }
}

template <typename T>
__global__ void sums_kernel(TrialData d, int samples, TrialErrors* errors) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const auto summed = gemm::summed(d.call);
  const int64_t col = drawn(sample, samples, summed.cols);
  double sum = 0, magnitude = 0, squares = 0;
  for (int64_t row = lane; row < summed.rows; row += warp) {
    const double x = value<T>(summed, row, col);
    sum += x, magnitude += fabs(x), squares += x * x;
  }
  sum = sum_over_warp(sum);
  magnitude = sum_over_warp(magnitude);
  squares = sum_over_warp(squares);
  if (lane != 0) return;
  const double got = widen(static_cast<const T*>(sums_of(d))[col]);
  add(errors, &TrialErrors::sums, got - sum, d.unit.of_type * magnitude);
  // Rounding has changed each element by up to a unit of its own size, evenly spread.
  if (!sums_results(d) || magnitude == 0) return;
  atomicAdd(&errors->sums.noise, squares / (3 * magnitude * magnitude));
}

// At such an element act' is 0, so the result is 0. Elsewhere a result is 0 by chance alone.
template <typename T>
__device__ bool stops_gradient(const TrialData& d, int64_t row, int64_t col) {
  if (d.call.aux.data == nullptr || activation_of(d) == Activation::none) return false;
  if (is_mask(d)) return !bit(d.call.aux, row, col);
  return slope_of(activation_of(d), value<T>(d.call.aux, row, col)) == 0;
}

template <typename T>
__device__ bool is_lost(const TrialData& d, const Mark& mark, int64_t row, int64_t col) {
  using enum Operand;
  const auto lost = [&mark](double got) { return mark.infinite ? !isinf(got) : !isnan(got); };
  const auto lost_at = [&](const void* data, int64_t place) {
    return lost(widen(static_cast<const T*>(data)[place]));
  };
  const auto is_zero = [&](int64_t c) { return value<T>(d.call.result, row, c) == 0; };
  const auto operand = mark.operand;
  if (!is_forward(d) && operand == saved && activation_of(d) == Activation::relu) {
    // If the output is NaN the gradient passes, though a single product may be 0.
    return is_zero(col) && is_zero((col + 1) % d.call.result.cols);
  }
  if (!is_forward(d) && operand != saved && stops_gradient<T>(d, row, col)) return false;
  const bool of_up = operand == up_weight || operand == up_bias;
  bool any = lost(result_of<T>(d, row, col));
  if (gemm::wants_bits(d.call.problem)) any |= !bit(d.call.aux, row, col);
  if (is_forward(d) && d.call.aux.data != nullptr && !is_mask(d) && !of_up) {
    any |= lost(value<T>(d.call.aux, row, col));
  }
  if (d.call.up.preactivation != nullptr && (of_up || operand == left)) {
    any |= lost_at(d.call.up.preactivation, row * d.call.aux.ld + col);
  }
  if (const auto& g = d.call.gating; g.up != nullptr) {
    if (operand != up) any |= lost_at(g.grad_up, row * d.call.result.ld + col);
    if (operand == up || operand == saved) any |= lost_at(g.hidden, row * d.call.result.cols + col);
  }
  // A weight gradient's bias gradient sums the left operand itself.
  if (sums_of(d) != nullptr && (sums_results(d) || operand == left)) {
    any |= lost_at(sums_of(d), sums_results(d) ? col : row);
  }
  return any;
}

template <typename T>
__global__ void lost_kernel(TrialData d, Mark mark, TrialErrors* errors) {
  const bool columns = by_columns(mark.operand);
  const int64_t lines = columns ? d.call.result.cols : d.call.result.rows;
  for_all(columns ? d.call.result.rows : d.call.result.cols, [&](int64_t i) {
    for (int n = 0; n < most_lines; ++n) {
      const int64_t line = line_of(n, lines);
      const bool lost = columns ? is_lost<T>(d, mark, i, line) : is_lost<T>(d, mark, line, i);
      if (lost) atomicAdd(&errors->missed, 1.0);
    }
  });
}

}  // namespace

void fill(gemm::Type type, void* data, int64_t count, double amplitude, bool positive,
          uint64_t seed, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    launch(fill_kernel<T>, count, stream, static_cast<T*>(data), count, amplitude, positive, seed);
  });
}

void fill_bits(gemm::Type type, const Matrix& mask, int64_t bytes, const Matrix& values,
               uint64_t seed, cudaStream_t stream) {
  launch(fill_bits_kernel, bytes, stream, static_cast<uint8_t*>(mask.data), bytes, seed);
  with_type(type, [&](auto element) {
    launch(spread_kernel<decltype(element)>, values.rows * values.cols, stream, mask, values);
  });
}

void put(const Mark& mark, gemm::Type type, const Matrix& matrix, cudaStream_t stream) {
  const bool columns = by_columns(mark.operand);
  const double value = mark.infinite ? INFINITY : NAN;
  with_type(type, [&](auto element) {
    launch(put_kernel<decltype(element)>, columns ? matrix.rows : matrix.cols, stream, matrix,
           columns, value);
  });
}

void exact_values(const TrialData& data, Exact* exact, cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.call.problem.matmul.type, [&](auto element) {
    launch(exact_kernel<decltype(element)>, int64_t{samples} * warp, stream, data, samples, exact);
  });
}

void add_errors(const TrialData& data, const Exact* exact, TrialErrors* errors,
                cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.call.problem.matmul.type, [&](auto element) {
    using T = decltype(element);
    launch(elements_kernel<T>, samples, stream, data, samples, exact, errors);
    if (is_forward(data) || data.call.bias == nullptr) return;
    const auto sums =
        static_cast<int>(std::min<int64_t>(gemm::summed(data.call).cols, most_samples));
    launch(sums_kernel<T>, int64_t{sums} * warp, stream, data, sums, errors);
  });
}

void add_lost(const Mark& mark, const TrialData& data, TrialErrors* errors, cudaStream_t stream) {
  const auto length = by_columns(mark.operand) ? data.call.result.rows : data.call.result.cols;
  with_type(data.call.problem.matmul.type, [&](auto element) {
    launch(lost_kernel<decltype(element)>, length, stream, data, mark, errors);
  });
}

}  // namespace fused::cuda::tune
