// Gated layers by blocks of rows, so that a step finds the results of the one before in the cache.

#include "core/aten_activation.h"
#include "core/explain.h"
#include "core/shapes.h"
#include "cpu/blocks.h"
#include "cpu/one_pass.h"
#include "dispatch/gated_kernels.h"
#include "reference/linear.h"

#include <algorithm>

namespace fused::cpu {
namespace {

using reference::as_rows;
using S = Shapes<ConcreteAllocator>;

// A block never holds one row of several. A lone row's half is contiguous, so torch would give it
// to oneDNN, whose GELU rounds differently from ATen's and turns infinity into NaN.
Blocks blocks_of(const Tensor& all) {
  constexpr int64_t block_bytes = 1 << 17;  // about six blocks stay in a core's own cache
  const int64_t rows = all.size(0);
  const int64_t row_bytes = all.size(1) * static_cast<int64_t>(all.element_size());
  int64_t each = std::clamp<int64_t>(block_bytes / row_bytes, std::min<int64_t>(2, rows), rows);
  while (rows > 1 && rows % each == 1) ++each;
  return {rows, each};
}

// Each is [rows, features]; unwanted ones are undefined.
struct Rows {
  Tensor grad, gate, up, grad_gate, grad_up, hidden;
};

// Rounds in between as torch's own operators do.
void block_backward(const Rows& all, Activation activation, int64_t first, int64_t count) {
  const auto of = [&](const Tensor& rows) {
    return rows.defined() ? rows.narrow(0, first, count) : rows;
  };
  const auto grad = of(all.grad), gate = of(all.gate), up = of(all.up);
  if (all.hidden.defined() || all.grad_up.defined()) {
    const auto activated = activate(gate, activation);
    if (auto hidden = of(all.hidden); hidden.defined()) at::mul_out(hidden, activated, up);
    if (auto result = of(all.grad_up); result.defined()) at::mul_out(result, grad, activated);
  }
  if (auto result = of(all.grad_gate); result.defined()) {
    activation_gradient_out(result, grad * up, gate, activation);
  }
}

struct Glu : reference::Glu {
  using Reference = reference::Glu;

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
    const auto result = S::rows(gate, gate.size(-1) / (has_value(up) ? 1 : 2));
    if (result.numel() == 0) return result;
    const auto rows = as_rows(result);
    const auto [first_half, second_half] = parts(gate, up);
    explain::append("gating in blocks");
    blocks_of(rows).run([&](int64_t, int64_t first, int64_t count) {
      auto some = rows.narrow(0, first, count);
      activate_out(some, first_half.narrow(0, first, count), activation);
      some.mul_(second_half.narrow(0, first, count));
    });
    return result;
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    const auto& wanted = step.wanted;
    const bool apart = has_value(step.up);
    if (step.grad_output.numel() == 0) return Reference::glu_backward(step);
    // A gradient that is only summed is written as well.
    const auto grad_gate = S::grad_input(step.gate, wanted[0] || wanted[2]);
    const auto grad_up = S::grad_input(step.gate, apart && (wanted[1] || wanted[3]));
    const auto hidden = S::grad_input(step.grad_output, wanted[4]);

    const auto rows = rows_of(step, grad_gate, grad_up, hidden);
    const auto type = step.gate.element_size() == 2 ? at::kFloat : at::kDouble;
    const auto blocks = blocks_of(rows.grad);
    const auto partial = [&](const Tensor& summed, bool is_wanted) {
      return is_wanted ? at::empty({blocks.count, summed.size(-1)}, summed.options().dtype(type))
                       : Tensor();
    };
    const auto gate_sums = partial(grad_gate, wanted[2]),
               up_sums = partial(grad_up, apart && wanted[3]);
    const auto add_up = [](const Tensor& sums, const Tensor& values, int64_t block, int64_t first,
                           int64_t count) {
      if (!sums.defined()) return;
      auto sum = sums.select(0, block);
      at::sum_out(sum, as_rows(values).narrow(0, first, count), 0, /*keepdim=*/false,
                  sums.scalar_type());
    };
    explain::append("gating gradients in blocks");
    blocks.run([&](int64_t block, int64_t first, int64_t some_rows) {
      block_backward(rows, step.activation, first, some_rows);
      add_up(gate_sums, grad_gate, block, first, some_rows);
      add_up(up_sums, grad_up, block, first, some_rows);
    });
    return {wanted[0] ? grad_gate : S::unwanted(step.gate),
            wanted[1] ? grad_up : S::unwanted(step.gate), sum_of_parts(gate_sums, step.gate),
            sum_of_parts(up_sums, step.gate), hidden};
  }

 private:
  // Collects the rows that are read and written. A result of no elements is not wanted.
  static Rows rows_of(const steps::GluBackward& step, const Tensor& grad_gate,
                      const Tensor& grad_up, const Tensor& hidden) {
    const auto given = [](const Tensor& tensor) {
      return tensor.numel() > 0 ? as_rows(tensor) : Tensor();
    };
    Rows rows;
    rows.grad = as_rows(reference::dense(step.grad_output));
    std::tie(rows.gate, rows.up) = parts(step.gate, step.up);
    rows.hidden = given(hidden);
    if (has_value(step.up)) {
      rows.grad_gate = given(grad_gate), rows.grad_up = given(grad_up);
    } else if (grad_gate.numel() > 0) {
      std::tie(rows.grad_gate, rows.grad_up) = gated::halves(as_rows(grad_gate));
    }
    return rows;
  }

  static std::pair<Tensor, Tensor> parts(const Tensor& gate, const OptionalTensor& up) {
    const auto rows = as_rows(reference::dense(gate));
    return has_value(up) ? std::pair(rows, as_rows(reference::dense(*up))) : gated::halves(rows);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { dispatch::register_gated<Glu>(m); }

}  // namespace fused::cpu
