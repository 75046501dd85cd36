#include "cpu/onednn.h"

#include "core/aten_activation.h"
#include "core/torch_internals.h"
#include "cpu/blocks.h"
#include "reference/linear.h"

#include <ATen/ceil_div.h>

#include <algorithm>
#include <optional>
#include <string_view>

namespace fused::cpu::onednn {
namespace {

using at::ceil_div, reference::dense;

using NoScalars = c10::List<std::optional<at::Scalar>>;
using Pointwise = Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view,
                         NoScalars, std::optional<std::string_view>);
using Reorder = Tensor(const Tensor&, std::optional<int64_t>);
using Binary = Tensor(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                      std::string_view);

// MKL adds up partial sums of this many products; oneDNN adds all products one after the other.
constexpr int64_t longest_sum = 192;

const auto& pointwise() {
  static const auto op = internals::find_operator<Pointwise>("mkldnn::_linear_pointwise", "");
  return op;
}

const auto& binary() {
  static const auto op = internals::find_operator<Binary>("mkldnn::_linear_pointwise", "binary");
  return op;
}

const auto& reorder() {
  static const auto op = internals::find_operator<Reorder>("mkldnn::_reorder_linear_weight", "");
  return op;
}

bool multiplies_bf16() {
  static const bool supported = [] {
    const auto op = internals::find_operator<bool()>("mkldnn::_is_mkldnn_bf16_supported", "");
    return op && op->call();
  }();
  return supported;
}

// MKL has kernels of 512 bits for Intel's processors only, and is half as fast on others.
bool outruns_mkl() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool answer =
      at::hasMKL() && at::get_cpu_capability() == "AVX512" && !__builtin_cpu_is("intel");
  return answer;
#else
  return false;
#endif
}

// oneDNN ignores the stride of the bias.
OptionalTensor contiguous(const OptionalTensor& bias) {
  return has_value(bias) ? OptionalTensor(bias->contiguous()) : std::nullopt;
}

}  // namespace

bool takes_linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation) {
  if (!is_gelu(activation) || !pointwise() || !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  const bool fp32 = input.scalar_type() == at::kFloat;
  if (!fp32 && !(input.scalar_type() == at::kBFloat16 && multiplies_bf16())) return false;
  if (fp32 && weight.size(1) > longest_sum) return false;
  // A call costs about 10 us. In that time PyTorch's BLAS does this many multiplications on each
  // thread, and PyTorch's erf is fast. In 16 bits PyTorch itself calls oneDNN.
  const int64_t least_work =
      fp32 ? (int64_t{activation == Activation::gelu_erf ? 2 : 1} << 20) * at::get_num_threads()
           : int64_t{1} << 15;
  if (input.numel() * weight.size(0) < least_work) return false;
  return input.is_non_overlapping_and_dense() && weight.is_non_overlapping_and_dense() &&
         (!has_value(bias) || bias->is_contiguous());
}

Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   Activation activation) {
  return pointwise()->call(input, weight, bias, "gelu", NoScalars(), approximate_of(activation));
}

bool takes_packed_linear(const Tensor& input, const Tensor& weight) {
  // For smaller weights the call of oneDNN takes longer than the product.
  constexpr int64_t least_weight = int64_t{1} << 14;
  return input.scalar_type() == at::kBFloat16 && input.numel() > 0 &&
         weight.numel() >= least_weight && weight.is_non_overlapping_and_dense() && pointwise() &&
         reorder() && multiplies_bf16() && at::globalContext().userEnabledMkldnn();
}

Tensor packed_linear(const Tensor& input, const Tensor& packed_weight, const OptionalTensor& bias,
                     Activation activation) {
  if (is_gelu(activation)) {
    return pointwise()->call(dense(input), packed_weight, contiguous(bias), "gelu", NoScalars(),
                             approximate_of(activation));
  }
  // oneDNN's ReLU turns NaN into 0.
  const auto result = pointwise()->call(dense(input), packed_weight, contiguous(bias), "none",
                                        NoScalars(), std::nullopt);
  activate_out(result, result, activation);
  return result;
}

bool takes_product(at::ScalarType type, int64_t rows, int64_t inner, int64_t columns) {
  if (type != at::kFloat || !outruns_mkl() || !pointwise() || !binary()) return false;
  // The copies of the parts and the calls have to be repaid, on every thread.
  const int64_t threads = at::get_num_threads();
  const int64_t least_rows = std::max<int64_t>(128, 64 * threads);
  constexpr int64_t least_work_per_thread = int64_t{1} << 24;
  if (rows < least_rows || rows * inner * columns < least_work_per_thread * threads) return false;
  // If less than fp32 is allowed, PyTorch calls oneDNN itself.
  const auto precision = internals::float32_products(at::Float32Backend::MKLDNN);
  return at::globalContext().userEnabledMkldnn() && precision != at::Float32Precision::TF32 &&
         precision != at::Float32Precision::BF16;
}

std::vector<Tensor> parts_of(const Tensor& right) {
  const int64_t inner = right.size(1), count = ceil_div(inner, longest_sum);
  const int64_t length = ceil_div(ceil_div(inner, count), int64_t{16}) * 16;
  std::vector<Tensor> parts;
  for (int64_t k = 0; k < inner; k += length) {
    parts.push_back(dense(right.narrow(1, k, std::min(length, inner - k))));
  }
  return parts;
}

std::vector<Tensor> pack(std::vector<Tensor> parts, int64_t rows) {
  if (reorder()) {
    for (auto& part : parts) part = reorder()->call(part, rows);
  }
  return parts;
}

void product(const Tensor& left, const std::vector<Tensor>& parts, const OptionalTensor& bias,
             Finish finish) {
  const auto added = contiguous(bias);
  // Each block belongs to one thread, so that its result stays in the cache and no thread waits.
  constexpr int64_t block_elements = 3 << 18, least_block = 256;
  const int64_t most = std::max(least_block, block_elements / parts[0].size(0));
  const int64_t rows = left.size(0), threads = at::get_num_threads();
  const int64_t blocks = ceil_div(ceil_div(rows, most), threads) * threads;
  Blocks(rows, ceil_div(rows, blocks)).run([&](int64_t, int64_t first, int64_t count) {
    const auto some = left.narrow(0, first, count);
    Tensor result;
    int64_t k = 0;
    for (const auto& part : parts) {
      const auto columns = some.narrow(1, k, part.size(1));
      result = k == 0 ? pointwise()->call(columns, part, added, "none", NoScalars(), std::nullopt)
                      : binary()->call(columns, result, part, std::nullopt, "add");
      k += part.size(1);
    }
    finish(result, first);
  });
}

}  // namespace fused::cpu::onednn
