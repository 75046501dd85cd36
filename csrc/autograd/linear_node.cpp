// The node of one layer. The activation is a value: one class serves them all.

#include "autograd/accumulation.h"
#include "autograd/double_backward.h"
#include "autograd/handover.h"
#include "autograd/nodes.h"
#include "core/aten_activation.h"
#include "core/policy.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

namespace fused::autograd {
namespace {

enum Edges { input_edge, weight_edge, bias_edge };
// What is kept; the last may come with a note.
enum Indices { input_index, input_up_index, weight_index, saved_index, all_indices };

// What does not change from call to call.
struct Form {
  Activation activation;
  bool of_ensemble;
  bool by_columns;  // the gradient of the weight
  KeptInput::Form input = {};

  bool is_input_kept() const { return input.activation == Activation::none; }
};

struct State : Work {
  Form form;
  std::optional<handover::Note> note = {};

  const Tensor& saved() const { return kept[saved_index]; }
  Tensor recomputed_input() const {
    return recompute({form.input, {kept[input_index], kept[input_up_index]}});
  }
  // Input and weight as arguments of a backward operator.
  std::pair<Tensor, Tensor> operands(const Tensor& input, const Tensor& grad) const {
    return fill_in(input, kept[weight_index], grad, form.by_columns);
  }
};

// ---- low memory ---------------------------------------------------------------------------------

// Of ReLU, whose output is kept as bits, but where its rows are so short that those of bits would
// be longer.
Pair relu_and_bits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto features = weight.sym_size(0);
  const bool pays = mask_bytes(features) < features * weight.element_size();
  if (pays && !is_traced(input)) return steps::linear_relu_bits(input, weight, bias);
  // In two, of which a graph's partitioner may keep either.
  const auto output = linear_relu(input, weight, bias);
  return {output, pays ? steps::relu_mask(output) : output};
}

// ---- the backward, with hand-over (handover.h) -------------------------------------------------

// What arrived at a node, with its own activation dealt with if the consumer has done so.
struct Arrived {
  Tensor grad;
  Activation still_to_apply;
  Tensor grad_bias;  // known already, or undefined
};

Arrived arrive(const State& state, const Tensor& grad) {
  if (!state.note) return {grad, state.form.activation, {}};
  return {grad, Activation::none, state.note->gradients[0]};
}

// The same with the layer's own activation dealt with, for a product that takes dz.
Arrived dealt_with(const State& state, Arrived arrived) {
  if (arrived.still_to_apply == Activation::none) return arrived;
  const bool wants_bias = state.wanted[bias_edge];
  auto [dz, grad_bias] =
      steps::activation_backward(arrived.grad, state.saved(), state.form.activation, wants_bias);
  return {std::move(dz), Activation::none, wants_bias ? std::move(grad_bias) : Tensor()};
}

// create_graph: gradients that are themselves differentiable.
Triple differentiable(const State& state, const Tensor& grad) {
  const auto activation = state.form.activation;
  auto kept_input = state.kept[input_index];
  if (!state.form.is_input_kept()) {
    kept_input = at_edge(state.recomputed_input(), state.edges[input_edge]);
  }
  const auto [input, weight] = state.operands(kept_input, grad);
  auto saved = state.saved();
  // ReLU's second derivative, of zeros, goes by way of the output, and so past its hooks.
  if (saved.defined() && saved.scalar_type() == at::kByte) {
    const auto output = state.node ? torch::autograd::Edge(state.node, 0) : torch::autograd::Edge();
    saved = at_edge(signs_of_mask(saved, grad, grad.sym_size(-1)), output);
  } else if (saved_for(activation) == Saved::preactivation) {
    saved = reconnect(saved, input, weight, state.edges);
  }
  const auto arrived = arrive(state, grad);
  return reference::LinearFormula::linear_backward(
      {arrived.grad, input, weight, saved, arrived.still_to_apply, mask_of(state.wanted)});
}

Triple usual(const State& state, const Tensor& grad) {
  const auto search =
      state.form.of_ensemble ? handover::Search{{}, "an ensemble"} : handover::find_receiver(state);
  const auto& receiver = search.receiver;
  using accumulation::target_of;
  const auto sum = target_of(state.node.get(), weight_edge);
  const auto bias_sum =
      state.form.of_ensemble ? std::nullopt : target_of(state.node.get(), bias_edge);
  const KernelsOnly guard;
  auto arrived = arrive(state, grad);
  if (sum) arrived = dealt_with(state, std::move(arrived));
  auto mask = mask_of(state.wanted);
  const bool bias_known = arrived.grad_bias.defined(), wants_weight = mask[weight_edge];
  const bool sums_rows = bias_sum && !bias_known && arrived.still_to_apply == Activation::none;
  mask[bias_edge] = mask[bias_edge] && !bias_known && !sums_rows;
  mask[weight_edge] = wants_weight && !sum;
  const OptionalTensor saved(state.saved());
  // A gated layer that takes over computes its output again on the way.
  const bool is_input_coming = !state.form.is_input_kept() && receiver &&
                               state.form.input.is_gated &&
                               arrived.still_to_apply == Activation::none;
  // Where the weight's gradient is not wanted only the shape is read.
  Tensor kept_input;
  if (state.form.is_input_kept()) {
    kept_input = state.kept[input_index];
  } else if (wants_weight && !is_input_coming) {
    kept_input = state.recomputed_input();
  }
  search.remark();
  const auto backward = [&](const Tensor& x, const std::array<bool, 3>& wanted) -> Triple {
    if (!wanted[0] && !wanted[1] && !wanted[2]) return {};
    const auto [input, weight] = state.operands(x, arrived.grad);
    return steps::linear_backward(
        {arrived.grad, input, weight, saved, arrived.still_to_apply, wanted});
  };
  Tensor grad_input, grad_weight, grad_bias;
  if (!receiver) {
    std::tie(grad_input, grad_weight, grad_bias) = backward(kept_input, mask);
  } else if (const auto [activation, wants_bias] = receiver->node->derivative();
             activation != Activation::none) {
    const auto [input, weight] = state.operands(kept_input, arrived.grad);
    Tensor receivers_bias;
    std::tie(grad_input, grad_weight, grad_bias, receivers_bias) = steps::linear_backward_across(
        {arrived.grad, input, weight, saved, arrived.still_to_apply, mask},
        {receiver->saved[0], activation, wants_bias});
    receiver->leave({grad_input, {wants_bias ? receivers_bias : Tensor()}, receiver->saved});
  } else {
    const bool in_two = is_input_coming && wants_weight;
    std::tie(grad_input, grad_weight, grad_bias) =
        backward(kept_input, in_two ? std::array{true, false, false} : mask);
    auto passed =
        receiver->node->derive(grad_input, receiver->saved, in_two ? &kept_input : nullptr);
    grad_input = passed.passed;
    receiver->leave(std::move(passed));
    if (in_two) {
      std::tie(std::ignore, grad_weight, grad_bias) =
          backward(kept_input, {false, mask[weight_edge], mask[bias_edge]});
    }
  }
  if (sum) grad_weight = sum->add(arrived.grad, kept_input);
  if (bias_known) grad_bias = arrived.grad_bias;
  if (bias_sum) grad_bias = bias_sum->add(sums_rows ? arrived.grad : grad_bias, {});
  return {grad_input, grad_weight, grad_bias};
}

variable_list run(const State& state, const Tensor& grad) {
  auto [input, weight, bias] =
      must_be_differentiable(grad, state.kept) ? differentiable(state, grad) : usual(state, grad);
  return by_edge(state.wanted, std::move(input), std::move(weight), std::move(bias));
}

// ---- the node ----------------------------------------------------------------------------------

class LinearNode final : public handover::Producer {
 public:
  LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             Activation activation, Memory memory)
      : Producer({edge_of(input), edge_of(weight), edge_of(bias)}),
        form_{activation, weight.dim() == 3, grad_lies_by_columns(weight)},
        lends_(memory == Memory::low && saved_for(activation) == Saved::preactivation &&
               are_kept_as_they_are()) {}

