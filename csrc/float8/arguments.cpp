#include "float8/arguments.h"

#include "float8/check.h"

namespace fused::float8 {
namespace {

void check_tensor(const char* op, const std::string& what, const Tensor& tensor) {
  TORCH_CHECK_TYPE(tensor.defined(), op, ": expected ", what, " to be a tensor, got None");
  TORCH_CHECK_NOT_IMPLEMENTED(is_castable(tensor.scalar_type()), op, ": ", what,
                              " must have dtype BFloat16, Half or Float, got ",
                              tensor.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_nested() && tensor.layout() == at::kStrided, op, ": ",
                              what, " must be a strided tensor, got ", describe(tensor));
}

}  // namespace

void check_input(const char* op, const Tensor& input) {
  check_tensor(op, "input", input);
  TORCH_CHECK(input.dim() >= 1, op,
              ": input must have shape [*, in_features], got a 0-dimensional tensor");
}

void check_layer(const char* op, const std::string& what, const Tensor& input,
                 const c10::SymInt& features, const Tensor& weight, const OptionalTensor& bias) {
  check_tensor(op, what, weight);
  check_device(op, what.c_str(), weight, input);
  TORCH_CHECK(weight.dim() == 2 && weight.sym_size(1) == features, op, ": ", what,
              " must have shape [out_features, ", features, "], got ", weight.sym_sizes());
  if (!has_value(bias)) return;
  const auto name = "the bias of " + what;
  check_tensor(op, name, *bias);
  check_device(op, name.c_str(), *bias, input);
  TORCH_CHECK(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), op, ": ", name,
              " must have shape [", weight.sym_size(0), "], got ", bias->sym_sizes());
}

}  // namespace fused::float8
