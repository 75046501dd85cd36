#pragma once

// The table of cuBLASLt's epilogues, for every pass.

#include "core/activation.h"

#include <cstdint>
#include <optional>

namespace fused::gemm {

// The values are those of cublasLtEpilogue_t, which cublaslt.cpp asserts. This header must compile
// without CUDA's.
enum class Epilogue : uint32_t {
  identity = 1,
  relu = 2,
  bias = 4,
  relu_bias = 6,
  relu_aux = 130,
  relu_aux_bias = 134,
  drelu = 136,
  drelu_bgrad = 152,
  gelu = 32,
  gelu_bias = 36,
  gelu_aux = 160,
  gelu_aux_bias = 164,
  dgelu = 192,
  dgelu_bgrad = 208,
  bgradb = 512,
};

enum class Pass {
  fprop,   // y = act(x Wᵀ + b)
  dgrad,   // dz W, then act' of the layer *before*; its bias gradient is this pass's "bias"
  wgrad,   // dzᵀ x; the column sums of dz are this pass's "bias"
  gating,  // dh = dy W where h = act(gate) ⊙ up, then the gradients of gate and up, and h again
  glu,     // h = act(x gateᵀ + b) ⊙ (x upᵀ + b)
  chain,   // fprop of several layers with the activation between them
};
inline constexpr Pass last_pass = Pass::chain;

inline constexpr bool is_forward(Pass pass) {
  return pass == Pass::fprop || pass == Pass::glu || pass == Pass::chain;
}

struct EpilogueRow {
  Pass pass;
  Activation activation;
  bool bias;  // reads the bias (forward) or writes its gradient (backward)
  bool aux;   // writes (forward) or reads (backward) what act' needs
  Epilogue epilogue;
  const char* name;
};

inline constexpr EpilogueRow epilogue_table[] = {
    {Pass::fprop, Activation::none, false, false, Epilogue::identity, "DEFAULT"},
    {Pass::fprop, Activation::none, true, false, Epilogue::bias, "BIAS"},
    {Pass::fprop, Activation::relu, false, false, Epilogue::relu, "RELU"},
    {Pass::fprop, Activation::relu, true, false, Epilogue::relu_bias, "RELU_BIAS"},
    {Pass::fprop, Activation::relu, false, true, Epilogue::relu_aux, "RELU_AUX"},
    {Pass::fprop, Activation::relu, true, true, Epilogue::relu_aux_bias, "RELU_AUX_BIAS"},
    {Pass::fprop, Activation::gelu_tanh, false, false, Epilogue::gelu, "GELU"},
    {Pass::fprop, Activation::gelu_tanh, true, false, Epilogue::gelu_bias, "GELU_BIAS"},
    {Pass::fprop, Activation::gelu_tanh, false, true, Epilogue::gelu_aux, "GELU_AUX"},
    {Pass::fprop, Activation::gelu_tanh, true, true, Epilogue::gelu_aux_bias, "GELU_AUX_BIAS"},
    {Pass::dgrad, Activation::none, false, false, Epilogue::identity, "DEFAULT"},
    {Pass::dgrad, Activation::relu, false, true, Epilogue::drelu, "DRELU"},
    {Pass::dgrad, Activation::relu, true, true, Epilogue::drelu_bgrad, "DRELU_BGRAD"},
    {Pass::dgrad, Activation::gelu_tanh, false, true, Epilogue::dgelu, "DGELU"},
    {Pass::dgrad, Activation::gelu_tanh, true, true, Epilogue::dgelu_bgrad, "DGELU_BGRAD"},
    {Pass::wgrad, Activation::none, false, false, Epilogue::identity, "DEFAULT"},
    // torch's weight is [out, in], so dz is operand B of the weight gradient: BGRADB, not BGRADA.
    {Pass::wgrad, Activation::none, true, false, Epilogue::bgradb, "BGRADB"},
};

// Returns nullopt if cuBLASLt has no such epilogue, as for GELU by erf.
inline constexpr std::optional<Epilogue> find_epilogue(Pass pass, Activation activation, bool bias,
                                                       bool aux) {
  for (const auto& row : epilogue_table) {
    if (row.pass == pass && row.activation == activation && row.bias == bias && row.aux == aux) {
      return row.epilogue;
    }
  }
  return std::nullopt;
}

inline constexpr const EpilogueRow& row_of(Epilogue epilogue) {
  for (const auto& row : epilogue_table) {
    if (row.epilogue == epilogue) return row;
  }
  return epilogue_table[0];  // is not reached: every epilogue has a row
}

inline constexpr const char* name(Epilogue epilogue) { return row_of(epilogue).name; }
inline constexpr bool uses_bias(Epilogue epilogue) { return row_of(epilogue).bias; }
inline constexpr bool uses_aux(Epilogue epilogue) { return row_of(epilogue).aux; }
inline constexpr bool is_backward_activation(Epilogue epilogue) {
  return row_of(epilogue).pass == Pass::dgrad && uses_aux(epilogue);
}
inline constexpr bool has_relu_mask(Epilogue epilogue) {
  return row_of(epilogue).activation == Activation::relu && uses_aux(epilogue);
}

}  // namespace fused::gemm
