#pragma once

#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <vector>

namespace fused::gemm {

struct PassCall {
  PassProblem problem;
  Matrix left, right;  // of the product, as meant
  Matrix result;       // rows of unit stride
  Matrix aux;          // forward: what is kept is written there; backward: what act' is read from
  void* bias;          // read forward, its gradient written backward; or nullptr
  Gating gating = {};
  Up up = {};
  bool bias_is_matrix = false;  // ATen adds it to the sum, as eager does one that is strided
  const std::vector<PassCall>* layers = nullptr;  // of a chain
};

constexpr Matrix transposed(const Matrix& m) {
  return {m.cols, m.rows, m.ld, !m.transposed, m.data};
}

// The bias gradient is the column sums of this; a weight gradient's left operand is dz, transposed.
constexpr Matrix summed(const PassCall& call) {
  return call.problem.pass == Pass::wgrad ? transposed(call.left) : call.result;
}

constexpr Matrix right_of_up(const PassCall& call) {
  auto right = call.right;
  right.data = const_cast<void*>(call.up.weight), right.ld = call.up.ld;
  return right;
}

// Makes the call of up's product, whose aux is its pre-activation.
constexpr PassCall of_up(PassCall call) {
  call.right = right_of_up(call);
  call.bias = const_cast<void*>(call.up.bias);
  call.aux.data = call.up.preactivation;
  return call;
}

// The product leaves its result where the activation does not overwrite a kept pre-activation.
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
