#include "autograd/linear_node.h"

#include "autograd/accumulation.h"
#include "autograd/double_backward.h"
#include "core/aten_activation.h"
#include "core/explain.h"
#include "core/policy.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

namespace fused::autograd {
namespace {

using dispatch::Triple;
using reference::as_rows;
using Edge = LinearNode::Edge;

struct Gradients {
  Tensor input, weight, bias;
};

// What a backward works on.
struct State {
  LinearNode* node;  // none in compiled autograd
  bool is_running;   // the engine runs the node, which is not called by hand
  Activation activation;
  std::array<bool, 3> wanted;
  KeptInput input;
  Tensor weight, saved;  // undefined where not kept
  bool weight_by_columns;
  const edge_list& edges;
  torch::autograd::Edge output() const {
    return node != nullptr ? torch::autograd::Edge(node->getptr(), 0) : torch::autograd::Edge();
  }
  bool is_input_kept() const { return input.form.activation == Activation::none; }
};

// ---- low memory ---------------------------------------------------------------------------------

// Of ReLU, whose output is kept as bits, but where its rows are so short that those of bits would
// be longer.
std::tuple<Tensor, Tensor> relu_and_bits(const Tensor& input, const Tensor& weight,
                                         const OptionalTensor& bias) {
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

// `activation_gradient` is act' of this layer, in the way of the branch that asks.
template <typename ActivationGradient>
Arrived arrive(const State& state, const Tensor& grad, const std::optional<handover::Note>& note,
               const ActivationGradient& activation_gradient) {
  if (!note) return {grad, state.activation, {}};
  if (grad.is_same(note->passed)) return {grad, Activation::none, note->gradients[0]};
  // Another gradient was added to the one that had been dealt with (the tensor was a root of this
  // backward as well): the rest still has to pass through the derivative.
  const auto rest = activation_gradient(grad - note->passed);
  return {handover::with_rest(note->passed, rest), Activation::none, {}};
}

// The same with the layer's own activation dealt with, for a product that takes dz.
Arrived dealt_with(const State& state, Arrived arrived) {
  if (arrived.still_to_apply == Activation::none) return arrived;
  const bool wants_bias = state.wanted[Edge::bias_edge];
  auto [dz, grad_bias] =
      steps::activation_backward(arrived.grad, state.saved, state.activation, wants_bias);
  return {std::move(dz), Activation::none, wants_bias ? std::move(grad_bias) : Tensor()};
}

// create_graph: gradients that are themselves differentiable.
Gradients differentiable(const State& state, const Tensor& grad,
                         const std::optional<handover::Note>& note) {
  auto kept_input = state.input.tensors[0];
  if (!state.is_input_kept()) {
    kept_input = at_edge(recompute(state.input), state.edges[Edge::input_edge]);
  }
  const auto [input, weight] = fill_in(kept_input, state.weight, grad, state.weight_by_columns);
  auto saved = state.saved;
  // ReLU's second derivative, of zeros, goes by way of the output, and so past its hooks.
  if (saved.defined() && saved.scalar_type() == at::kByte) {
    saved = at_edge(signs_of_mask(saved, grad, grad.sym_size(-1)), state.output());
  } else if (saved_for(state.activation) == Saved::preactivation) {
    saved = reconnect(saved, input, weight, state.edges);
  }
  const auto arrived = arrive(state, grad, note, [&](const Tensor& others) {
    return reference::gradient_from_saved(others, saved, state.activation);
  });
  const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
      {arrived.grad, input, weight, saved, arrived.still_to_apply, state.wanted});
  return {grad_input, grad_weight, grad_bias};
}

Gradients usual(const State& state, const Tensor& grad, const std::optional<handover::Note>& note) {
  const bool of_ensemble = state.weight.defined() && state.weight.dim() == 3;
  const auto search = of_ensemble ? handover::Search{{}, "an ensemble"}
                                  : handover::find_receiver(state.node, state.is_running,
                                                            state.wanted[Edge::input_edge]);
  const auto& receiver = search.receiver;
  const auto sum = accumulation::target_of(state.node, Edge::weight_edge);
  const KernelsOnly guard;
  auto arrived = arrive(state, grad, note, [&](const Tensor& others) {
    return std::get<0>(steps::activation_backward(others, state.saved, state.activation,
                                                  /*bias_grad=*/false));
  });
  if (sum) arrived = dealt_with(state, std::move(arrived));
  auto mask = state.wanted;
  const bool bias_known = arrived.grad_bias.defined(), wants_weight = mask[Edge::weight_edge];
  mask[Edge::bias_edge] = mask[Edge::bias_edge] && !bias_known;
  mask[Edge::weight_edge] = wants_weight && !sum;
  const OptionalTensor saved(state.saved);
  // A gated layer that takes over computes its output again on the way.
  const bool is_input_coming = !state.is_input_kept() && receiver && state.input.form.is_gated &&
                               arrived.still_to_apply == Activation::none;
  // Where the weight's gradient is not wanted only the shape is read.
  Tensor kept_input;
  if (state.is_input_kept()) {
    kept_input = state.input.tensors[0];
  } else if (wants_weight && !is_input_coming) {
    kept_input = recompute(state.input);
  }
  search.remark();
  const auto backward = [&](const Tensor& x, const std::array<bool, 3>& wanted) -> Triple {
    if (!wanted[0] && !wanted[1] && !wanted[2]) return {};
    const auto [input, weight] = fill_in(x, state.weight, arrived.grad, state.weight_by_columns);
    return steps::linear_backward(
        {arrived.grad, input, weight, saved, arrived.still_to_apply, wanted});
  };
  Tensor grad_input, grad_weight, grad_bias;
  if (!receiver) {
    std::tie(grad_input, grad_weight, grad_bias) = backward(kept_input, mask);
  } else if (const auto [activation, wants_bias] = receiver->node->derivative();
             activation != Activation::none) {
    const auto [input, weight] =
        fill_in(kept_input, state.weight, arrived.grad, state.weight_by_columns);
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
          backward(kept_input, {false, true, mask[Edge::bias_edge]});
    }
  }
  if (sum) grad_weight = sum->add(arrived.grad, kept_input);
  return {grad_input, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
}

variable_list run(const State& state, const Tensor& grad,
                  const std::optional<handover::Note>& note) {
  auto result = must_be_differentiable(grad, {state.input.tensors[0], state.input.tensors[1],
                                              state.weight, state.saved})
                    ? differentiable(state, grad, note)
                    : usual(state, grad, note);
  return by_edge(state.wanted, std::move(result.input), std::move(result.weight),
                 std::move(result.bias));
}

}  // namespace

variable_list LinearNode::run_detached(const Tensor& grad, const Detached& node) {
  const auto& traits = node.traits;
  const auto& kept = node.variables;
  const auto& wanted = node.wanted;
  return run({nullptr,
              /*is_running=*/false,
              static_cast<Activation>(traits[0]),
              {wanted[0], wanted[1], wanted[2]},
              {{static_cast<Activation>(traits[1]), traits[2] != 0},
               {kept[input_index], kept[input_up_index]}},
              kept[weight_index],
              kept[saved_index],
              traits[3] != 0,
              node.edges},
             grad, std::nullopt);
}

std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation,
                                                Memory memory) {
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

// ---- the node ----------------------------------------------------------------------------------

LinearNode::LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation, Memory memory)
    : Producer({edge_of(input), edge_of(weight), edge_of(bias)}),
      activation_(activation),
      weight_by_columns_(grad_lies_by_columns(weight)),
      of_ensemble_(weight.dim() == 3),
      lends_(memory == Memory::low && saved_for(activation) == Saved::preactivation &&
             are_kept_as_they_are()) {}

