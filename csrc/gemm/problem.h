#pragma once

// One matrix product, as the key of its algorithms. The key must hold all that an algorithm depends
// on, or an algorithm would run on a problem that it gets wrong.

#include "gemm/epilogue.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <ostream>

namespace fused::gemm {

enum class Type : uint8_t { f64, f32, f16, bf16 };

// The multiplication's precision. Sums are always in fp32, or fp64 for fp64.
enum class Math : uint8_t { full, tf32 };

enum class SplitK : uint8_t { allowed, forbidden };

inline constexpr int64_t size_of(Type type) {
  return type == Type::f64 ? 8 : type == Type::f32 ? 4 : 2;
}

inline constexpr const char* name(Type type) {
  constexpr const char* names[] = {"f64", "f32", "f16", "bf16"};
  return names[static_cast<int>(type)];
}

// A matrix in memory, where row r starts ld elements after row r-1. If `transposed`, memory holds
// the transpose.
struct Matrix {
  int64_t rows = 0;  // of the matrix, which memory holds transposed if `transposed`
  int64_t cols = 0;
  int64_t ld = 0;  // of the memory
  bool transposed = false;
  void* data = nullptr;
};

// The further operands of a product that is the gradient of h = act(gate) ⊙ up. Gate is the
// product's aux, and gate's gradient its result. Up's gradient has the same row stride as gate's; h
// is contiguous.
struct Gating {
  const void* up = nullptr;
  int64_t ld_up = 0;
  void *grad_up = nullptr, *hidden = nullptr;  // hidden: or nullptr
};

// The second product of h = act(x gateᵀ + b) ⊙ (x upᵀ + b). Its pre-activation has the row stride
// of gate's.
struct Up {
  const void* weight = nullptr;
  int64_t ld = 0;
  const void* bias = nullptr;
  void* preactivation = nullptr;  // or nullptr
};

struct Operands {
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  void* bias = nullptr;
  void* aux = nullptr;
  Gating gating = {};
  Up up = {};
};

// Returns whether the hardware can copy 16 bytes at once from this address, as most kernels do.
inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

struct Problem {
  int device = 0;
  int arch = 0;  // compute capability, 90 for 9.0
  Epilogue epilogue = Epilogue::identity;
  Type type = Type::f32;
  Math math = Math::full;
  SplitK split_k = SplitK::allowed;
  bool transpose_a = false;
  bool transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldd = 0, ld_aux = 0;
  // The result of is_aligned. Without it the address has the alignment of the type alone.
  bool aligned_a = true, aligned_b = true, aligned_d = true;
  bool aligned_bias = true, aligned_aux = true;
  int64_t workspace_limit = 0;
  bool to_f32 = false;  // the result is in fp32, whatever the operands are
  bool adds = false;    // adds to the values in the result

  bool operator==(const Problem&) const = default;
};

// cuBLASLt's description of an algorithm, valid for one version of the library and one
// architecture. For our own products, the place of a configuration in the table of gemm/hopper.h.
struct Algorithm {
  std::array<uint64_t, 8> bytes{};
  int64_t workspace = 0;

