#include "cuda/tune/trial_operands.h"
#include "cuda/hopper/hopper.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace fused::cuda::tune {
namespace {

using plans::TrialErrors;

int64_t stored_rows(const Matrix& m) { return m.transposed ? m.cols : m.rows; }
int64_t stored_cols(const Matrix& m) { return m.transposed ? m.rows : m.cols; }

// Limits the rows so that a run takes a fraction of a millisecond on a present GPU.
int64_t rows_enough(const PassCall& call) {
  const double operations = size_of(call.problem.matmul.type) == 2 ? 1e11 : 1e10;
  const double per_row = 2.0 * static_cast<double>(call.result.cols) *
                         static_cast<double>(std::max<int64_t>(call.left.cols, 1));
  return std::max<int64_t>(256, std::bit_floor(static_cast<uint64_t>(operations / per_row) + 1));
}

struct Count {
  int64_t tokens;
  bool needed;
};

// Returns the token counts at the bucket's ends that fit the problem's strides.
std::vector<Count> bucket_ends(const PassCall& call) {
  const bool inner = call.problem.pass == Pass::wgrad;
  const auto tokens = gemm::tokens_of(call.problem);
  auto high = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  const auto hold = [&high, tokens](const Matrix& m, bool along) {
    if (along && m.data != nullptr) high = std::min(high, std::max(m.ld, tokens));
  };
  hold(call.left, call.left.transposed != inner);
  if (inner) hold(call.right, call.right.transposed);
  const int64_t low = std::min(high, high / 2 + 1);
  if (low == high) return {{high, true}};
  const int64_t usual = high / 2 + std::clamp<int64_t>(high / 8, 1, 64);
  if (!inner || usual == low) return {{low, true}, {high, true}};
  return {{low, false}, {usual, true}, {high, true}};
}

// Returns a shorter stride with the matrix's alignment.
void shorten(Matrix& matrix) {
  constexpr int64_t unit = 256;
  const int64_t needed = (stored_cols(matrix) + unit - 1) / unit * unit + matrix.ld % unit;
  matrix.ld = std::min(matrix.ld, needed);
}

PassCall resized(const PassCall& call, int64_t tokens, int64_t most_rows) {
  PassCall own = call;
  auto& matmul = own.problem.matmul;
  if (call.problem.pass == Pass::wgrad) {
    own.left.cols = own.right.rows = matmul.k = tokens;
    matmul.n = std::min(call.result.rows, most_rows);
  } else {
    matmul.n = std::min(tokens, most_rows);
  }
  own.left.rows = own.result.rows = matmul.n;
  if (own.aux.data != nullptr) own.aux.rows = matmul.n;
  shorten(own.left);
  matmul.ldb = own.left.ld;
  return own;
}

uint64_t first_of(int64_t seed) { return (static_cast<uint64_t>(seed) + 1) << 40; }

int64_t bytes_of(const Matrix& m, int64_t element) { return stored_rows(m) * m.ld * element; }
int64_t bytes_of_result(const PassCall& call) {
  return bytes_of(call.result, size_of(gemm::result_type(call.problem.matmul)));
}

int64_t aux_bytes(const PassCall& call) {
  if (call.aux.data == nullptr) return 0;
  const auto& p = call.problem;
  const int64_t element = size_of(p.matmul.type);
  const int64_t row = p.keeps == Keeps::values ? std::max(call.aux.ld, p.matmul.ld_aux) * element
                                               : std::max(call.aux.ld, p.matmul.ld_aux / 8);
  return call.aux.rows * row;
}

}  // namespace

double sign_error(const gemm::Problem& matmul) {
  if (matmul.type == gemm::Type::f64) return 0x1p-46;
  return matmul.math == gemm::Math::tf32 ? 0x1p-8 : 0x1p-17;
}

// Hands out parts of a piece of memory. Without memory it only counts the bytes.
struct TrialOperands::Arena {
  char* memory = nullptr;
  int64_t bytes = 0;

