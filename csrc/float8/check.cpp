#include "float8/check.h"

namespace fused::float8 {

void check_matrix(const char* op, const char* what, const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(is_castable(tensor.scalar_type()), op, ": ", what,
                              " must have dtype BFloat16, Half or Float, got ",
                              tensor.scalar_type());
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.dim() == 2, op, ": ", what,
              " must be a strided matrix, got ", describe(tensor));
  TORCH_CHECK(tensor.sym_numel() != 0, op, ": ", what,
              " must not be empty, as its scale is made of its largest value, got ",
              tensor.sym_sizes());
}

void check_like(const char* op, const char* what, const Tensor& tensor, const Tensor& like) {
  TORCH_CHECK(tensor.layout() == at::kStrided && tensor.scalar_type() == like.scalar_type() &&
                  tensor.device() == like.device() && tensor.sym_sizes() == like.sym_sizes(),
              op, ": ", what, " must be ", describe(like), ", got ", describe(tensor));
}

void check_preactivation(const char* op, const Tensor& grad, const Tensor& z,
                         Activation activation) {
  TORCH_CHECK_VALUE(activation != Activation::none, op, ": expected an activation, got 'none'");
  const bool is_mask = activation == Activation::relu && z.scalar_type() == at::kByte;
  if (!is_mask) return check_like(op, "z", z, grad);
  check_saved(op, grad, z, activation);
}

void check_scale(const char* op, const OptionalTensor& scale, const Tensor& z) {
  if (!has_value(scale)) return;
  TORCH_CHECK_VALUE(z.scalar_type() != at::kByte, op,
                    ": scale must be None where z is a bit mask, which has lost the values");
  TORCH_CHECK(
      scale->dim() == 0 && scale->scalar_type() == at::kFloat && scale->device() == z.device(), op,
      ": scale must be Float [] on ", z.device(), ", got ", describe(*scale));
}

void check_product(const char* op, const Product& p) {
  const auto is_operand = [&](const Tensor& t) {
    return t.dim() == 2 && is_float8(t.scalar_type()) && t.is_contiguous();
  };
  const auto is_scale = [&](const Tensor& t) {
    return t.dim() == 0 && t.scalar_type() == at::kFloat && t.device() == p.a.device();
  };
  TORCH_CHECK(is_operand(p.a) && is_operand(p.b) && p.a.device() == p.b.device() &&
                  p.a.sym_size(1) == p.b.sym_size(1) &&
                  (p.a.scalar_type() != at::kFloat8_e5m2 || p.b.scalar_type() != at::kFloat8_e5m2),
              op, ": expected contiguous a [M, K] and b [N, K] in FP8, at most one of them e5m2, ",
              "got a ", describe(p.a), ", b ", describe(p.b));
  TORCH_CHECK(is_scale(p.inverse_a) && is_scale(p.inverse_b), op,
              ": the inverse scales must be Float [] on ", p.a.device(), ", got ",
              describe(p.inverse_a), " and ", describe(p.inverse_b));
  TORCH_CHECK_NOT_IMPLEMENTED(is_castable(p.dtype), op,
                              ": dtype must be BFloat16, Half or Float, got ", p.dtype);
  const auto is_result = [&](const Tensor& t) {
    return t.scalar_type() == p.dtype && t.device() == p.a.device() && t.is_contiguous();
  };
  if (has_value(p.bias)) {
    TORCH_CHECK(is_result(*p.bias) && p.bias->dim() == 1 && p.bias->sym_size(0) == p.b.sym_size(0),
                op, ": bias must be ", p.dtype, " [", p.b.sym_size(0), "], got ", describe(p.bias));
  }
  if (has_value(p.add)) {
    TORCH_CHECK(is_result(*p.add) && p.add->dim() == 2 && p.add->sym_size(0) == p.a.sym_size(0) &&
                    p.add->sym_size(1) == p.b.sym_size(0),
                op, ": add must be contiguous, ", p.dtype, " [", p.a.sym_size(0), ", ",
                p.b.sym_size(0), "], got ", describe(p.add));
  }
}

}  // namespace fused::float8
