// The steps on a CPU, by the reference, and without data.

#include "float8/kernels.h"
#include "core/shapes.h"

namespace fused::float8 {
namespace {

using A = SymbolicAllocator;
using S = Shapes<A>;

constexpr auto values = at::kFloat8_e4m3fn;
constexpr auto gradients = at::kFloat8_e5m2;

Tensor columns_of(const Tensor& like, const c10::SymInt& features, at::ScalarType dtype,
                  bool wanted = true) {
  if (!wanted) return A::empty({0}, like, dtype);
  return A::empty({features, like.sym_size(0)}, like, dtype);
}

Tensor scale_of(const Tensor& like) { return A::empty(c10::SymIntArrayRef(), like, at::kFloat); }

Triple cast_of(const Tensor& like, const c10::SymInt& features, at::ScalarType dtype,
               bool columns = true) {
  return {A::empty({like.sym_size(0), features}, like, dtype),
          columns_of(like, features, dtype, columns), scale_of(like)};
}

Quadruple cast_with_sum(const Tensor& like, const c10::SymInt& features, at::ScalarType dtype,
                        bool sum, bool columns = true) {
  return std::tuple_cat(cast_of(like, features, dtype, columns),
                        std::tuple(S::vector(like, features, sum)));
}

Quadruple hidden_cast(const Tensor& z, bool columns) {
  return std::tuple_cat(cast_of(z, z.sym_size(1), values, columns), std::tuple(scale_of(z)));
}

std::tuple<Tensor> hidden_columns(const Tensor& grad, const OptionalTensor& scale) {
  return {columns_of(grad, grad.sym_size(1), values, has_value(scale))};
}

struct Meta {
  static Quadruple cast(const Tensor& input, bool gradient, bool sum, bool columns) {
    return cast_with_sum(input, input.sym_size(1), gradient ? gradients : values, sum, columns);
  }
  static Quadruple activation(const Tensor& z, Activation, bool columns) {
    return hidden_cast(z, columns);
  }
  static Quintuple activation_backward(const Tensor& grad, const Tensor&, Activation, bool sum,
                                       const OptionalTensor& scale) {
    return std::tuple_cat(cast_with_sum(grad, grad.sym_size(1), gradients, sum),
                          hidden_columns(grad, scale));
  }
  static Quadruple gating(const Tensor& gate, const Tensor&, Activation, bool columns) {
    return hidden_cast(gate, columns);
  }
  static Nonuple gating_backward(const Tensor&, const Tensor& gate, const Tensor&, Activation,
                                 bool together, bool sum, const OptionalTensor& scale) {
    const auto features = gate.sym_size(1);
    const auto hidden = hidden_columns(gate, scale);
    if (!together) {
      return std::tuple_cat(cast_with_sum(gate, features, gradients, sum),
                            cast_with_sum(gate, features, gradients, sum), hidden);
    }
    return std::tuple_cat(
        cast_with_sum(gate, 2 * features, gradients, sum),
        Quadruple(S::unwanted(gate), S::unwanted(gate), S::unwanted(gate), S::unwanted(gate)),
        hidden);
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
