#include "cuda/tune/trial.h"

#include "core/aux_layout.h"
#include "core/explain.h"
#include "cuda/hopper/hopper.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/runtime/gated_steps.h"
#include "cuda/tune/algorithms.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace fused::cuda::tune {
namespace {

using gemm::Algorithm;
using plans::TrialErrors, plans::Verdict;

// ---- verdicts ----------------------------------------------------------------------------------

class Verdicts {
 public:
  std::optional<Verdict> find(const PassProblem& bucket, const Strategy& strategy,
                              const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    const auto it = known_.find({gemm::PassProblemHash()(bucket), &strategy, algorithm.bytes});
    const bool same = it != known_.end() && it->second.first == bucket;
    return same ? std::optional(it->second.second) : std::nullopt;
  }
  void add(const PassProblem& bucket, const Strategy& strategy, const Algorithm& algorithm,
           Verdict verdict) {
    const std::lock_guard lock(mutex_);
    constexpr size_t most = 1 << 16;
    if (known_.size() >= most) known_.clear();
    known_.insert_or_assign({gemm::PassProblemHash()(bucket), &strategy, algorithm.bytes},
                            std::pair(bucket, verdict));
  }

 private:
  using Key = std::tuple<size_t, const Strategy*, decltype(Algorithm::bytes)>;
  std::mutex mutex_;
  std::map<Key, std::pair<PassProblem, Verdict>> known_;
};

Verdicts& verdicts() {
  static auto* value = new Verdicts;  // outlives every thread
  return *value;
}

// ---- sizes -------------------------------------------------------------------------------------

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

// The token counts at the ends of the problem's bucket that its strides hold.
std::vector<int64_t> bucket_ends(const PassCall& call) {
  const bool inner = call.problem.pass == Pass::wgrad;
  const auto tokens = gemm::tokens_of(call.problem);
  auto high = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  const auto hold = [&high, tokens](const Matrix& m, bool along) {
    if (along && m.data != nullptr) high = std::min(high, std::max(m.ld, tokens));
  };
  hold(call.left, call.left.transposed != inner);
  if (inner) hold(call.right, call.right.transposed);
  const int64_t low = std::min(high, high / 2 + 1);
  return low == high ? std::vector{high} : std::vector{low, high};
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

}  // namespace

// ---- the data ----------------------------------------------------------------------------------

// Memory from the driver, or else from PyTorch's allocator, which may hold all that there is.
struct Memory {
  explicit Memory(int64_t bytes) : scratch(bytes) {
    if (scratch.data() == nullptr) instead.emplace(bytes);
  }
  char* data() const {
    return scratch.data() ? scratch.data() : static_cast<char*>(instead->data());
  }
  Scratch scratch;
  std::optional<Workspace> instead;
};

struct Trial::Data {
  static constexpr int64_t most_ends = 2, most_seeds = 16;

  struct Places {
    int64_t left, right, result, aux, dense, bias, up, grad_up, hidden, up_weight, up_bias, up_z,
        dense_up_z, exact, errors, workspace, bytes = 0;
  };

  // The problem at one end of its bucket.
  struct End {
    PassCall call;   // operands and results in the trial's memory
    PassCall eager;  // the same as ATen can do it: with a dense aux, and none that is a mask
  };

  explicit Data(const PassCall& call) : stream(at::cuda::getCurrentCUDAStream()) {
    const auto ends_of_bucket = bucket_ends(call);
    const auto enough = rows_enough(call);
    const auto largest = resized(call, ends_of_bucket.back(), enough);
    const auto places = lay_out(largest);
    memory.emplace(places.bytes);
    int64_t elements = 0;
    for (const auto tokens : ends_of_bucket) {
      auto own = resized(call, tokens, enough);
      if (!ends.empty() && own.problem.matmul == ends.back().call.problem.matmul) break;
      place(own, places);
      ends.push_back({own, for_eager(own, places)});
      elements += std::min<int64_t>(own.result.rows * own.result.cols, most_samples);
    }
    exact = reinterpret_cast<Exact*>(at(places.exact));
    exact_known.resize(ends.size() * most_seeds);
    errors = reinterpret_cast<TrialErrors*>(at(places.errors));
    workspace = at(places.workspace);
    seeds = std::clamp<int64_t>((most_samples + elements - 1) / elements, 1, most_seeds);
  }

