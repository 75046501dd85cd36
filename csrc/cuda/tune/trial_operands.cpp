#include "cuda/tune/trial_operands.h"

#include "cuda/hopper/hopper.h"
#include "cuda/runtime/gated_steps.h"

#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <bit>
#include <cmath>

namespace fused::cuda::tune {

using plans::TrialErrors;

namespace {

int64_t stored_rows(const Matrix& m) { return m.transposed ? m.cols : m.rows; }
int64_t stored_cols(const Matrix& m) { return m.transposed ? m.rows : m.cols; }

// As many rows of the result as take a fraction of a millisecond, on a GPU of today.
int64_t rows_enough(const PassCall& call) {
  const double operations = size_of(call.problem.matmul.type) == 2 ? 1e11 : 1e10;
  constexpr int64_t as_if = 64;  // for an element that is no sum
  const int64_t inner = call.right.data == nullptr ? as_if : call.left.cols;
  const double per_row = 2.0 * static_cast<double>(call.result.cols) *
                         static_cast<double>(std::max<int64_t>(inner, 1));
  return std::max<int64_t>(256, std::bit_floor(static_cast<uint64_t>(operations / per_row) + 1));
}

struct Count {
  int64_t tokens;
  bool needed;
};

// The token counts at the ends of the problem's bucket that its strides hold.
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

// A stride that the matrix's alignment is kept by, though fewer of its columns are used.
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

Matrix right_of_up(const PassCall& call) { return of_up(call).right; }

// Of a sum whose products are exact, as a part of the sum of their magnitudes; generously.
double sign_error(const gemm::Problem& matmul) {
  if (matmul.type == gemm::Type::f64) return 0x1p-46;
  return matmul.math == gemm::Math::tf32 ? 0x1p-8 : 0x1p-17;
}

// Of the random numbers of a seed.
uint64_t first_of(int64_t seed) { return (static_cast<uint64_t>(seed) + 1) << 40; }

int64_t bytes_of(const Matrix& m, int64_t element) { return stored_rows(m) * m.ld * element; }
int64_t bytes_of_result(const PassCall& call) {
  return bytes_of(call.result, size_of(gemm::result_type(call.problem.matmul)));
}

// Bytes of aux for rows of the result, and of its elements.
int64_t aux_bytes(const PassCall& call) {
  if (call.aux.data == nullptr) return 0;
  const auto& p = call.problem;
  const int64_t element = size_of(p.matmul.type);
  const int64_t row = p.mask ? std::max(call.aux.ld, p.matmul.ld_aux / 8)
                             : std::max(call.aux.ld, p.matmul.ld_aux) * element;
  return call.aux.rows * row;
}

}  // namespace

// ---- memory ------------------------------------------------------------------------------------

TrialOperands::Memory::Memory(int64_t bytes) : scratch(bytes) {
  if (scratch.data() == nullptr) instead.emplace(bytes);
}

char* TrialOperands::Memory::data() const {
  return scratch.data() ? scratch.data() : static_cast<char*>(instead->data());
}

TrialOperands::TrialOperands(const PassCall& call) : stream_(at::cuda::getCurrentCUDAStream()) {
  const auto ends_of_bucket = bucket_ends(call);
  const auto enough = rows_enough(call);
  places_ = lay_out(resized(call, ends_of_bucket.back().tokens, enough));
  memory_.emplace(places_.bytes);
  int64_t elements = 0;
  for (const auto& [tokens, needed] : ends_of_bucket) {
    auto own = resized(call, tokens, enough);
    if (!ends_.empty() && own.problem.matmul == ends_.back().call.problem.matmul) break;
    place(own);
    ends_.push_back({own, for_eager(own), needed});
    elements += std::min<int64_t>(own.result.rows * own.result.cols, most_samples);
  }
  seeds_ = std::clamp<int64_t>((most_samples + elements - 1) / elements, 1, most_seeds);
}

Exact* TrialOperands::exact(size_t end, int64_t seed) const {
  auto* values = reinterpret_cast<Exact*>(at(places_.exact));
  return values + (end * most_seeds + seed) * most_samples;
}

TrialErrors* TrialOperands::errors() const {
  return reinterpret_cast<TrialErrors*>(at(places_.errors));
}

void* TrialOperands::workspace() const { return at(places_.workspace); }

TrialOperands::Places TrialOperands::lay_out(const PassCall& call) {
  Places places;
  const int64_t element = size_of(call.problem.matmul.type);
  const auto take = [&places](int64_t bytes) {
    const auto begin = places.bytes;
    places.bytes += (bytes + 1023) / 512 * 512;  // and room for the operand's alignment
    return begin;
  };
  places.left = take(bytes_of(call.left, element));
  places.right = take(call.right.data ? bytes_of(call.right, element) : 0);
  places.result = take(bytes_of_result(call));
  places.aux = take(aux_bytes(call));
  // A mask's columns are bytes, the values that are made of it for eager are the result's.
  places.dense = take(call.aux.data ? call.result.rows * call.result.cols * element : 0);
  places.bias = take(std::max(call.result.rows, call.result.cols) * element);
  const auto of_gating = [&](int64_t ld) {
    return take(call.gating.up ? call.result.rows * ld * element : 0);
  };
  places.up = of_gating(call.gating.ld_up);
  places.grad_up = of_gating(call.result.ld);
  places.hidden = of_gating(call.result.cols);
  const bool has_up = call.up.weight != nullptr;
  places.up_weight = take(has_up ? bytes_of(right_of_up(call), element) : 0);
  places.up_bias = take(has_up && call.up.bias ? call.result.cols * element : 0);
  places.up_z = take(has_up ? aux_bytes(call) : 0);
  places.dense_up_z = take(has_up && call.aux.data ? bytes_of(call.result, element) : 0);
  places.exact = take(most_ends * most_seeds * most_samples * sizeof(Exact));
  places.errors = take(sizeof(TrialErrors));
  places.workspace =
      take(std::max(call.problem.matmul.workspace_limit, hopper::workspace_bytes(call.problem)));
  return places;
}

void TrialOperands::place(PassCall& call) const {
  const auto& matmul = call.problem.matmul;
  call.left.data = at(places_.left, matmul.align_b);
  if (call.right.data != nullptr) call.right.data = at(places_.right, matmul.align_a);
  call.result.data = at(places_.result, matmul.align_d);
  if (call.aux.data != nullptr) call.aux.data = at(places_.aux, matmul.align_aux);
  if (call.bias != nullptr) call.bias = at(places_.bias, matmul.align_bias);
  if (auto& up = call.up; up.weight != nullptr) {
    up.weight = at(places_.up_weight, matmul.align_a);
    if (up.bias != nullptr) up.bias = at(places_.up_bias, matmul.align_bias);
    if (up.preactivation != nullptr) up.preactivation = at(places_.up_z, matmul.align_aux);
  }
  if (call.gating.up == nullptr) return;
  call.gating = {at(places_.up), call.gating.ld_up, at(places_.grad_up), at(places_.hidden)};
}

PassCall TrialOperands::for_eager(const PassCall& call) const {
  PassCall own = call;
  auto& p = own.problem;
  p.literal = false;
  if (gemm::wants_bits(p)) return own;  // made of its output
  if (p.pass == Pass::fprop && p.mask) {
    own.aux = {};
    p.aux = false;
  } else if (own.aux.data != nullptr && (p.mask || gemm::is_forward(p.pass))) {
    own.aux = {call.aux.rows, call.result.cols, call.result.cols, false, at(places_.dense)};
    if (own.up.preactivation != nullptr) own.up.preactivation = at(places_.dense_up_z);
    p.matmul.ld_aux = own.aux.ld;
  }
  p.mask = false;
  return own;
}

// ---- values ------------------------------------------------------------------------------------

std::vector<TrialOperands::Read> TrialOperands::reads_of(const PassCall& call) {
  // Sums of a spread of about 1, where the activations curve.
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
    if (!call.problem.mask) all.push_back({Operand::saved, call.aux, 3, relu});
    all.push_back({Operand::up, along(call.gating.up, call.result.rows, call.gating.ld_up), 3});
  }
  std::erase_if(all, [](const Read& read) { return read.matrix.data == nullptr; });
  return all;
}

