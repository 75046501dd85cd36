#include "cuda/runtime/cublaslt.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>

namespace fused::cuda {
namespace {

using gemm::Epilogue, gemm::Math, gemm::SplitK, gemm::Type;
using gemm::size_of, gemm::uses_aux, gemm::uses_bias;

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
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("fused: ") + call + " failed with " +
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

struct DestroyPreference {
  void operator()(cublasLtMatmulPreferenceOpaque_t* p) const { cublasLtMatmulPreferenceDestroy(p); }
};
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, DestroyPreference>;

template <typename T>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
        "cublasLtMatmulPreferenceSetAttribute");
}

template <typename T>
T config(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  T value{};
  size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof(value), &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

cublasLtMatmulAlgo_t as_algo(const Algorithm& algorithm) {
  return std::bit_cast<cublasLtMatmulAlgo_t>(algorithm.bytes);
}

Algorithm algorithm_of(const cublasLtMatmulHeuristicResult_t& result) {
  return {std::bit_cast<decltype(Algorithm::bytes)>(result.algo),
          static_cast<int64_t>(result.workspaceSize)};
}

// Algorithm 66 gives wrong results on Hopper and later GPUs if its split does not divide K:
// NVIDIA's bug 6580689, from CUDA 12.6 Update 2 until 13.4 Update 1.
bool is_known_wrong(const cublasLtMatmulAlgo_t& algo, const Problem& problem) {
  if (config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID) != 66) return false;
  const auto splits = config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
  return splits > 1 && problem.k % splits != 0;
}

// The heuristic offers two algorithms for odd extents in 16 bits that round the product before the
// epilogue. With a bias their error is too large.
bool rounds_twice(const cublasLtMatmulAlgo_t& algo) {
  const auto id = config<int32_t>(algo, CUBLASLT_ALGO_CONFIG_ID);
  return id == 23 || id == 24;
}

// Returns whether all rows begin at multiples of 16 bytes, which some of the library's kernels
// need.
bool is_aligned_for_all(const Problem& p) {
  const auto even = [&p](int64_t ld) { return ld * size_of(p.type) % 16 == 0; };
  return p.aligned_a && p.aligned_b && p.aligned_d && p.aligned_bias && p.aligned_aux &&
         even(p.lda) && even(p.ldb) && even(p.ldd);
}

}  // namespace

size_t lt_version() {
  static const size_t version = cublasLtGetVersion();
  return version;
}

cublasLtHandle_t new_lt_handle() {
  cublasLtHandle_t handle = nullptr;
  check(cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

Descriptors::Descriptors(const Problem& p)
    : has_bias(uses_bias(p.epilogue)), has_aux(uses_aux(p.epilogue)) {
  cublasLtMatmulDesc_t made = nullptr;
  check(cublasLtMatmulDescCreate(&made, compute_type(p), scale_type(p.type)),
        "cublasLtMatmulDescCreate");
  operation.reset(made);
  set(made, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(made, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(made, CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(p.epilogue));
  if (has_aux) set(made, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.ld_aux);
  a.reset(layout(p.type, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda));
  b.reset(layout(p.type, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb));
  d.reset(layout(result_type(p), p.m, p.n, p.ldd));
}

void Descriptors::set_pointers(const Operands& operands) {
  // A bias or aux pointer without an epilogue that uses it is an error to the library.
  if (has_bias) set(operation.get(), CUBLASLT_MATMUL_DESC_BIAS_POINTER, operands.bias);
  if (has_aux) set(operation.get(), CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, operands.aux);
}

std::vector<Algorithm> heuristic_algorithms(cublasLtHandle_t handle, const Problem& problem,
                                            Descriptors& descriptors, const Operands& operands,
                                            int most) {
  // The heuristic reads the alignment of bias and aux off the pointers themselves.
  descriptors.set_pointers(operands);

  cublasLtMatmulPreference_t made = nullptr;
  check(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  const Preference preference(made);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
      static_cast<size_t>(problem.workspace_limit));
  const auto set_alignment = [&](auto attribute, bool is_aligned, Type type) {
    set(preference, attribute, static_cast<uint32_t>(is_aligned ? 16 : size_of(type)));
  };
  const auto of_result = result_type(problem);
  set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, problem.aligned_a, problem.type);
  set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, problem.aligned_b, problem.type);
  set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, problem.aligned_d, of_result);
  set_alignment(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, problem.aligned_d, of_result);
  // Partial sums in 16 bits would save a little traffic and lose digits, and the user may have
  // forbidden them.
  const uint32_t reductions = problem.split_k == SplitK::forbidden ? CUBLASLT_REDUCTION_SCHEME_NONE
                              : size_of(problem.type) >= 4         ? CUBLASLT_REDUCTION_SCHEME_MASK
                                                           : CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);

  std::vector<cublasLtMatmulHeuristicResult_t> results(most);
  int returned = 0;
  const auto status = cublasLtMatmulAlgoGetHeuristic(
      handle, descriptors.operation.get(), descriptors.a.get(), descriptors.b.get(),
      descriptors.d.get(), descriptors.d.get(), preference.get(), most, results.data(), &returned);
  if (status != CUBLAS_STATUS_SUCCESS) return {};

  std::vector<Algorithm> found;
  for (int i = 0; i < returned; ++i) {
    const auto& result = results[i];
    if (result.state != CUBLAS_STATUS_SUCCESS || is_known_wrong(result.algo, problem)) continue;
    found.push_back(algorithm_of(result));
  }
  std::ranges::stable_partition(found,
                                [](const Algorithm& a) { return !rounds_twice(as_algo(a)); });
  return found;
}

