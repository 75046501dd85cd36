#pragma once

// What cuBLASLt does with a problem, on the CPU and in double: column-major throughout, straight
// from the library's documentation. The tests hold our mapping of torch's matrices against it.

#include "gemm/problem.h"

#include <cmath>
#include <vector>

namespace model {

using fused::gemm::Epilogue;
using fused::gemm::Operands;
using fused::gemm::Problem;

inline double gelu(double z) {
  return 0.5 * z * (1 + std::tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)));
}

inline double gelu_slope(double z) {
  const double h = 1e-6;
  return (gelu(z + h) - gelu(z - h)) / (2 * h);
}

inline void matmul(const Problem& p, const Operands& operands) {
  const auto* a = static_cast<const double*>(operands.a);
  const auto* b = static_cast<const double*>(operands.b);
  auto* d = static_cast<double*>(operands.d);
  auto* bias = static_cast<double*>(operands.bias);
  auto* aux = static_cast<double*>(operands.aux);
  auto* bits = static_cast<uint8_t*>(operands.aux);
  const auto at_a = [&](int64_t i, int64_t l) {
    return p.transpose_a ? a[l + i * p.lda] : a[i + l * p.lda];
  };
  const auto at_b = [&](int64_t l, int64_t j) {
    return p.transpose_b ? b[j + l * p.ldb] : b[l + j * p.ldb];
  };
  const auto byte = [&](int64_t i, int64_t j) -> uint8_t& {
    return bits[j * p.ld_aux / 8 + i / 8];
  };

  std::vector<double> bias_gradient(p.m);
  for (int64_t j = 0; j < p.n; ++j) {
    for (int64_t i = 0; i < p.m; ++i) {
      double z = 0;
      for (int64_t l = 0; l < p.k; ++l) z += at_a(i, l) * at_b(l, j);
      const auto bit = static_cast<uint8_t>(1u << (i & 7));
      switch (p.epilogue) {
        case Epilogue::bias:
          z += bias[i];
          break;
        case Epilogue::relu_bias:
          z = std::max(z + bias[i], 0.0);
          break;
        case Epilogue::relu_aux_bias:
          z += bias[i];
          byte(i, j) = z >= 0 ? byte(i, j) | bit : byte(i, j) & ~bit;
          z = std::max(z, 0.0);
          break;
        case Epilogue::gelu_aux_bias:
          z += bias[i];
          aux[i + j * p.ld_aux] = z;
          z = gelu(z);
          break;
        case Epilogue::drelu_bgrad:
          z = byte(i, j) & bit ? z : 0;
          break;
        case Epilogue::dgelu_bgrad:
          z *= gelu_slope(aux[i + j * p.ld_aux]);
          break;
        default:
          break;
      }
      bias_gradient[i] += z;
      d[i + j * p.ldd] = z;
    }
  }
  if (p.epilogue == Epilogue::drelu_bgrad || p.epilogue == Epilogue::dgelu_bgrad) {
    for (int64_t i = 0; i < p.m; ++i) bias[i] = bias_gradient[i];
  }
  if (p.epilogue == Epilogue::bgradb) {
    for (int64_t j = 0; j < p.n; ++j) {
      bias[j] = 0;
      for (int64_t l = 0; l < p.k; ++l) bias[j] += at_b(l, j);
    }
  }
}

}  // namespace model