void TrialOperands::fill_again(const Read& read, int64_t seed) const {
  const auto type = ends_.front().call.problem.matmul.type;
  fill(type, read.matrix.data, bytes_of(read.matrix, 1), read.amplitude, read.positive,
       first_of(seed) + (static_cast<uint64_t>(read.operand) << 36), stream_);
}

void TrialOperands::renew_result(const PassCall& call, int64_t seed) const {
  const auto bytes = bytes_of_result(call);
  if (!call.adds) {
    C10_CUDA_CHECK(cudaMemsetAsync(call.result.data, 0xff, bytes, stream_));
    return;
  }
  const auto type = gemm::result_type(call.problem.matmul);
  fill(type, call.result.data, bytes / size_of(type), 1, /*positive=*/false,
       first_of(seed) + (uint64_t{15} << 36), stream_);
}

void TrialOperands::prepare(const End& end, int64_t seed) const {
  const auto& call = end.call;
  const int64_t element = size_of(call.problem.matmul.type);
  const bool forward = gemm::is_forward(call.problem.pass);
  for (const auto& read : reads_of(call)) fill_again(read, seed);
  // NaN everywhere: what is not written is not taken for the work of the one before.
  const auto spoil = [this](void* data, int64_t bytes) {
    if (data != nullptr) C10_CUDA_CHECK(cudaMemsetAsync(data, 0xff, bytes, stream_));
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
  if (call.aux.data == nullptr || !call.problem.mask) return;
  fill_bits(call.aux.data, aux_bytes(call), first_of(seed), stream_);
  spread_bits(call.problem.matmul.type, call.aux, end.eager.aux, stream_);
}

TrialData describe(const PassCall& call) {
  const auto& p = call.problem;
  TrialData data;
  data.type = p.matmul.type;
  data.adds = call.adds, data.is_wide = p.matmul.to_f32;
  data.left = call.left, data.right = call.right, data.result = call.result;
  data.forward = gemm::is_forward(p.pass), data.activation = p.activation;
  data.mask = p.mask;
  if (data.forward) {
    data.bias = call.bias;
    data.of_result = gemm::wants_bits(p);
    if (p.aux || data.of_result) data.aux = call.aux;
    if (call.up.weight != nullptr) data.right_of_up = right_of_up(call);
    data.up = call.up;
  } else {
    data.aux = call.aux;
    data.gating = call.gating;
    data.sums = call.bias;
    data.summed = summed(call);
    data.sums_results = p.pass != Pass::wgrad;
  }
  data.unit = Roundoff(data.type);
  data.sign_error = sign_error(p.matmul);
  return data;
}

}  // namespace fused::cuda::tune