std::optional<Algorithm> checked(cublasLtHandle_t handle, const Problem& problem,
                                 const Descriptors& descriptors, const Algorithm& algorithm) {
  const auto algo = as_algo(algorithm);
  cublasLtMatmulHeuristicResult_t result{};
  const auto status = cublasLtMatmulAlgoCheck(
      handle, descriptors.operation.get(), descriptors.a.get(), descriptors.b.get(),
      descriptors.d.get(), descriptors.d.get(), &algo, &result);
  if (status != CUBLAS_STATUS_SUCCESS || is_known_wrong(algo, problem) ||
      static_cast<int64_t>(result.workspaceSize) > problem.workspace_limit) {
    return std::nullopt;
  }
  return Algorithm{algorithm.bytes, static_cast<int64_t>(result.workspaceSize)};
}

std::vector<Algorithm> neighbours(cublasLtHandle_t handle, const Problem& problem,
                                  const Descriptors& descriptors, const Algorithm& algorithm,
                                  size_t most) {
  // The library's check of a configuration does not see alignments.
  if (!is_aligned_for_all(problem)) return {};
  const auto origin = as_algo(algorithm);
  size_t bytes = 0;
  const auto write_tiles = [&](uint32_t* to) {
    return cublasLtMatmulAlgoCapGetAttribute(&origin, CUBLASLT_ALGO_CAP_TILE_IDS, to, bytes,
                                             &bytes) == CUBLAS_STATUS_SUCCESS;
  };
  if (!write_tiles(nullptr)) return {};  // writes their number
  std::vector<uint32_t> tiles(bytes / sizeof(uint32_t));
  if (!write_tiles(tiles.data())) return {};
  // The library lists tiles by size. Those closest to the origin's come first here.
  const auto own = std::ranges::find(tiles, config<uint32_t>(origin, CUBLASLT_ALGO_CONFIG_TILE_ID));
  const int64_t middle = own - tiles.begin();
  std::vector<int64_t> order(tiles.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [middle](int64_t i) { return std::abs(i - middle); });
  // Hopper's cluster shapes. On other GPUs only the first is valid.
  constexpr uint16_t clusters[] = {CUBLASLT_CLUSTER_SHAPE_AUTO,  CUBLASLT_CLUSTER_SHAPE_1x1x1,
                                   CUBLASLT_CLUSTER_SHAPE_2x1x1, CUBLASLT_CLUSTER_SHAPE_1x2x1,
                                   CUBLASLT_CLUSTER_SHAPE_2x2x1, CUBLASLT_CLUSTER_SHAPE_4x1x1,
                                   CUBLASLT_CLUSTER_SHAPE_1x4x1};
  std::vector<Algorithm> found;
  for (const int64_t place : order) {
    const uint32_t tile = tiles[place];
    for (const uint16_t cluster : clusters) {
      auto algo = origin;
      if (cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
                                               sizeof(tile)) != CUBLAS_STATUS_SUCCESS ||
          cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID,
                                               &cluster,
                                               sizeof(cluster)) != CUBLAS_STATUS_SUCCESS) {
        continue;
      }
      if (found.size() == most) return found;
      const Algorithm variant{std::bit_cast<decltype(Algorithm::bytes)>(algo), 0};
      const auto valid = checked(handle, problem, descriptors, variant);
      if (valid && valid->bytes != algorithm.bytes) found.push_back(*valid);
    }
  }
  return found;
}

cublasStatus_t matmul(cublasLtHandle_t handle, const Problem& problem, Descriptors& descriptors,
                      const Algorithm& algorithm, const Operands& operands, void* workspace,
                      cudaStream_t stream) {
  descriptors.set_pointers(operands);
  const auto algo = as_algo(algorithm);
  const double alpha64 = 1, beta64 = problem.adds ? 1 : 0;
  const float alpha32 = 1, beta32 = problem.adds ? 1 : 0;
  const bool f64 = problem.type == Type::f64;
  // C is D also where it is not read, because a null C crashed before CUDA 13.0 Update 2.
  return cublasLtMatmul(handle, descriptors.operation.get(),
                        f64 ? static_cast<const void*>(&alpha64) : &alpha32,  // alpha
                        operands.a, descriptors.a.get(),                      //
                        operands.b, descriptors.b.get(),                      //
                        f64 ? static_cast<const void*>(&beta64) : &beta32,    // beta
                        operands.d, descriptors.d.get(),                      // C
                        operands.d, descriptors.d.get(),                      // D
                        &algo, workspace, static_cast<size_t>(algorithm.workspace), stream);
}

}  // namespace fused::cuda
