// A gated layer in FP8 and the layer after it. Weights that are two tensors have two scales, as two
// layers of torchao's have, and so do the gradients of their products; a stacked weight has one.

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

// Columns and scales of casts, and the pre-activations; undefined where no gradient is made of it.
enum Indices {
  input_index,
  inverse_input,
  gate_index,
  inverse_gate,
  up_index,
  inverse_up,
  hidden_index,
  inverse_hidden,
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
    return {static_cast<int64_t>(activation), is_stacked, static_cast<int64_t>(dtype)};
  }
};

// ---- the backward ------------------------------------------------------------------------------

class Backward {
 public:
  Backward(Work work, const Form& form) : work_(std::move(work)), form_(form) {}

  variable_list run(const Tensor& grad) {
    const auto grad_hidden = through_down(reference::as_rows(grad));
    if (!grad_hidden.defined()) return std::move(result_);
    const auto [gate_z, up_z] = preactivations();
    const auto [gate, up] =
        gating_backward(grad_hidden, gate_z, up_z, form_.activation, form_.is_stacked,
                        wants(gate_bias_edge) || wants(up_bias_edge));
    done_with(gate_z_index, all_indices);
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

  // Frees tensors unless the graph is run again.
  void done_with(Indices first, Indices last) {
    if (!work_.releases) return;
    for (size_t k = first; k < last; ++k) {
      work_.kept[k].reset();
      static_cast<Node&>(*work_.node).release(k);
    }
  }

  // -> the gradient of what goes into the layer `down`
  Tensor through_down(const Tensor& grad) {
    const auto dy = cast_gradient(grad, wants(down_bias_edge));
    if (wants(down_bias_edge)) result_[down_bias_edge] = dy.sum;
    if (wants(down_edge)) {
      result_[down_edge] =
          weight_gradient(dy.cast, columns_of(work_.kept, hidden_index), form_.dtype);
    }
    done_with(hidden_index, down_index);
    if (!goes_below()) return {};
    const auto down = columns_of(work_.kept, down_index);
    done_with(down_index, gate_z_index);
    return input_gradient(dy.cast, down, form_.dtype);
  }

  std::pair<Tensor, Tensor> preactivations() const {
    const auto& gate_z = work_.kept[gate_z_index];
    return form_.is_stacked ? gated::halves(gate_z) : std::pair(gate_z, work_.kept[up_z_index]);
  }

  // Puts the gradients of a weight and its bias. -> that of the input, with `add`
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

// Fills what the node keeps, if there is a node.
Tensor run(const Gated& block, Tensors* kept) {
  const auto dtype = block.input.scalar_type();
  const auto x = cast(reference::as_rows(block.input));
  const auto gate = cast(block.gate);
  auto gate_z = forward_product(x, gate, block.gate_bias, dtype), both = gate_z;
  Tensor up_z;
  Cast up;
  if (block.is_stacked()) {
    std::tie(gate_z, up_z) = gated::halves(both);
  } else {
    up = cast(*block.up);
    up_z = forward_product(x, up, block.up_bias, dtype);
  }
  const auto hidden = gating(gate_z, up_z, block.activation);
  const auto down = cast(block.down);
  const auto y = forward_product(hidden, down, block.down_bias, dtype);
  if (kept != nullptr) {
    const bool wants_input = requires_grad(block.input);
    const bool wants_weight = requires_grad(block.gate) || requires_grad(block.up);
    if (wants_weight) put(*kept, input_index, x);
    if (wants_input) put(*kept, gate_index, gate);
    if (wants_input && !block.is_stacked()) put(*kept, up_index, up);
    if (requires_grad(block.down)) put(*kept, hidden_index, hidden);
    if (wants_input || wants_weight || requires_grad(block.gate_bias) ||
        requires_grad(block.up_bias)) {
      put(*kept, down_index, down);
      (*kept)[gate_z_index] = both;
      if (!block.is_stacked()) (*kept)[up_z_index] = up_z;
    }
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
  torch::autograd::edge_list edges;
  for (const auto& tensor : tensors()) edges.push_back(autograd::edge_of(tensor));
  const auto node = autograd::make_node<BlockNode<Form>>(
      std::move(edges), Form{op, activation, is_stacked(), input.scalar_type()});
  autograd::set_history(output, node);
  node->keep({kept.begin(), kept.end()}, versions_of(*this, kept));
  autograd::announce(node);
  return output;
}

Tensor Gated::in_own_dtype() const {
  const auto own = [&](const auto& tensor) { return in_dtype(tensor, input.scalar_type()); };
  return fused::gated_mlp(input, own(gate), own(up), own(down), own(gate_bias), own(up_bias),
                          own(down_bias), fused::name(activation));
}

}  // namespace fused::float8
