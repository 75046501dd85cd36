#include "cuda/invariant.h"

#include "core/explain.h"
#include "cuda/hopper/hopper.h"
#include "cuda/kernels/ordered_product.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "gemm/invariant.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

namespace fused::cuda::invariant {
namespace {

namespace rule = gemm::invariant;
using gemm::hopper::unit;

constexpr const char* named = "(batch_invariant)";

int64_t rounded_up(int64_t extent) { return (extent + unit - 1) / unit * unit; }

// Returns the matrix as memory holds it, with rows of unit stride.
Matrix as_stored(const Matrix& m) { return m.transposed ? gemm::transposed(m) : m; }

Tensor tensor_of(const Matrix& stored, const PassCall& call) {
  const auto& matmul = call.problem.matmul;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(matmul.device));
  return at::for_blob(stored.data, {stored.rows, stored.cols})
      .strides({stored.ld, 1})
      .target_device(device)
      .options(at::TensorOptions().dtype(scalar_type(matmul.type)).device(device))
      .make_tensor();
}

// Makes copies that the hardware can read 16 bytes at a time, and keeps them alive.
class Copies {
 public:
  explicit Copies(const PassCall& call) : call_(call) {}

  // Returns the matrix padded with zeros to whole units of columns, and of rows if asked for.
  Matrix whole(const Matrix& given, bool pads_rows, bool must_copy = false) {
    const auto stored = as_stored(given);
    const bool pads = given.transposed || pads_rows;
    const int64_t rows = pads ? rounded_up(stored.rows) : stored.rows,
                  cols = rounded_up(stored.cols);
    const bool fits = rows == stored.rows && cols == stored.cols && stored.ld % unit == 0;
    if (fits && !must_copy && gemm::is_aligned(stored.data)) return given;
    const auto from = tensor_of(stored, call_);
    kept_.push_back(at::zeros({rows, cols}, from.options()));
    auto& copy = kept_.back();
    copy.narrow(0, 0, stored.rows).narrow(1, 0, stored.cols).copy_(from);
    const Matrix made{rows, cols, cols, false, copy.data_ptr()};
    return given.transposed ? gemm::transposed(made) : made;
  }

  // Returns operand B, whose rows must have unit stride, padded to whole units.
  Matrix by_rows(const Matrix& given) {
    if (!given.transposed) return whole(given, /*pads_rows=*/false);
    kept_.push_back(tensor_of(as_stored(given), call_).t().contiguous());
    return whole({given.rows, given.cols, given.cols, false, kept_.back().data_ptr()}, false);
  }

  void* vector(void* data, int64_t elements) {
    if (data == nullptr || elements % unit == 0) return data;
    return whole({1, elements, elements, false, data}, /*pads_rows=*/false).data;
  }

