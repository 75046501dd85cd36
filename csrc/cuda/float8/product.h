#pragma once

// A product of FP8 matrices by cuBLASLt, without torch.

#include "cuda/runtime/cublaslt.h"
#include "gemm/problem.h"

#include <cublasLt.h>

#include <cstdint>
#include <vector>

namespace fused::cuda::float8 {

// result[m, n] = a[m, k] · b[n, k]ᵀ · scales (+ bias) (+ add), all contiguous and aligned to 16
// bytes; not both of a and b are e5m2.
struct ProductShape {
  int device = 0;
  gemm::Type type = gemm::Type::bf16;  // of the result, bias and add
  bool a_is_e5m2 = false, b_is_e5m2 = false;
  bool has_bias = false, adds = false;
  bool fast = false;  // accumulation in the tensor cores alone, with fewer bits
  int64_t m = 0, n = 0, k = 0;
  int64_t workspace_limit = 0;

  bool operator==(const ProductShape&) const = default;
};

struct ProductOperands {
  const void *a = nullptr, *b = nullptr;
  const float *inverse_a = nullptr, *inverse_b = nullptr;  // on the device
  const void *bias = nullptr, *add = nullptr;
  void* result = nullptr;
};

// The library's view of a product, for one thread at a time, as every run sets the pointers again.
class Product {
 public:
  explicit Product(const ProductShape& shape);

  // Asks the heuristic, best guess first.
  std::vector<gemm::Algorithm> algorithms(cublasLtHandle_t handle, const ProductOperands& operands,
                                          int most);

  // Returns whether the library ran it.
  bool run(cublasLtHandle_t handle, const gemm::Algorithm& algorithm,
           const ProductOperands& operands, void* workspace, cudaStream_t stream);

 private:
  void set_pointers(const ProductOperands& operands);

  ProductShape shape_;
  std::unique_ptr<cublasLtMatmulDescOpaque_t, Descriptors::Destroy> operation_;
  Descriptors::Layout a_, b_, d_;
};

}  // namespace fused::cuda::float8
