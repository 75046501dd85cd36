#pragma once

#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <vector>

namespace fused::gemm {

struct PassCall {
  PassProblem problem;
  Matrix left, right;  // the product's operands
  Matrix result;       // rows of unit stride
  Matrix aux;          // the saved tensor: a forward writes it, a backward reads it
  void* bias;          // read in a forward, its gradient is written in a backward; or nullptr
  Gating gating = {};
  Up up = {};
  bool bias_is_matrix = false;  // ATen adds it to the product, as eager does with a strided bias
  const std::vector<PassCall>* layers = nullptr;  // a chain's
};

constexpr Matrix transposed(const Matrix& m) {
  return {m.cols, m.rows, m.ld, !m.transposed, m.data};
}

// Returns the matrix whose column sums are the bias gradient. In wgrad that is dz, the left operand
// transposed.
constexpr Matrix summed(const PassCall& call) {
  return call.problem.pass == Pass::wgrad ? transposed(call.left) : call.result;
}

constexpr Matrix right_of_up(const PassCall& call) {
  auto right = call.right;
  right.data = const_cast<void*>(call.up.weight), right.ld = call.up.ld;
  return right;
}

// Returns the call of up's product, whose aux is up's pre-activation.
constexpr PassCall of_up(PassCall call) {
  call.right = right_of_up(call);
  call.bias = const_cast<void*>(call.up.bias);
  call.aux.data = call.up.preactivation;
  return call;
}

// Returns the matrix that the product is written to: `aux` if the pre-activation is kept and a
// later kernel applies the activation.
inline const Matrix& matmul_result(const PassCall& call, const Strategy& strategy) {
  const auto& p = call.problem;
  const bool apart = !strategy.fuses_activation &&
                     (p.pass == Pass::glu || (p.pass == Pass::fprop && writes_aux(p)));
  return apart ? call.aux : call.result;
}

inline Operands operands_of(const PassCall& call, const Strategy& strategy) {
  return {call.right.data, call.left.data, matmul_result(call, strategy).data,
          call.bias,       call.aux.data,  call.gating,
          call.up};
}

}  // namespace fused::gemm
