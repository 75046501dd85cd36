#include "gemm/cublaslt.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <sstream>

namespace fused::gemm {
namespace {

static_assert(static_cast<int>(Epilogue::relu_aux_bias) == CUBLASLT_EPILOGUE_RELU_AUX_BIAS);
static_assert(static_cast<int>(Epilogue::relu_aux) == CUBLASLT_EPILOGUE_RELU_AUX);
static_assert(static_cast<int>(Epilogue::relu_bias) == CUBLASLT_EPILOGUE_RELU_BIAS);
static_assert(static_cast<int>(Epilogue::relu) == CUBLASLT_EPILOGUE_RELU);
static_assert(static_cast<int>(Epilogue::gelu_aux_bias) == CUBLASLT_EPILOGUE_GELU_AUX_BIAS);
static_assert(static_cast<int>(Epilogue::gelu_aux) == CUBLASLT_EPILOGUE_GELU_AUX);
static_assert(static_cast<int>(Epilogue::gelu_bias) == CUBLASLT_EPILOGUE_GELU_BIAS);
static_assert(static_cast<int>(Epilogue::gelu) == CUBLASLT_EPILOGUE_GELU);
static_assert(static_cast<int>(Epilogue::drelu) == CUBLASLT_EPILOGUE_DRELU);
static_assert(static_cast<int>(Epilogue::drelu_bgrad) == CUBLASLT_EPILOGUE_DRELU_BGRAD);
static_assert(static_cast<int>(Epilogue::dgelu) == CUBLASLT_EPILOGUE_DGELU);
static_assert(static_cast<int>(Epilogue::dgelu_bgrad) == CUBLASLT_EPILOGUE_DGELU_BGRAD);
static_assert(static_cast<int>(Epilogue::bias) == CUBLASLT_EPILOGUE_BIAS);
static_assert(static_cast<int>(Epilogue::bgradb) == CUBLASLT_EPILOGUE_BGRADB);
static_assert(static_cast<int>(Epilogue::identity) == CUBLASLT_EPILOGUE_DEFAULT);

void check(cublasStatus_t status, const char* call) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "fused: ", call, " failed with ",
              cublasLtGetStatusName(status));
}

cudaDataType_t data_type(Type type) {
  constexpr cudaDataType_t types[] = {CUDA_R_64F, CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF};
  return types[static_cast<int>(type)];
}

cudaDataType_t scale_type(Type type) { return type == Type::f64 ? CUDA_R_64F : CUDA_R_32F; }

cublasComputeType_t compute_type(const Problem& problem) {
  if (problem.type == Type::f64) return CUBLAS_COMPUTE_64F;
  if (problem.math == Math::tf32) return CUBLAS_COMPUTE_32F_FAST_TF32;
  return CUBLAS_COMPUTE_32F;
}

cublasLtMatrixLayout_t layout(Type type, int64_t rows, int64_t cols, int64_t ld) {
  cublasLtMatrixLayout_t result = nullptr;
  check(cublasLtMatrixLayoutCreate(&result, data_type(type), rows, cols, ld),
        "cublasLtMatrixLayoutCreate");
  return result;
}

template <typename T>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, T value) {
  check(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
        "cublasLtMatmulDescSetAttribute");
}

struct Preference {
  Preference() { check(cublasLtMatmulPreferenceCreate(&value), "cublasLtMatmulPreferenceCreate"); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(value); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;

  template <typename T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T setting) {
    check(cublasLtMatmulPreferenceSetAttribute(value, attribute, &setting, sizeof(setting)),
          "cublasLtMatmulPreferenceSetAttribute");
  }

  cublasLtMatmulPreference_t value = nullptr;
};

template <typename T>
T config(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof(value), &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

// NVIDIA bug 6580689, from 12.6 Update 2 until fixed in 13.4 Update 1: algorithm 66 gives wrong
// results on Hopper and later where its split does not divide K.
bool known_wrong(const cublasLtMatmulAlgo_t& algo, const Problem& problem) {
  if (config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID) != 66) return false;
  const auto splits = config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return splits > 1 && problem.k % splits != 0;
}

