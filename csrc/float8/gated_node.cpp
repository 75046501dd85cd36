// A gated layer in FP8 and the layer after it. Two weights have two scales, like two layers of
// torchao's, and so have the gradients of their products. A stacked weight has one scale.

#include "core/explain.h"
#include "core/gated.h"
#include "float8/arguments.h"
#include "float8/blocks.h"
#include "float8/node.h"
#include "reference/linear.h"

#include <array>

namespace fused::float8 {
namespace {

enum Edges {
  input_edge,
  gate_edge,
  up_edge,
  down_edge,
  gate_bias_edge,
  up_bias_edge,
  down_bias_edge,
  all_edges
};

// The saved tensors: columns and scales of casts, and the pre-activations. Each is undefined if no
// gradient needs it.
enum Indices {
  input_index,
  inverse_input,
  gate_index,
  inverse_gate,
  up_index,
  inverse_up,
  hidden_index,  // undefined if the backward computes the columns again by the scale
  inverse_hidden,
  scale_hidden,
  down_index,
  inverse_down,
  gate_z_index,
  up_z_index,
  all_indices
};

using Tensors = std::array<Tensor, all_indices>;

void put(Tensors& kept, Indices columns, const Cast& cast) {
  kept[columns] = cast.columns;
  kept[columns + 1] = cast.inverse;
}

Cast columns_of(const variable_list& kept, Indices columns) {
  return {{}, kept[columns], kept[columns + 1]};
}

struct Form {
  const char* op;
  Activation activation;
  bool is_stacked;
  at::ScalarType dtype;

  variable_list backward(Work work, const Tensor& grad) const;
  std::vector<int64_t> traits() const {
    return {number(activation), is_stacked, static_cast<int64_t>(dtype)};
  }
};

// ---- the backward ------------------------------------------------------------------------------

class Backward {
 public:
  Backward(Work work, const Form& form) : work_(std::move(work)), form_(form) {}

  variable_list run(const Tensor& grad) {
    auto dy = cast_gradient(reference::as_rows(grad), wants(down_bias_edge), wants(down_edge));
    if (wants(down_bias_edge)) result_[down_bias_edge] = dy.sum;
    if (!goes_below()) {
      if (wants(down_edge)) put_down_gradient(dy.cast, hidden());
      return std::move(result_);
    }
    const auto [gate, up] = through_gating(std::move(dy.cast));
    auto grad_input = through(gate, gate_edge, gate_bias_edge, gate_index, {});
    if (!form_.is_stacked) {
      grad_input = through(up, up_edge, up_bias_edge, up_index, grad_input);
    }
    if (grad_input.defined()) result_[input_edge] = like_rows_of(grad, grad_input);
    return std::move(result_);
  }

 private:
  bool wants(Edges edge) const { return work_.wanted[edge]; }
  bool goes_below() const {
    return wants(input_edge) || wants(gate_edge) || wants(up_edge) || wants(gate_bias_edge) ||
           wants(up_bias_edge);
  }

  void done_with(Indices first, Indices last) {
    for (size_t k = first; k < last; ++k) work_.done_with(work_.kept[k], k);
  }

  // Returns the columns of down's input if no gradient goes further.
  Tensor hidden() const {
    if (work_.kept[hidden_index].defined()) return work_.kept[hidden_index];
    const auto [gate_z, up_z] = preactivations();
    return gating(gate_z, up_z, form_.activation, /*columns=*/true).cast.columns;
  }

  void put_down_gradient(const Cast& dy, const Tensor& columns) {
    const Cast input{{}, columns, work_.kept[inverse_hidden]};
    result_[down_edge] = weight_gradient(dy, input, form_.dtype);
  }

  // Returns the casts of the gradients of gate and up. The same step computes the columns of down's
  // input again.
  std::pair<GradientCast, GradientCast> through_gating(Cast dy) {
    const auto grad_hidden = input_gradient(dy, columns_of(work_.kept, down_index), form_.dtype);
    dy.rows.reset();
    done_with(down_index, gate_z_index);
    const auto [gate_z, up_z] = preactivations();
    const auto scale = wants(down_edge) ? OptionalTensor(work_.kept[scale_hidden]) : std::nullopt;
    auto [gate, up, columns] =
        gating_backward(grad_hidden, gate_z, up_z, form_.activation, form_.is_stacked,
                        wants(gate_bias_edge) || wants(up_bias_edge), scale);
    done_with(gate_z_index, all_indices);
    if (wants(down_edge)) put_down_gradient(dy, columns);
    return {std::move(gate), std::move(up)};
  }

  std::pair<Tensor, Tensor> preactivations() const {
    const auto& gate_z = work_.kept[gate_z_index];
    return form_.is_stacked ? gated::halves(gate_z) : std::pair(gate_z, work_.kept[up_z_index]);
  }