  // Eager's errors, once; nothing where it does not run. A bias that is no dense vector, or another
  // number of tokens, may spare its product a rounding before the bias: the better way counts.
  const std::optional<TrialErrors>& reference() {
    if (!reference_known) {
      reference_known = true;
      reference_errors = errors_of_eager(/*bias_is_matrix=*/false);
      const auto& call = ends.front().call;
      if (gemm::is_forward(call.problem.pass) && call.bias != nullptr) {
        const auto other = errors_of_eager(/*bias_is_matrix=*/true);
        if (other &&
            (!reference_errors || other->elements.squares < reference_errors->elements.squares)) {
          reference_errors = other;
        }
      }
    }
    return reference_errors;
  }

  std::optional<TrialErrors> errors_of(const Strategy& strategy, const Algorithm& algorithm) {
    return errors_of(
        [&](const End& end) {
          auto plan = plan_for(end.call, strategy, algorithm);
          return plan && execute(end.call, *plan, workspace, stream);
        },
        &End::call, /*with_nan=*/true);
  }

 private:
  std::optional<TrialErrors> errors_of_eager(bool bias_is_matrix) {
    const auto& problem = ends.front().eager.problem;
    Plan plan{&gemm::eager_of(problem, available(problem)), {}, {}, {}, {}, {}};
    const auto run = [&](const End& end) {
      auto call = end.eager;
      call.bias_is_matrix = bias_is_matrix;
      return execute(call, plan, nullptr, stream);
    };
    return errors_of(run, &End::eager, /*with_nan=*/false);
  }

