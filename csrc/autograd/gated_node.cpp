// The node of fused::linear_glu and fused::gated_mlp. It keeps the input and the two
// pre-activations; what was made of them is computed again in the pass that the backward makes over
// memory anyway. With low memory up's pre-activation of a block is computed again by its product,
// and the layer after linear_glu keeps the pre-activations in place of its input.

#include "autograd/arguments.h"
#include "autograd/gated_backward.h"
#include "autograd/nodes.h"
#include "core/shapes.h"
#include "dispatch/gated.h"
#include "fused_linear.h"

namespace fused::autograd {
namespace {

using namespace gating;

class GatedNode final : public handover::Producer {
 public:
  GatedNode(edge_list&& edges, const Form& form, Memory memory)
      : Producer(std::move(edges)),
        form_(form),
        lends_(memory == Memory::low && !form.has_down && are_kept_as_they_are()) {}

  void keep(Indices index, const Tensor& tensor) {
    kept_[index] = SavedVariable(tensor, /*is_output=*/false);
  }
  void keep_weight(Indices index, const Tensor& weight) { kept_[index] = saved_weight(weight); }

  std::string name() const override {
    return std::string(form_.has_down ? "FusedGatedMlp_" : "FusedLinearGlu_") +
           fused::name(form_.activation) + "_Backward";
  }

  const char* refusal() const override {
    if (form_.has_down) return "no activation before";
    // What is passed on is gate's.
    return wanted_of_pass(form_, wanted_of(*this), false)[0] ? nullptr : "its gate is frozen";
  }

  variable_list lend_saved() override {
    auto gate = lend(gate_z_index);
    return gate.defined() ? variable_list{std::move(gate), lend(up_z_index)} : variable_list();
  }

  handover::Note derive(const Tensor& grad, variable_list saved, Tensor* output) override {
    const auto& gate_z = saved[0];
    OptionalTensor up_z;
    if (!form_.is_one_tensor()) up_z = saved[1];
    const auto wanted = wanted_of_pass(form_, wanted_of(*this), output != nullptr);
    auto [gate, up, gate_bias, up_bias, hidden] =
        steps::glu_backward({grad, gate_z, up_z, form_.activation, wanted});
    if (output != nullptr) *output = std::move(hidden);
    auto passed = form_.is_one_tensor() ? gated::halves(gate).first : gate;
    return {std::move(passed), {gate, up, gate_bias, up_bias}, std::move(saved)};
  }

  std::optional<KeptInput> lend_output() override {
    if (!lends_) return std::nullopt;
    auto gate = lend(gate_z_index);
    if (!gate.defined()) return std::nullopt;
    auto up = form_.is_one_tensor() ? Tensor() : lend(up_z_index);
    if (!form_.is_one_tensor() && !up.defined()) return std::nullopt;
    return KeptInput{{form_.activation, /*is_gated=*/true}, {std::move(gate), std::move(up)}};
  }

 protected:
  variable_list gradients(const Tensor& grad) override {
    auto [work, note] = begin(gate_z_index);
    return run({std::move(work), form_, std::move(note)}, grad);
  }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    return {static_cast<int64_t>(form_.activation),
            form_.has_up,
            form_.has_down,
            form_.is_joined,
            form_.is_up_dropped,
            form_.by_columns[0],
            form_.by_columns[1],
            form_.by_columns[2]};
  }
  Backward backward() const override {
    return [form = form_](Work work, const Tensor& grad) {
      return run({std::move(work), form}, grad);
    };
  }

 private:
  const Form form_;
  const bool lends_;
  std::array<SavedVariable, all_indices> kept_;
};

}  // namespace

Tensor gated_with_gradient(const gated::Layer& layer, const gated::Down& down,
                           Activation activation, Memory memory) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  const bool before_gate = requires_grad(input) || requires_grad(gate) || requires_grad(gate_bias);
  const bool before_up = requires_grad(input) || requires_grad(up) || requires_grad(up_bias);
  const bool before_down = before_gate || before_up;
  const bool wants_down = requires_grad(down.weight);
  const bool reads_up = before_down && (before_gate || wants_down);
  const bool drops_up = memory == Memory::low && down.exists() && !layer.is_stacked() && reads_up;

  Tensor gate_z, up_z, hidden, output;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    // Of two tensors one need not be kept, and a checkpoint may find weights that lie elsewhere.
    const bool may_join = before_gate && !drops_up && are_kept_as_they_are();
    std::tie(hidden, gate_z, up_z) =
        dispatch::gated_forward(layer, activation, before_down, may_join);
    output = down.exists() ? fused::linear(hidden, down.weight, down.bias) : hidden;
  }
  const bool is_joined = !layer.is_stacked() && !up_z.defined();
  const auto node = make_node<GatedNode>(
      edge_list{edge_of(input), edge_of(gate), edge_of(up), edge_of(gate_bias), edge_of(up_bias),
                edge_of(down.weight), edge_of(down.bias)},
      Form{activation,
           !layer.is_stacked(),
           down.exists(),
           is_joined,
           drops_up,
           {grad_lies_by_columns(gate), has_value(up) && grad_lies_by_columns(*up),
            down.exists() && grad_lies_by_columns(down.weight)}},
      memory);
  set_history(output, node);

  if (requires_grad(gate) || requires_grad(up) || drops_up) node->keep(input_index, input);
  if (requires_grad(input)) node->keep_weight(gate_index, gate);
  if (!layer.is_stacked() && (requires_grad(input) || drops_up)) node->keep_weight(up_index, *up);
  if (drops_up && has_value(up_bias)) node->keep_weight(up_bias_index, *up_bias);
  if (before_down) {
    if (down.exists()) node->keep_weight(down_index, down.weight);
    node->keep(gate_z_index, gate_z);
    if (up_z.defined() && reads_up && !drops_up) node->keep(up_z_index, up_z);
  } else if (wants_down) {
    node->keep(hidden_index, hidden);
  }
  announce(node);
  return output;
}

}  // namespace fused::autograd