  // No better aligned than at `offset` behind a multiple of 512.
  void* take(int64_t size, int64_t offset = 0) {
    const auto begin = bytes + offset;
    bytes += (size + offset + 511) / 512 * 512;
    return memory + begin;
  }
};

TrialOperands::TrialOperands(const PassCall& call) {
  const auto ends_of_bucket = bucket_ends(call);
  const auto enough = rows_enough(call);
  const auto largest = resized(call, ends_of_bucket.back().tokens, enough);
  const auto take_common = [&](Arena& arena) {
    exact_ = static_cast<Exact*>(
        arena.take(most_ends * most_seeds * most_samples * int64_t{sizeof(Exact)}));
    errors = static_cast<TrialErrors*>(arena.take(sizeof(TrialErrors)));
    const auto of_library = largest.problem.matmul.workspace_limit;
    workspace = arena.take(std::max(of_library, hopper::workspace_bytes(largest.problem)));
  };
  Arena counted;
  take_common(counted);
  place(largest, true, counted);
  memory_.emplace(counted.bytes);
  if (memory_->data() == nullptr) instead_.emplace(counted.bytes);
  char* const memory = instead_ ? static_cast<char*>(instead_->data()) : memory_->data();
  Arena common{memory};
  take_common(common);
  int64_t elements = 0;
  for (const auto& [tokens, needed] : ends_of_bucket) {
    const auto at_end = resized(call, tokens, enough);
    const auto& matmul = at_end.problem.matmul;
    if (!ends.empty() && matmul == ends.back().call.problem.matmul) break;
    Arena arena = common;
    ends.push_back(place(at_end, needed, arena));
    elements += std::min<int64_t>(at_end.result.rows * at_end.result.cols, most_samples);
  }
  seeds = std::clamp<int64_t>((most_samples + elements - 1) / elements, 1, most_seeds);
}

std::vector<TrialOperands::Read> TrialOperands::reads_of(const PassCall& call) {
  // The sums spread by about 1, where the activations curve.
  const double weights = 3 / std::sqrt(static_cast<double>(std::max<int64_t>(call.left.cols, 1)));
  const auto along = [&call](const void* data, int64_t rows, int64_t ld) {
    return Matrix{rows, call.result.cols, ld, false, const_cast<void*>(data)};
  };
  const auto vector = [&](const void* data) { return along(data, 1, call.result.cols); };
  std::vector<Read> all{{Operand::left, call.left, 1}, {Operand::right, call.right, weights}};
  if (gemm::is_forward(call.problem.pass)) {
    all.push_back({Operand::bias, vector(call.bias), 1});
    all.push_back({Operand::up_weight, right_of_up(call), weights});
    all.push_back({Operand::up_bias, vector(call.up.bias), 1});
  } else {
    const bool relu = call.problem.activation == Activation::relu;
    if (call.problem.keeps == Keeps::values) all.push_back({Operand::saved, call.aux, 3, relu});
    all.push_back({Operand::up, along(call.gating.up, call.result.rows, call.gating.ld_up), 3});
  }
  std::erase_if(all, [](const Read& read) { return read.matrix.data == nullptr; });
  return all;
}

void TrialOperands::prepare(const End& end, int64_t seed) const {
  const auto& call = end.call;
  const int64_t element = size_of(call.problem.matmul.type);
  const bool forward = gemm::is_forward(call.problem.pass);
  for (const auto& read : reads_of(call)) fill_again(read, seed);
  const auto spoil = [this](void* data, int64_t bytes) {
    if (data != nullptr) C10_CUDA_CHECK(cudaMemsetAsync(data, 0xff, bytes, stream));
  };
  renew_result(call, seed);
  if (forward) {
    spoil(call.aux.data, aux_bytes(call));
    spoil(call.up.preactivation, aux_bytes(call));
    return;
  }
  spoil(call.bias, std::max(call.result.rows, call.result.cols) * element);
  spoil(call.gating.grad_up, bytes_of(call.result, element));
  spoil(call.gating.hidden, call.result.rows * call.result.cols * element);
  if (call.problem.keeps != Keeps::mask) return;
  fill_bits(call.problem.matmul.type, call.aux, aux_bytes(call), end.eager.aux, first_of(seed),
            stream);
}