  // Saves what the backward needs, no more than torch keeps for the layer and its activation.
  void keep(const Tensor& input, const Tensor& weight, const Tensor& output, const Tensor& saved) {
    if (weight.requires_grad()) {
      const auto [form, tensors] = input_to_keep(input);
      form_.input = form;
      kept_[input_index] = form_.is_input_kept() ? saved_input(tensors[0])
                                                 : SavedVariable(tensors[0], /*is_output=*/false);
      if (tensors[1].defined()) kept_[input_up_index] = SavedVariable(tensors[1], false);
    }
    if (input.requires_grad()) {
      kept_[weight_index] = saved_weight(weight);
    } else if (form_.of_ensemble) {  // whose form the weight tells
      kept_[weight_index] = SavedVariable(placeholder(weight, weight.sym_sizes().vec()), false);
    }
    kept_[saved_index] = SavedVariable(saved, /*is_output=*/saved.is_same(output));
    remember_bits(saved_index, saved);
  }

  const char* refusal() const override {
    if (form_.of_ensemble) return "an ensemble";
    return form_.activation == Activation::none ? "no activation before" : nullptr;
  }

  variable_list lend_saved() override {
    auto saved = lend(saved_index);
    return saved.defined() ? variable_list{std::move(saved)} : variable_list();
  }