  // Errors at the ends where it runs, pooled over the seeds; nothing where it runs at neither.
  template <typename Run>
  std::optional<TrialErrors> errors_of(const Run& run, PassCall End::* which, bool with_nan) {
    C10_CUDA_CHECK(cudaMemsetAsync(errors, 0, sizeof(TrialErrors), stream));
    bool ran = false;
    for (size_t e = 0; e < ends.size(); ++e) {
      const auto& end = ends[e];
      for (int64_t seed = 0; seed < seeds; ++seed) {
        prepare(end, seed);
        const auto* known = exact_of(e, seed);
        if (!run(end)) break;
        ran = true;
        const auto data = describe(end.*which);
        add_errors(data, known, errors, stream);
        if (!with_nan || seed > 0) continue;
        prepare(end, seed);
        poison(end.call.problem.matmul.type, end.call.left, stream);
        if (run(end)) add_lost_nans(data, errors, stream);
      }
    }
    if (!ran) return std::nullopt;
    TrialErrors found;
    C10_CUDA_CHECK(cudaMemcpyAsync(&found, errors, sizeof(found), cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return found;
  }

  // Computed once, from operands that are there.
  const Exact* exact_of(size_t end, int64_t seed) {
    const size_t index = end * most_seeds + seed;
    auto* values = exact + index * most_samples;
    if (!exact_known[index]) exact_values(describe(ends[end].call), values, stream);
    exact_known[index] = true;
    return values;
  }

  static int64_t bytes_of(const Matrix& m, int64_t element) {
    return stored_rows(m) * m.ld * element;
  }

  // Bytes of aux for rows of the result, and of its elements.
  static int64_t aux_bytes(const PassCall& call) {
    if (call.aux.data == nullptr) return 0;
    const auto& p = call.problem;
    const int64_t element = size_of(p.matmul.type);
    const int64_t row = p.mask ? std::max(call.aux.ld, p.matmul.ld_aux / 8)
                               : std::max(call.aux.ld, p.matmul.ld_aux) * element;
    return call.aux.rows * row;
  }

  static Places lay_out(const PassCall& call) {
    Places places;
    const int64_t element = size_of(call.problem.matmul.type);
    const auto take = [&places](int64_t bytes) {
      const auto begin = places.bytes;
      places.bytes += (bytes + 1023) / 512 * 512;  // and room for the operand's alignment
      return begin;
    };
    places.left = take(bytes_of(call.left, element));
    places.right = take(call.right.data ? bytes_of(call.right, element) : 0);
    places.result = take(bytes_of(call.result, element));
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

  char* at(int64_t place) const { return memory->data() + place; }
  // No better aligned than the user's.
  void* at(int64_t place, uint8_t alignment) const {
    return at(place) + (alignment < 8 ? int64_t{1} << alignment : 0);
  }

  void place(PassCall& call, const Places& places) const {
    const auto& matmul = call.problem.matmul;
    call.left.data = at(places.left, matmul.align_b);
    if (call.right.data != nullptr) call.right.data = at(places.right, matmul.align_a);
    call.result.data = at(places.result, matmul.align_d);
    if (call.aux.data != nullptr) call.aux.data = at(places.aux, matmul.align_aux);
    if (call.bias != nullptr) call.bias = at(places.bias, matmul.align_bias);
    if (auto& up = call.up; up.weight != nullptr) {
      up.weight = at(places.up_weight, matmul.align_a);
      if (up.bias != nullptr) up.bias = at(places.up_bias, matmul.align_bias);
      if (up.preactivation != nullptr) up.preactivation = at(places.up_z, matmul.align_aux);
    }
    if (call.gating.up == nullptr) return;
    call.gating = {at(places.up), call.gating.ld_up, at(places.grad_up), at(places.hidden)};
  }

  PassCall for_eager(const PassCall& call, const Places& places) const {
    PassCall own = call;
    auto& p = own.problem;
    p.literal = false;
    if (p.pass == Pass::fprop && p.mask) {
      own.aux = {};
      p.aux = false;
    } else if (own.aux.data != nullptr && (p.mask || gemm::is_forward(p.pass))) {
      own.aux = {call.aux.rows, call.result.cols, call.result.cols, false, at(places.dense)};
      if (own.up.preactivation != nullptr) own.up.preactivation = at(places.dense_up_z);
      p.matmul.ld_aux = own.aux.ld;
    }
    p.mask = false;
    return own;
  }

  void prepare(const End& end, int64_t seed) const {
    const auto& call = end.call;
    const auto& p = call.problem;
    const auto type = p.matmul.type;
    const int64_t element = size_of(type);
    const auto begin = (static_cast<uint64_t>(seed) + 1) << 40;
    // Sums of a spread of about 1, where the activations curve.
    const double inner = static_cast<double>(std::max<int64_t>(call.left.cols, 1));
    const auto filled = [&](const Matrix& m, double amplitude, bool positive, uint64_t part) {
      fill(type, m.data, bytes_of(m, element) / element, amplitude, positive, begin + (part << 36),
           stream);
    };
    filled(call.left, 1, false, 0);
    if (call.right.data != nullptr) filled(call.right, 3 / std::sqrt(inner), false, 1);
    // NaN everywhere: what is not written is not taken for the work of the one before.
    C10_CUDA_CHECK(cudaMemsetAsync(call.result.data, 0xff, bytes_of(call.result, element), stream));
    if (gemm::is_forward(p.pass)) {
      const auto bias_filled = [&](const void* bias, uint64_t part) {
        if (bias == nullptr) return;
        fill(type, const_cast<void*>(bias), call.result.cols, 1, false, begin + (part << 36),
             stream);
      };
      for (auto* kept : {call.aux.data, call.up.preactivation}) {
        if (kept == nullptr) continue;
        C10_CUDA_CHECK(cudaMemsetAsync(kept, 0xff, aux_bytes(call), stream));
      }
      bias_filled(call.bias, 2), bias_filled(call.up.bias, 6);
      if (call.up.weight != nullptr) filled(right_of_up(call), 3 / std::sqrt(inner), false, 5);
      return;
    }
    if (call.bias != nullptr) {
      const auto bytes = std::max(call.result.rows, call.result.cols) * element;
      C10_CUDA_CHECK(cudaMemsetAsync(call.bias, 0xff, bytes, stream));
    }
    if (call.aux.data == nullptr) return;
    if (const auto& g = call.gating; g.up != nullptr) {
      const Matrix up{call.result.rows, call.result.cols, g.ld_up, false, const_cast<void*>(g.up)};
      filled(up, 3, false, 4);
      C10_CUDA_CHECK(cudaMemsetAsync(g.grad_up, 0xff, bytes_of(call.result, element), stream));
      C10_CUDA_CHECK(
          cudaMemsetAsync(g.hidden, 0xff, call.result.rows * call.result.cols * element, stream));
    }
    if (p.mask) {
      fill_bits(call.aux.data, aux_bytes(call), begin, stream);
      spread_bits(type, call.aux, end.eager.aux, stream);
    } else {
      filled(call.aux, 3, p.activation == Activation::relu, 3);
    }
  }

  static TrialData describe(const PassCall& call) {
    const auto& p = call.problem;
    TrialData data;
    data.type = p.matmul.type;
    data.left = call.left, data.right = call.right, data.result = call.result;
    data.forward = gemm::is_forward(p.pass), data.activation = p.activation;
    data.mask = p.mask;
    if (data.forward) {
      data.bias = call.bias;
      if (p.aux) data.aux = call.aux;
      if (call.up.weight != nullptr) data.right_of_up = right_of_up(call);
      data.up = call.up;
    } else {
      data.aux = call.aux;
      data.gating = call.gating;
      data.sums = call.bias;
      data.summed = summed(call);
      data.sums_results = p.pass != Pass::wgrad;
    }
    data.unit = unit_roundoff(data.type);
    data.sign_error = sign_error(p.matmul);
    return data;
  }

 public:
  c10::cuda::CUDAStream stream;
  std::optional<Memory> memory;
  std::vector<End> ends;
  Exact* exact = nullptr;
  TrialErrors* errors = nullptr;
  void* workspace = nullptr;
  int64_t seeds = 1;  // of operands, so that enough elements are seen

 private:
  std::vector<bool> exact_known;
  bool reference_known = false;
  std::optional<TrialErrors> reference_errors;
};

// ---- verdict -----------------------------------------------------------------------------------

namespace {

void log_refusal(const Strategy& strategy, const TrialErrors& errors, const TrialErrors& eager) {
  if (plans::verbosity() < 2) return;
  plans::log(std::string("  refused ") + strategy.name + ": " + plans::summary(errors, eager));
}

}  // namespace

Trial::Trial(const PassCall& call) : call_(call) {}
Trial::~Trial() = default;

Verdict Trial::judge(const Strategy& strategy, const Algorithm& algorithm) {
  auto bucket =
      gemm::bucket_of(call_.problem, machine_of(call_.problem.matmul.device).first_equal_device);
  if (const auto known = verdicts().find(bucket, strategy, algorithm)) return *known;
  const explain::Quiet nothing_shown;
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  try {
    if (!data_) data_ = std::make_unique<Data>(call_);
    const auto& reference = data_->reference();
    const auto errors = reference ? data_->errors_of(strategy, algorithm) : std::nullopt;
    if (!errors) return Verdict::failed;
    // In fp64 the exact results are no more exact than those that they judge.
    const bool f64 = call_.problem.matmul.type == gemm::Type::f64;
    const auto verdict =
        plans::is_as_exact(*errors, *reference, f64 ? 1 : 1e-6) ? Verdict::sound : Verdict::inexact;
    verdicts().add(bucket, strategy, algorithm, verdict);
    if (verdict == Verdict::inexact) log_refusal(strategy, *errors, *reference);
    return verdict;
  } catch (const c10::OutOfMemoryError&) {
    lacked_memory_ = true;
    return Verdict::failed;
  }
}

}  // namespace fused::cuda::tune