void LinearNode::keep(const Tensor& input, const Tensor& weight, const Tensor& output,
                      const Tensor& saved) {
  if (weight.requires_grad()) {
    const auto [form, tensors] = input_to_keep(input);
    input_form_ = form;
    kept_[input_index] = SavedVariable(tensors[0], /*is_output=*/false);
    if (tensors[1].defined()) kept_[input_up_index] = SavedVariable(tensors[1], false);
  }
  if (input.requires_grad()) {
    kept_[weight_index] = saved_weight(weight);
  } else if (of_ensemble_) {  // whose form the weight tells
    kept_[weight_index] = SavedVariable(placeholder(weight, weight.sym_sizes().vec()), false);
  }
  kept_[saved_index] = SavedVariable(saved, /*is_output=*/saved.is_same(output));
  remember_bits(saved_index, saved);
}

const char* LinearNode::refusal() const {
  if (of_ensemble_) return "an ensemble";
  return activation_ == Activation::none ? "no activation before" : nullptr;
}

variable_list LinearNode::lend_saved() {
  auto saved = lend(saved_index);
  return saved.defined() ? variable_list{std::move(saved)} : variable_list();
}

std::pair<Activation, bool> LinearNode::derivative() const {
  return {activation_, task_should_compute_output(bias_edge)};
}

handover::Note LinearNode::derive(const Tensor& grad, variable_list saved, Tensor* output) {
  TORCH_INTERNAL_ASSERT(output == nullptr);
  const bool wants_bias = task_should_compute_output(bias_edge);
  auto [dz, grad_bias] = steps::activation_backward(grad, saved[0], activation_, wants_bias);
  return {std::move(dz), {wants_bias ? grad_bias : Tensor()}, std::move(saved)};
}

std::optional<KeptInput> LinearNode::lend_output() {
  if (!lends_) return std::nullopt;
  auto preactivation = lend(saved_index);
  if (!preactivation.defined()) return std::nullopt;
  return KeptInput{{activation_, /*is_gated=*/false}, {std::move(preactivation), {}}};
}

std::string LinearNode::name() const {
  return std::string("FusedLinear_") + fused::name(activation_) + "_Backward";
}

std::vector<int64_t> LinearNode::traits() const {
  return {static_cast<int64_t>(activation_), static_cast<int64_t>(input_form_.activation),
          input_form_.is_gated, weight_by_columns_};
}

Node::Backward LinearNode::backward() const { return run_detached; }

variable_list LinearNode::gradients(const Tensor& grad) {
  const auto [is_running, note, kept] = begin(saved_index);
  return run({this,
              is_running,
              activation_,
              {task_should_compute_output(input_edge), task_should_compute_output(weight_edge),
               task_should_compute_output(bias_edge)},
              {input_form_, {kept[input_index], kept[input_up_index]}},
              kept[weight_index],
              kept[saved_index],
              weight_by_columns_,
              next_edges()},
             grad, note);
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
  return output;
}

}  // namespace fused::autograd
