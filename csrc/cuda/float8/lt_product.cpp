#include "cuda/float8/product.h"

#include <bit>
#include <stdexcept>
#include <string>

namespace fused::cuda::float8 {
namespace {

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("fused: ") + call + " failed with " +
                           cublasLtGetStatusName(status));
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
}

template <typename T>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute,
         T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t cols) {
  cublasLtMatrixLayout_t result = nullptr;
  check(cublasLtMatrixLayoutCreate(&result, type, rows, cols, rows), "cublasLtMatrixLayoutCreate");
  return result;
}

cudaDataType_t operand_type(bool is_e5m2) { return is_e5m2 ? CUDA_R_8F_E5M2 : CUDA_R_8F_E4M3; }

cudaDataType_t result_type(gemm::Type type) {
  return type == gemm::Type::bf16 ? CUDA_R_16BF : type == gemm::Type::f16 ? CUDA_R_16F : CUDA_R_32F;
}

struct DestroyPreference {
  void operator()(cublasLtMatmulPreferenceOpaque_t* p) const { cublasLtMatmulPreferenceDestroy(p); }
};

}  // namespace

// By columns, as the library reads, a row-major matrix is its transpose: it computes
// resultᵀ = b · aᵀ from the transpose of b, which is to be transposed, and that of a, which is not.
// FP8 products exist in this layout alone.
Product::Product(const ProductShape& shape) : shape_(shape) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "cublasLtMatmulDescCreate");
  operation_.reset(made);
  set(made, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
  set(made, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
  set(made, CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(shape.fast));
  if (shape.has_bias) {
    set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
    set(made, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, result_type(shape.type));
  }
  a_.reset(layout(operand_type(shape.b_is_e5m2), shape.k, shape.n));
  b_.reset(layout(operand_type(shape.a_is_e5m2), shape.k, shape.m));
  d_.reset(layout(result_type(shape.type), shape.n, shape.m));
}

void Product::set_pointers(const ProductOperands& operands) {
  auto* operation = operation_.get();
  set(operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, operands.inverse_b);
  set(operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, operands.inverse_a);
  if (shape_.has_bias) set(operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
}

std::vector<gemm::Algorithm> Product::algorithms(cublasLtHandle_t handle,
                                                 const ProductOperands& operands, int most) {
  set_pointers(operands);  // off which it reads the bias's alignment
  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, DestroyPreference> preference(made);
  set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<size_t>(shape_.workspace_limit));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(made, attribute, uint32_t{16});
  }
  // Partial sums in 16 bits would lose digits.
  set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int returned = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation_.get(), a_.get(), b_.get(), d_.get(),
                                     d_.get(), made, most, results.data(), &returned);
  std::vector<gemm::Algorithm> found;
  if (status != CUBLAS_STATUS_SUCCESS) return found;
  for (int i = 0; i < returned; ++i) {
    const auto& result = results[i];
    if (result.state != CUBLAS_STATUS_SUCCESS) continue;
    found.push_back({std::bit_cast<decltype(gemm::Algorithm::bytes)>(result.algo),
                     static_cast<int64_t>(result.workspaceSize)});
  }
  return found;
}

bool Product::run(cublasLtHandle_t handle, const gemm::Algorithm& algorithm,
                  const ProductOperands& operands, void* workspace, cudaStream_t stream) {
  set_pointers(operands);
  const auto algo = std::bit_cast<cublasLtMatmulAlgo_t>(algorithm.bytes);
  const float alpha = 1, beta = shape_.adds ? 1 : 0;
  // C is D where it is not read: a null C crashed before CUDA 13.0 Update 2.
  const void* c = shape_.adds ? operands.add : operands.result;
  return cublasLtMatmul(handle, operation_.get(), &alpha, operands.b, a_.get(), operands.a,
                        b_.get(), &beta, c, d_.get(), operands.result, d_.get(), &algo, workspace,
                        static_cast<size_t>(algorithm.workspace), stream) == CUBLAS_STATUS_SUCCESS;
}

}  // namespace fused::cuda::float8
