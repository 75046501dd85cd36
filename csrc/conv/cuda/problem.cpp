#include "conv/cuda/problem.h"

#include <algorithm>
#include <functional>
#include <thread>

namespace fused::conv::cuda {
namespace {

std::array<int64_t, 2> ints(const Geometry::Pair& pair) {
  return {pair[0].guard_int(__FILE__, __LINE__), pair[1].guard_int(__FILE__, __LINE__)};
}

Tensor some(const Tensor& images, int64_t rows) {
  const int64_t last = images.size(0) - 1;
  const auto ends =
      last < 2 ? images : at::cat({images.narrow(0, 0, 1), images.narrow(0, last, 1)});
  return ends.narrow(2, 0, rows);
}

}  // namespace

ConvProblem::ConvProblem(const Tensor& image_, const Tensor& weight_, const OptionalTensor& bias_,
                         const Geometry& g)
    : image(image_),
      weight(weight_),
      bias(bias_),
      stride(ints(g.stride)),
      padding(ints(g.padding)),
      dilation(ints(g.dilation)),
      groups(g.groups.guard_int(__FILE__, __LINE__)),
      geometry(g) {}

ConvKey ConvProblem::key() const {
  const auto& context = at::globalContext();
  const bool benchmark = context.benchmarkCuDNN();
  // With benchmark torch has cuDNN's kernels compete in each thread anew.
  const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  ConvKey key{image.get_device(),
              static_cast<int64_t>(image.scalar_type()),
              format_of(image, weight) == at::MemoryFormat::ChannelsLast,
              has_value(bias),
              context.userEnabledCuDNN(),
              context.deterministicCuDNN() || context.deterministicAlgorithms(),
              context.allowTF32CuDNN(at::Float32Op::CONV),
              benchmark ? static_cast<int64_t>(thread) : 0,
              groups};
  for (const auto values : {image.sizes(), weight.sizes(), at::IntArrayRef(stride),
                            at::IntArrayRef(padding), at::IntArrayRef(dilation)}) {
    key.append(values.begin(), values.end());
  }
  return key;
}

ExactConv::ExactConv(const ConvProblem& p, const Tensor& image, const Tensor& weight,
                     const OptionalTensor& bias, double roundoff)
    : rows_(p) {
  const auto wide = [](const Tensor& tensor) { return tensor.to(at::kDouble); };
  const auto x = wide(some(image, rows_.of_image)), w = wide(weight);
  const auto b = bias ? OptionalTensor(wide(*bias)) : std::nullopt;
  const auto product = [&](const Tensor& a, const Tensor& k, const OptionalTensor& c) {
    return at::_convolution(a, k, c, p.stride, p.padding, p.dilation, /*transposed=*/false,
                            /*output_padding=*/{0, 0}, p.groups, /*benchmark=*/false,
                            /*deterministic=*/true, /*cudnn_enabled=*/true,
                            /*allow_tf32=*/false)
        .narrow(2, 0, rows_.of_result);
  };
  values_ = product(x, w, b).relu();
  units_ = product(x.abs(), w.abs(), b ? OptionalTensor(b->abs()) : b) * roundoff;
}

void ExactConv::add_errors(plans::TrialErrors& errors, const Tensor& result) const {
  const auto off = some(result, rows_.of_result) - values_;
  const auto error = off.abs().div_(units_).masked_fill_(off.eq(0), 0);  // of an empty sum, too
  const auto finite = at::where(error.isfinite(), error, 0.);
  const auto count = error.isfinite().sum().item<double>();
  errors.missed += static_cast<double>(error.numel()) - count;
  auto& pool = errors.elements;
  pool.count += count;
  pool.squares += finite.square().sum().item<double>();
  pool.worst = std::max(pool.worst, finite.max().item<double>());
}

ExactConv::Rows::Rows(const ConvProblem& p) {
  constexpr int64_t most_elements = 1 << 19;
  const int64_t height = p.image.size(2), width = p.image.size(3);
  const int64_t channels = std::max(p.image.size(1), p.weight.size(0));
  const int64_t reach = p.dilation[0] * (p.weight.size(2) - 1) + 1;
  of_image = std::min(height, std::max(most_elements / (channels * width), reach));
  const int64_t below = of_image == height ? p.padding[0] : 0;
  of_result = (of_image + p.padding[0] + below - reach) / p.stride[0] + 1;
}

}  // namespace fused::conv::cuda