  // Computes the gradients of a weight and its bias. Returns the input's gradient plus `add`.
  Tensor through(const GradientCast& dz, Edges weight, Edges bias, Indices columns,
                 const Tensor& add) {
    if (wants(bias)) result_[bias] = dz.sum;
    if (wants(weight)) {
      result_[weight] = weight_gradient(dz.cast, columns_of(work_.kept, input_index), form_.dtype);
    }
    if (!wants(input_edge)) return {};
    const auto sum = add.defined() ? OptionalTensor(add) : std::nullopt;
    return input_gradient(dz.cast, columns_of(work_.kept, columns), form_.dtype, sum);
  }

  Work work_;
  const Form& form_;
  variable_list result_ = variable_list(all_edges);
};

variable_list Form::backward(Work work, const Tensor& grad) const {
  return Backward(std::move(work), *this).run(reference::dense(grad));
}

// ---- the forward -------------------------------------------------------------------------------

// Runs the forward, and fills the saved tensors if there is a node.
Tensor run(const Gated& block, Tensors* kept) {
  const auto dtype = block.input.scalar_type();
  const auto wants = [&](const auto& tensor) { return kept != nullptr && requires_grad(tensor); };
  const bool wants_input = wants(block.input), wants_down = wants(block.down);
  const bool wants_weight = wants(block.gate) || wants(block.up);
  // If a gradient goes below `down`, it needs z, and the columns of down's input follow from z,
  // too.
  const bool keeps_z =
      wants_input || wants_weight || wants(block.gate_bias) || wants(block.up_bias);

  const auto x = cast(reference::as_rows(block.input), wants_weight);
  const auto gate = cast(block.gate, wants_input);
  auto gate_z = forward_product(x, gate, block.gate_bias, dtype), both = gate_z;
  Tensor up_z;
  Cast up;
  if (block.is_stacked()) {
    std::tie(gate_z, up_z) = gated::halves(both);
  } else {
    up = cast(*block.up, wants_input);
    up_z = forward_product(x, up, block.up_bias, dtype);
  }
  const auto hidden = gating(gate_z, up_z, block.activation, wants_down && !keeps_z);
  const auto down = cast(block.down, keeps_z);
  const auto y = forward_product(hidden.cast, down, block.down_bias, dtype);
  if (wants_weight) put(*kept, input_index, x);
  if (wants_input) put(*kept, gate_index, gate);
  if (wants_input && !block.is_stacked()) put(*kept, up_index, up);
  if (wants_down) {
    (*kept)[inverse_hidden] = hidden.cast.inverse;
    (*kept)[keeps_z ? scale_hidden : hidden_index] = keeps_z ? hidden.scale : hidden.cast.columns;
  }
  if (keeps_z) {
    put(*kept, down_index, down);
    (*kept)[gate_z_index] = both;
    if (!block.is_stacked()) (*kept)[up_z_index] = up_z;
  }
  return like_rows_of(block.input, y);
}

Versions versions_of(const Gated& block, const Tensors& kept) {
  Versions versions;
  if (kept[input_index].defined()) versions.remember("input", block.input);
  if (kept[gate_index].defined()) versions.remember("gate", block.gate);
  if (kept[up_index].defined()) versions.remember("up", *block.up);
  if (kept[down_index].defined()) versions.remember("down", block.down);
  return versions;
}

}  // namespace

std::vector<OptionalTensor> Gated::tensors() const {
  return {input, gate, up, down, gate_bias, up_bias, down_bias};
}

std::vector<Tensor> Gated::weights() const {
  if (is_stacked()) return {gate, down};
  return {gate, *up, down};
}

void Gated::check() const {
  check_input(op, input);
  const gated::Layer layer{input, gate, up, gate_bias, up_bias};
  check_layer(op, "gate", input, input.sym_size(-1), gate, gate_bias);
  gated::check(op, layer);
  if (!is_stacked()) {
    check_layer(op, "up", input, input.sym_size(-1), *up, up_bias);
    TORCH_CHECK(up->sym_size(0) == gate.sym_size(0), op, ": up must have shape ", gate.sym_sizes(),
                " as gate, got ", up->sym_sizes());
  }
  check_layer(op, "down", input, gated::hidden_features(layer), down, down_bias);
}

Tensor Gated::forward() const { return run(*this, nullptr); }

Tensor Gated::with_gradient() const {
  Tensors kept;
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = run(*this, &kept);
  }
  record(output, tensors(), Form{op, activation, is_stacked(), input.scalar_type()},
         {kept.begin(), kept.end()}, versions_of(*this, kept));
  return output;
}

Tensor Gated::in_own_dtype() const {
  const auto own = [&](const auto& tensor) { return in_dtype(tensor, input.scalar_type()); };
  return fused::gated_mlp(input, own(gate), own(up), own(down), own(gate_bias), own(up_bias),
                          own(down_bias), fused::name(activation));
}

}  // namespace fused::float8
