// The steps on a CPU, by the reference, and without data.

#include "float8/kernels.h"
#include "core/shapes.h"

namespace fused::float8 {
namespace {

using A = SymbolicAllocator;
using S = Shapes<A>;

constexpr auto values = at::kFloat8_e4m3fn;
constexpr auto gradients = at::kFloat8_e5m2;

Triple cast_of(const Tensor& like, const c10::SymInt& features, at::ScalarType dtype) {
  const auto rows = like.sym_size(0);
  return {A::empty({rows, features}, like, dtype), A::empty({features, rows}, like, dtype),
          A::empty(c10::SymIntArrayRef(), like, at::kFloat)};
}

Quadruple cast_with_sum(const Tensor& like, const c10::SymInt& features, at::ScalarType dtype,
                        bool sum) {
  return std::tuple_cat(cast_of(like, features, dtype), std::tuple(S::vector(like, features, sum)));
}

struct Meta {
  static Quadruple cast(const Tensor& input, bool gradient, bool sum) {
    return cast_with_sum(input, input.sym_size(1), gradient ? gradients : values, sum);
  }
  static Triple activation(const Tensor& z, Activation) {
    return cast_of(z, z.sym_size(1), values);
  }
  static Quadruple activation_backward(const Tensor& grad, const Tensor&, Activation, bool sum) {
    return cast_with_sum(grad, grad.sym_size(1), gradients, sum);
  }
  static Triple gating(const Tensor& gate, const Tensor&, Activation) {
    return cast_of(gate, gate.sym_size(1), values);
  }
  static Octuple gating_backward(const Tensor&, const Tensor& gate, const Tensor&, Activation,
                                 bool together, bool sum) {
    const auto features = gate.sym_size(1);
    if (!together) {
      return std::tuple_cat(cast_with_sum(gate, features, gradients, sum),
                            cast_with_sum(gate, features, gradients, sum));
    }
    return std::tuple_cat(
        cast_with_sum(gate, 2 * features, gradients, sum),
        Quadruple(S::unwanted(gate), S::unwanted(gate), S::unwanted(gate), S::unwanted(gate)));
  }
  static Tensor product(const Tensor& a, const Tensor& b, const Tensor&, const Tensor&,
                        const OptionalTensor&, const OptionalTensor&, at::ScalarType dtype, bool) {
    return A::empty({a.sym_size(0), b.sym_size(0)}, a, dtype);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_steps<Reference>(m); }
TORCH_LIBRARY_IMPL(fused, Meta, m) { register_steps<Meta>(m); }

}  // namespace fused::float8