  bool operator==(const Algorithm&) const = default;
};

inline Type result_type(const Problem& p) { return p.to_f32 ? Type::f32 : p.type; }

struct Settings {
  int device = 0;
  int arch = 0;
  Math math = Math::full;
  SplitK split_k = SplitK::allowed;
  int64_t workspace_limit = 0;
};

// Describes left · right = result, row-major as in torch, as a problem of cuBLASLt, which is
// column-major. A row-major matrix read by columns is its transpose, so cuBLASLt computes
// resultᵀ = rightᵀ · leftᵀ. Hence right is operand A and left is B, m is the number of features (as
// of bias and aux), n the number of tokens, and an operand gets op T exactly if it is `transposed`.
inline Problem matmul_problem(const Matrix& left, const Matrix& right, const Matrix& result,
                              Epilogue epilogue, Type type, const void* bias, const void* aux,
                              int64_t ld_aux, const Settings& settings) {
  Problem problem;
  problem.device = settings.device;
  problem.arch = settings.arch;
  problem.epilogue = epilogue;
  problem.type = type;
  problem.math = type == Type::f32 ? settings.math : Math::full;
  problem.split_k = settings.split_k;
  problem.workspace_limit = settings.workspace_limit;
  problem.transpose_a = right.transposed;
  problem.transpose_b = left.transposed;
  problem.m = result.cols;
  problem.n = result.rows;
  problem.k = left.cols;
  problem.lda = right.ld;
  problem.ldb = left.ld;
  problem.ldd = result.ld;
  problem.aligned_a = is_aligned(right.data);
  problem.aligned_b = is_aligned(left.data);
  problem.aligned_d = is_aligned(result.data);
  if (uses_bias(epilogue)) problem.aligned_bias = is_aligned(bias);
  if (uses_aux(epilogue)) {
    problem.aligned_aux = is_aligned(aux);
    problem.ld_aux = ld_aux;
  }
  return problem;
}

// Says why cuBLASLt must not get this problem; nullptr if it may. library_version is
// cublasLtGetVersion().
inline const char* objection(const Problem& p, size_t library_version) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return "an extent is 0";
  // The library overruns the workspace: known since CUDA 12.4, with no fix announced.
  if (p.k == 1 && is_backward_activation(p.epilogue)) return "K is 1 behind a D* epilogue";
  // Before CUDA 13 the bias is wrong or missing with a single row or column; 13.0 measured right.
  if (library_version < 130000 && (p.m == 1 || p.n == 1)) return "one row or column";
  // Until CUDA 13.2 algorithm 66 gives wrong results for strides beyond 2 GiB.
  const int64_t widest = std::max({p.lda, p.ldb, p.ldd});
  if (widest > (int64_t{1} << 31) / size_of(p.type)) return "a leading dimension beyond 2 GiB";
  if (p.epilogue == Epilogue::bgradb && !p.transpose_b) return "BGRADB needs op(B) = T";
  if (uses_aux(p.epilogue)) {
    const int64_t multiple = has_relu_mask(p.epilogue) ? 128 : 8;
    if (p.ld_aux < p.m || p.ld_aux % multiple != 0) return "the aux rows are not padded";
    // Rows of 16 bytes need a base at 16 bytes, which the library does not check.
    if (!p.aligned_aux) return "the aux buffer is not aligned to 16 bytes";
  }
  return nullptr;
}

// A few long sums should be split among blocks. cuBLAS chooses that split faster and more exactly
// than cuBLASLt's algorithms without it.
inline bool is_long_and_thin(const Problem& p) { return p.k >= 64 * std::max(p.m, p.n); }

inline std::ostream& operator<<(std::ostream& out, const Problem& p) {
  out << name(p.epilogue) << ' ' << name(p.type) << (p.math == Math::tf32 ? "/tf32" : "");
  out << (p.to_f32 ? "->f32" : "") << (p.adds ? " added" : "") << " m=" << p.m << " n=" << p.n
      << " k=" << p.k << ' ' << (p.transpose_a ? 'T' : 'N') << (p.transpose_b ? 'T' : 'N')
      << " lda=" << p.lda << " ldb=" << p.ldb << " ldd=" << p.ldd;
  if (uses_aux(p.epilogue)) out << " ld_aux=" << p.ld_aux;
  out << " aligned=" << p.aligned_a << p.aligned_b << p.aligned_d << p.aligned_bias << p.aligned_aux
      << (p.split_k == SplitK::forbidden ? " no-split-k" : "")
      << " workspace<=" << p.workspace_limit << " arch=" << p.arch << " device=" << p.device;
  return out;
}

struct ProblemHash {
  size_t operator()(const Problem& p) const {
    uint64_t hash = 0;
    const auto mix = [&hash](uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 32;
    };
    mix(static_cast<uint64_t>(p.epilogue) << 32 | static_cast<uint64_t>(p.device) << 16 |
        static_cast<uint64_t>(p.type) << 8 | static_cast<uint64_t>(p.math) << 4 |
        static_cast<uint64_t>(p.split_k));
    uint64_t flags = 0;
    for (const bool flag : {p.transpose_a, p.transpose_b, p.aligned_a, p.aligned_b, p.aligned_d,
                            p.aligned_bias, p.aligned_aux, p.to_f32, p.adds}) {
      flags = flags << 1 | static_cast<uint64_t>(flag);
    }
    mix(flags);
    mix(p.m), mix(p.n), mix(p.k);
    mix(p.lda), mix(p.ldb), mix(p.ldd), mix(p.ld_aux);
    mix(static_cast<uint64_t>(p.workspace_limit) << 8 ^ static_cast<uint64_t>(p.arch));
    return hash;
  }
};

}  // namespace fused::gemm