void TrialOperands::fill_again(const Read& read, int64_t seed) const {
  const auto type = ends.front().call.problem.matmul.type;
  fill(type, read.matrix.data, bytes_of(read.matrix, 1), read.amplitude, read.positive,
       first_of(seed) + (static_cast<uint64_t>(read.operand) << 36), stream);
}

void TrialOperands::renew_result(const PassCall& call, int64_t seed) const {
  const auto bytes = bytes_of_result(call);
  if (!call.problem.matmul.adds) {
    C10_CUDA_CHECK(cudaMemsetAsync(call.result.data, 0xff, bytes, stream));
    return;
  }
  const auto type = gemm::result_type(call.problem.matmul);
  fill(type, call.result.data, bytes / size_of(type), 1, /*positive=*/false,
       first_of(seed) + (uint64_t{15} << 36), stream);
}

Exact* TrialOperands::exact(size_t end, int64_t seed) const {
  return exact_ + (static_cast<int64_t>(end) * most_seeds + seed) * most_samples;
}

TrialOperands::End TrialOperands::place(PassCall call, bool needed, Arena& arena) {
  const auto& p = call.problem;
  const auto& matmul = p.matmul;
  const int64_t element = size_of(matmul.type), result_element = size_of(result_type(matmul));
  const auto take = [&](int64_t bytes, bool is_aligned = true) {
    return arena.take(bytes, is_aligned ? 16 : element);
  };
  const int64_t of_aux = aux_bytes(call), of_dense = bytes_of(call.result, element);
  const int64_t of_bias = std::max(call.result.rows, call.result.cols) * element;
  call.left.data = take(bytes_of(call.left, element), matmul.aligned_b);
  call.right.data = take(bytes_of(call.right, element), matmul.aligned_a);
  call.result.data = arena.take(bytes_of_result(call), matmul.aligned_d ? 16 : result_element);
  if (call.bias != nullptr) call.bias = take(of_bias, matmul.aligned_bias);
  void *dense = nullptr, *dense_of_up = nullptr;
  if (call.aux.data != nullptr) {
    call.aux.data = take(of_aux, matmul.aligned_aux);
    dense = take(of_dense);
  }
  if (auto& up = call.up; up.weight != nullptr) {
    up.weight = take(bytes_of(right_of_up(call), element), matmul.aligned_a);
    if (up.bias != nullptr) up.bias = take(of_bias, matmul.aligned_bias);
    if (up.preactivation != nullptr) {
      up.preactivation = take(of_aux, matmul.aligned_aux);
      dense_of_up = take(of_dense);
    }
  }
  if (auto& gating = call.gating; gating.up != nullptr) {
    const int64_t rows = call.result.rows * element;
    gating = {take(rows * gating.ld_up), gating.ld_up, take(rows * call.result.ld),
              take(rows * call.result.cols)};
  }

  PassCall eager = call;
  auto& q = eager.problem;
  q.library_only = false;
  if (p.pass == Pass::fprop && p.keeps == Keeps::mask) {
    eager.aux = {}, q.keeps = Keeps::nothing;
  } else if (!gemm::wants_bits(p) && dense != nullptr &&  // ReLU's bits are made of its output
             (p.keeps == Keeps::mask || gemm::is_forward(p.pass))) {
    eager.aux = {call.aux.rows, call.result.cols, call.result.cols, false, dense};
    eager.up.preactivation = dense_of_up;
    q.matmul.ld_aux = eager.aux.ld, q.keeps = Keeps::values;
  }
  return {call, eager, needed};
}

}  // namespace fused::cuda::tune
