// How far a convolution's results are off, against those in fp64, without a GPU.

#include "conv/cuda/problem.cpp"  // which a library without CUDA lacks
#include "tensors.h"

#include <ATen/ops/conv2d.h>

#include <vector>

namespace {

using namespace fused;
using namespace fused::conv;
using namespace fused::conv::cuda;
using plans::TrialErrors;

struct Case {
  std::vector<int64_t> image, weight;
  int64_t stride = 1, padding = 0, dilation = 1, groups = 1;
};

// Runs `test(problem, exact, convolution)` of a case in fp32, where the results are
// relu(convolution(image)).
template <typename Test>
void with(const Case& c, const Test& test) {
  const auto x = torch::randn(c.image), w = torch::randn(c.weight);
  const OptionalTensor bias(torch::randn({w.size(0)}));
  const conv::Geometry geometry({c.stride}, {c.padding}, {c.dilation}, c.groups);
  const ConvProblem problem(x, w, bias, geometry);
  const ExactConv exact(problem, x, w, bias, /*roundoff=*/0x1p-24);
  const auto z = [&](at::ScalarType type) {
    return at::conv2d(x.to(type), w.to(type), bias->to(type), c.stride, c.padding, c.dilation,
                      c.groups)
        .relu();
  };
  test(exact, z(at::kFloat), z(at::kDouble));
}

TrialErrors errors_of(const ExactConv& exact, const Tensor& result) {
  TrialErrors errors;
  exact.add_errors(errors, result);
  return errors;
}

const Case cases[] = {
    {{3, 4, 9, 7}, {6, 4, 3, 3}, 1, 1},         {{1, 6, 11, 8}, {4, 3, 5, 2}, 2, 3, 1, 2},
    {{2, 8, 10, 10}, {8, 1, 3, 3}, 1, 2, 2, 8}, {{4, 3, 5, 5}, {2, 3, 1, 1}, 3},
    {{3, 64, 300, 64}, {8, 64, 3, 3}, 2, 1},  // more rows than are looked at
};

TEST(right_results_have_small_errors) {
  for (const auto& c : cases) {
    with(c, [](const ExactConv& exact, const Tensor& result, const Tensor& wide) {
      const auto rounded = errors_of(exact, result), none = errors_of(exact, wide);
      EXPECT(rounded.missed == 0 && rounded.elements.count > 0 && rounded.elements.worst < 8);
      EXPECT(rounded.elements.worst > 0 && none.elements.worst < 1e-6 && none.missed == 0);
      EXPECT(none.elements.count == rounded.elements.count);
    });
  }
}

TEST(wrong_elements_are_found) {
  for (const auto& c : cases) {
    with(c, [](const ExactConv& exact, const Tensor& result, const Tensor& wide) {
      const int64_t last = result.size(0) - 1;
      for (const int64_t image : {int64_t{0}, last}) {
        auto wrong = result.clone();
        wrong[image][1][1][0] += 1;
        EXPECT(errors_of(exact, wrong).elements.worst > 1e3);
        wrong[image][1][1][0] = std::numeric_limits<float>::quiet_NaN();
        EXPECT(errors_of(exact, wrong).missed == 1);
      }
      const auto eager = errors_of(exact, result);
      const auto off = result.to(at::kDouble) - wide;
      EXPECT(plans::is_as_exact(errors_of(exact, wide + off), eager));
      EXPECT(eager.elements.count < 2048 ||
             !plans::is_as_exact(errors_of(exact, wide + 1.3 * off), eager));
    });
  }
}

// A window that lies in the padding holds no product.
TEST(empty_sums_have_no_error) {
  const auto x = torch::ones({1, 1, 2, 2}), w = torch::ones({1, 1, 1, 1});
  const conv::Geometry geometry({1}, {3}, {1}, 1);
  const OptionalTensor none;
  const ExactConv exact(ConvProblem(x, w, none, geometry), x, w, none, 0x1p-24);
  const auto right = at::conv2d(x, w, {}, 1, 3);
  const auto errors = errors_of(exact, right);
  EXPECT(errors.missed == 0 && errors.elements.count == 64 && errors.elements.worst == 0);
  EXPECT(errors_of(exact, right + 1).missed == 60);  // where nothing is summed, nothing may be
}

}  // namespace