  std::pair<Activation, bool> derivative() const override {
    return {form_.activation, task_should_compute_output(bias_edge)};
  }

  handover::Note derive(const Tensor& grad, variable_list saved, Tensor* output) override {
    TORCH_INTERNAL_ASSERT(output == nullptr);
    const auto [activation, wants_bias] = derivative();
    auto [dz, grad_bias] = steps::activation_backward(grad, saved[0], activation, wants_bias);
    return {std::move(dz), {wants_bias ? grad_bias : Tensor()}, std::move(saved)};
  }

  std::optional<KeptInput> lend_output() override {
    if (!lends_) return std::nullopt;
    auto preactivation = lend(saved_index);
    if (!preactivation.defined()) return std::nullopt;
    return KeptInput{{form_.activation, /*is_gated=*/false}, {std::move(preactivation), {}}};
  }

  std::string name() const override {
    return std::string("FusedLinear_") + fused::name(form_.activation) + "_Backward";
  }

 protected:
  variable_list gradients(const Tensor& grad) override {
    auto [work, note] = begin(grad, saved_index);
    return run({std::move(work), form_, std::move(note)}, grad);
  }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    return {static_cast<int64_t>(form_.activation), static_cast<int64_t>(form_.input.activation),
            form_.input.is_gated, form_.by_columns};
  }
  Backward backward() const override {
    return [form = form_](Work work, const Tensor& grad) {
      return run({std::move(work), form}, grad);
    };
  }

 private:
  Form form_;
  const bool lends_;
  std::array<SavedVariable, all_indices> kept_;
};

}  // namespace

Pair forward_for_training(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, Memory memory) {
  if (weight.dim() == 3) {
    auto [output, saved] = dispatch::EnsembleLinear::call(input, weight, bias, name(activation));
    return {output, saved_for(activation) == Saved::output ? output : saved};
  }
  if (activation == Activation::none) return {fused::linear(input, weight, bias), Tensor()};
  const bool by_library = policy_for_graph(input) == Policy::cublaslt;
  if (activation == Activation::relu && !by_library) {
    if (memory == Memory::low) return relu_and_bits(input, weight, bias);
    // The output tells the gradient as well as the mask does, by torch's rule at zero, and the next
    // layer keeps it anyway.
    const auto output = linear_relu(input, weight, bias);
    return {output, output};
  }
  if (activation != Activation::relu) {
    // An epilogue applies it before the sum is rounded, which cannot be done again.
    if (memory == Memory::low) {
      const auto preactivation = fused::linear(input, weight, bias);
      return {activated(preactivation, activation, Time::first), preactivation};
    }
    // Rows padded for the epilogue would keep more than torch does.
    if (weight.sym_size(0) % 8 != 0 && !by_library) {
      const auto preactivation = fused::linear(input, weight, bias);
      return {activate(preactivation, activation), preactivation};
    }
  }
  return steps::linear_aux(input, weight, bias, activation);
}

Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation) {
  if (const char* approximate = approximate_of(activation)) {
    return linear_gelu(input, weight, bias, approximate);
  }
  Tensor output;
  dispatch::for_each_row<dispatch::LinearOperators>([&](auto row) {
    using Row = decltype(row);
    if constexpr (requires { Row::activation; }) {
      if (Row::activation == activation) output = Row::call(input, weight, bias, "default");
    }
  });
  return output.defined() ? output : fused::linear(input, weight, bias);
}

Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory) {
  const auto node = make_node<LinearNode>(input, weight, bias, activation, memory);
  Tensor output, saved;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, saved) = forward_for_training(input, weight, bias, activation, memory);
  }
  set_history(output, node);
  node->keep(input, weight, output, saved);
  announce(node);
  return output;
}

}  // namespace fused::autograd