 private:
  const PassCall& call_;
  std::vector<Tensor> kept_;
};

void run_hopper(const PassCall& call, PassProblem problem, const Operands& operands,
                const char* what) {
  const auto stream = at::cuda::getCurrentCUDAStream(problem.matmul.device);
  const Workspace workspace(hopper::workspace_bytes(problem));
  const auto processors = at::cuda::getDeviceProperties(problem.matmul.device)->multiProcessorCount;
  const gemm::Algorithm order{{rule::order_of_tiles(problem)}, 0};
  const auto tiles =
      rule::is_narrow(problem, processors) ? hopper::Tiles::narrow : hopper::Tiles::wide;
  TORCH_CHECK(hopper::run(problem, order, operands, workspace.data(), processors, stream, tiles),
              "fused: under the policy 'batch_invariant' expected our product for Hopper to run, "
              "got an error of CUDA for ",
              name(call.problem.pass), " ", problem.matmul);
  explain::append(what);
}

// Returns the call's problem with the sizes and strides of these matrices.
PassProblem problem_of(const PassCall& call, const Matrix& left, const Matrix& right,
                       const Matrix& result) {
  auto problem = call.problem;
  auto& matmul = problem.matmul;
  matmul.m = right.cols, matmul.n = result.rows, matmul.k = right.rows;
  matmul.transpose_a = right.transposed, matmul.transpose_b = false;
  matmul.lda = right.ld, matmul.ldb = left.ld, matmul.ldd = result.ld;
  return problem;
}

// Runs the whole pass as one product. Our own allocations are aligned, so results need no copy.
void run_whole(const PassCall& call, const Strategy& strategy) {
  Copies copies(call);
  auto operands = operands_of(call, strategy);
  const auto left = copies.by_rows(call.left);
  auto right = copies.whole(call.right, /*pads_rows=*/true);
  if (call.problem.pass == Pass::glu) {  // the kernel has one stride for both weights
    const auto given = gemm::right_of_up(call);
    auto up = copies.whole(given, /*pads_rows=*/true);
    if (right.data != call.right.data || up.data != given.data) {
      right = copies.whole(call.right, true, /*must_copy=*/true);
      up = copies.whole(given, true, /*must_copy=*/true);
    }
    operands.up.weight = up.data, operands.up.ld = up.ld;
  }
  operands.a = right.data, operands.b = left.data;
  auto problem = problem_of(call, left, right, call.result);
  if (!gemm::is_forward(call.problem.pass) && call.aux.data != nullptr) {
    const auto aux = copies.by_rows(call.aux);
    operands.aux = aux.data, problem.matmul.ld_aux = aux.ld;
  }
  run_hopper(call, problem, operands, "own Hopper kernel");
}

void run_ordered(const PassCall& call, const Matrix& result) {
  const auto &left = call.left, &right = call.right;
  kernels::OrderedProduct product;
  product.type = call.problem.matmul.type;
  product.rows = result.rows, product.cols = result.cols, product.inner = left.cols;
  product.left = left.data;
  product.left_row = left.transposed ? 1 : left.ld;
  product.left_inner = left.transposed ? left.ld : 1;
  product.right = right.data;
  product.right_inner = right.transposed ? 1 : right.ld;
  product.right_col = right.transposed ? right.ld : 1;
  product.result = result.data, product.ld_result = result.ld;
  if (gemm::is_forward(call.problem.pass)) product.bias = call.bias;
  explain::append("own ordered product");
  kernels::ordered_product(product, at::cuda::getCurrentCUDAStream(call.problem.matmul.device));
}

// Runs the product, with the bias in a forward. The strategy's steps come after it.
void run_product(const PassCall& call, const Matrix& result) {
  if (size_of(call.problem.matmul.type) > 2) return run_ordered(call, result);
  Copies copies(call);
  const auto left = copies.by_rows(call.left), right = copies.whole(call.right, /*pads_rows=*/true);
  const bool direct =
      right.cols == result.cols && result.ld % unit == 0 && gemm::is_aligned(result.data);
  auto into = result;
  Tensor apart;
  if (!direct) {
    apart = empty({result.rows, right.cols}, tensor_of(as_stored(call.right), call));
    into = {result.rows, right.cols, right.cols, false, apart.data_ptr()};
  }
  auto problem = problem_of(call, left, right, into);
  problem.pass = Pass::fprop, problem.activation = Activation::none;
  problem.keeps = Keeps::nothing;
  problem.bias = gemm::is_forward(call.problem.pass) && call.bias != nullptr;
  auto* bias = problem.bias ? copies.vector(call.bias, result.cols) : nullptr;
  run_hopper(call, problem, {right.data, left.data, into.data, bias}, "own Hopper kernel");
  if (!direct) tensor_of(result, call).copy_(apart.narrow(1, 0, result.cols));
}

}  // namespace

const char* objection(const Tensor& like) {
  PassProblem problem;
  problem.matmul.type = gemm_type(like.scalar_type());
  problem.matmul.device = like.get_device();
  const auto& device = device_of(problem.matmul.device);
  problem.matmul.arch = device.arch;
  return rule::objection(problem, device.has_hopper_products);
}

bool is_whole(const PassCall& call) {
  const auto hopper = available(call.problem).hopper;
  return rule::objection(call.problem, hopper) == nullptr &&
         rule::way(call.problem) == rule::Way::whole;
}

void run(const PassCall& given) {
  auto call = given;
  auto& problem = call.problem;
  // Under this policy a forward's mask holds the sign of the output, which no batch changes.
  if (problem.pass == Pass::fprop && problem.keeps == Keeps::mask) problem.keeps = Keeps::bits;
  const char* why = rule::objection(problem, available(problem).hopper);
  TORCH_CHECK_NOT_IMPLEMENTED(why == nullptr, "fused: under the policy 'batch_invariant' expected ",
                              "fp32, fp64, or a Hopper GPU and our products for it, got ", why,
                              ", for ", name(problem.pass), " ", problem.matmul);
  explain::append(named);
  const auto strategy = rule::strategy(problem);
  if (rule::way(problem) == rule::Way::whole) return run_whole(call, strategy);
  TORCH_INTERNAL_ASSERT(problem.pass != Pass::glu);
  run_product(call, matmul_result(call, strategy));
  Plan plan{&strategy, {}, {}, {}, {}, {}};
  const auto stream = at::cuda::getCurrentCUDAStream(problem.matmul.device);
  TORCH_INTERNAL_ASSERT(execute(call, plan, nullptr, stream));
}

}  // namespace fused::cuda::invariant