// These two, offered for odd extents in 16 bits, apply the epilogue to an already rounded product:
// the sign near zero, and so the mask, can be wrong. They stay as a last resort.
bool rounds_twice(const cublasLtMatmulAlgo_t& algo) {
  const auto id = config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID);
  return id == 23 || id == 24;
}

}  // namespace

Descriptors::Descriptors(const Problem& p)
    : bias_(uses_bias(p.epilogue)), aux_(uses_aux(p.epilogue)) {
  cublasLtMatmulDesc_t operation = nullptr;
  check(cublasLtMatmulDescCreate(&operation, compute_type(p), scale_type(p.type)),
        "cublasLtMatmulDescCreate");
  operation_.reset(operation);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(p.epilogue));
  if (aux_) set(operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_aux);
  a_.reset(layout(p.type, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda));
  b_.reset(layout(p.type, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb));
  d_.reset(layout(p.type, p.m, p.n, p.ldd));
}

void Descriptors::set_pointers(const Operands& operands) {
  // A bias or aux pointer without an epilogue that uses it is an error to the library.
  if (bias_) set(operation_.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (aux_) set(operation_.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.aux);
}

std::vector<Algorithm> candidates(cublasLtHandle_t handle, const Problem& problem,
                                  Descriptors& descriptors, const Operands& operands, int most) {
  // The heuristic reads the alignment of bias and aux off the pointers themselves.
  descriptors.set_pointers(operands);

  Preference preference;
  preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                 static_cast<size_t>(problem.workspace_limit));
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{1} << problem.align_a);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{1} << problem.align_b);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{1} << problem.align_d);
  preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{1} << problem.align_d);
  // Partial sums stay in the accumulator's type: sums in 16 bits would save a little traffic and
  // lose digits, and the user may have forbidden them.
  const uint32_t reductions = problem.split_k == SplitK::forbidden ? CUBLASLT_REDUCTION_SCHEME_NONE
                              : size_of(problem.type) >= 4         ? CUBLASLT_REDUCTION_SCHEME_MASK
                                                           : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);

  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int returned = 0;
  const auto status = cublasLtMatmulAlgoGetHeuristic(
      handle, descriptors.operation(), descriptors.a(), descriptors.b(), descriptors.d(),
      descriptors.d(), preference.value, most, results.data(), &returned);
  if (status != CUBLAS_STATUS_SUCCESS) return {};

  std::vector<Algorithm> found;
  for (int i = 0; i < returned; ++i) {
    const auto& result = results[i];
    if (result.state != CUBLAS_STATUS_SUCCESS || known_wrong(result.algo, problem)) continue;
    found.push_back({result.algo, result.workspaceSize});
  }
  std::stable_partition(found.begin(), found.end(),
                        [](const Algorithm& a) { return !rounds_twice(a.algo); });
  return found;
}

cublasStatus_t run(cublasLtHandle_t handle, const Problem& problem, Descriptors& descriptors,
                   const Algorithm& algorithm, const Operands& operands, void* workspace,
                   cudaStream_t stream) {
  descriptors.set_pointers(operands);
  const double one64 = 1, zero64 = 0;
  const float one32 = 1, zero32 = 0;
  const bool f64 = problem.type == Type::f64;
  // C is passed as D (never read, beta being 0): a null C crashed before CUDA 13.0 Update 2.
  return cublasLtMatmul(handle, descriptors.operation(),
                        f64 ? static_cast<const void*>(&one64) : &one32,    // alpha
                        operands.a, descriptors.a(),                        //
                        operands.b, descriptors.b(),                        //
                        f64 ? static_cast<const void*>(&zero64) : &zero32,  // beta
                        operands.d, descriptors.d(),                        // C
                        operands.d, descriptors.d(),                        // D
                        &algorithm.algo, workspace, algorithm.workspace, stream);
}

}  // namespace fused::gemm
