#include "autograd/linear_node.h"

#include "autograd/double_backward.h"
#include "core/aten_activation.h"
#include "core/explain.h"
#include "core/policy.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fused::autograd {
namespace {

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
  Activation input_is_of;  // none, or that of the pre-activation kept for the input
  std::array<bool, 3> wanted;
  variable_list variables;  // input, weight, saved; undefined where not kept

  torch::autograd::Edge edge(size_t index) const {
    return node != nullptr ? node->next_edge(index) : torch::autograd::Edge();
  }
  torch::autograd::Edge output() const {
    return node != nullptr ? torch::autograd::Edge(node->getptr(), 0) : torch::autograd::Edge();
  }
};

// ---- low memory: GELU's and SiLU's output is kept by nobody ------------------------------------

// What a node keeps to have its input in the backward.
struct KeptInput {
  Tensor tensor;
  Activation is_of = Activation::none;
};

// The input, or where a layer of low memory has just computed it, the pre-activation that it was
// computed from, which that layer keeps anyway.
KeptInput input_to_keep(const Tensor& input) {
  if (input.is_leaf() || input.is_view() || input.output_nr() != 0 || input._version() != 0) {
    return {input};
  }
  if (auto* producer = dynamic_cast<LinearNode*>(input.grad_fn().get())) {
    if (auto preactivation = producer->lend_preactivation(); preactivation.defined()) {
      return {std::move(preactivation), producer->activation()};
    }
  }
  return {input};
}

// Whether the next layer may do so. Hooks on saved tensors may keep them in another place and may
// be asked for each of them only once.
bool lends_preactivation(Activation activation, Memory memory) {
  return memory == Memory::low && saved_for(activation) == Saved::preactivation &&
         !at::SavedTensorDefaultHooks::get_hooks();
}

// ReLU's output as bits. The output itself where its rows are so short that those of bits would be
// longer.
Tensor relu_bits(const Tensor& output) {
  const auto features = output.sym_size(-1);
  if (mask_bytes(features) >= features * output.element_size()) return output;
  return steps::relu_mask(output);
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
  if (grad.is_same(note->dz)) return {grad, Activation::none, note->grad_bias};
  // Another gradient was added to the one that had been dealt with (the tensor was a root of this
  // backward as well): the rest still has to pass through the derivative.
  const auto rest = activation_gradient(grad - note->dz);
  // Beside an infinity the rest is lost, and does not matter.
  const auto dz = at::where(note->dz.isfinite(), note->dz + rest, note->dz);
  return {dz, Activation::none, {}};
}

// create_graph: gradients that are themselves differentiable.
Gradients differentiable(const State& state, const Tensor& grad,
                         const std::optional<handover::Note>& note) {
  auto kept = state.variables;
  if (state.input_is_of != Activation::none) {
    kept[0] = at_edge(activated(kept[0], state.input_is_of), state.edge(Edge::input_edge));
  }
  const auto [input, weight] = fill_in(kept[0], kept[1], grad);
  auto saved = kept[2];
  // ReLU's second derivative, of zeros, goes by way of the output, and so past its hooks.
  if (saved.defined() && saved.scalar_type() == at::kByte) {
    saved = at_edge(signs_of_mask(saved, grad, grad.sym_size(-1)), state.output());
  } else if (saved_for(state.activation) == Saved::preactivation) {
    saved = reconnect(
        saved, input, weight,
        {state.edge(Edge::input_edge), state.edge(Edge::weight_edge), state.edge(Edge::bias_edge)});
  }
  const auto arrived = arrive(state, grad, note, [&](const Tensor& others) {
    return reference::gradient_from_saved(others, saved, state.activation);
  });
  const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
      {arrived.grad, input, weight, saved, arrived.still_to_apply, state.wanted});
  return {grad_input, grad_weight, grad_bias};
}

// The producer's side of a hand-over, read before the consumer does its work.
struct Receiver {
  LinearNode* node;
  bool wants_bias;
  Tensor saved;
};

const char* stands_between(const torch::autograd::Edge& edge) {
  // FSDP2's node before a module that it wraps: a function in Python, whose name is all there is.
  if (explain::enabled() && edge.is_valid() &&
      edge.function->name() == "RegisterPostBackwardFunctionBackward") {
    return "FSDP wraps the layer by itself";
  }
  return "the input is not a fused layer's output";
}

// Nothing, and the reason in words, where the plain way is taken.
std::pair<std::optional<Receiver>, const char*> find_receiver(const State& state) {
  if (!state.is_running) return {std::nullopt, "no run of the eager engine"};
  if (!state.wanted[Edge::input_edge]) return {std::nullopt, "no gradient for the input is wanted"};
  auto* producer = dynamic_cast<LinearNode*>(state.edge(Edge::input_edge).function.get());
  if (producer == nullptr) return {std::nullopt, stands_between(state.edge(Edge::input_edge))};
  if (producer->activation() == Activation::none) return {std::nullopt, "no activation before"};
  if (const char* objection = handover::objection(*state.node)) return {std::nullopt, objection};
  // Unpacking may run the user's code (checkpoint computes the layer anew, with autograd): nothing
  // must be switched off around it.
  auto saved = producer->lend_saved();
  if (!saved.defined()) return {std::nullopt, "its saved tensors were freed"};
  const bool wants_bias = producer->task_should_compute_output(Edge::bias_edge);
  return {Receiver{producer, wants_bias, std::move(saved)}, nullptr};
}

Gradients usual(const State& state, const Tensor& grad, const std::optional<handover::Note>& note) {
  auto [receiver, reason] = find_receiver(state);
  const KernelsOnly guard;
  const auto arrived = arrive(state, grad, note, [&](const Tensor& others) {
    return std::get<0>(steps::activation_backward(others, state.variables[2], state.activation,
                                                  /*bias_grad=*/false));
  });
  // Where the weight's gradient is not wanted only the shape is read, which is the same.
  const bool recompute = state.input_is_of != Activation::none && state.wanted[Edge::weight_edge];
  const auto [input, weight] =
      fill_in(recompute ? activated(state.variables[0], state.input_is_of) : state.variables[0],
              state.variables[1], arrived.grad);
  const bool bias_known = arrived.grad_bias.defined();
  auto mask = state.wanted;
  mask[Edge::bias_edge] = mask[Edge::bias_edge] && !bias_known;
  if (explain::enabled()) {
    explain::remark(receiver ? "handed over" : std::string("plain: ") + reason);
  }
  const OptionalTensor saved(state.variables[2]);
  const steps::LinearBackward layer{arrived.grad,           input, weight, saved,
                                    arrived.still_to_apply, mask};
  if (!receiver) {
    const auto [grad_input, grad_weight, grad_bias] = steps::linear_backward(layer);
    return {grad_input, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
  }
  auto [dz, grad_weight, grad_bias, receivers_bias] = steps::linear_backward_across(
      layer, {receiver->saved, receiver->node->activation(), receiver->wants_bias});
  receiver->node->leave(torch::autograd::get_current_graph_task_id(),
                        {dz, receiver->wants_bias ? receivers_bias : Tensor(), receiver->saved});
  return {dz, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
}

variable_list gradients(const State& state, const Tensor& grad,
                        const std::optional<handover::Note>& note) {
  auto result = must_be_differentiable(grad, state.variables) ? differentiable(state, grad, note)
                                                              : usual(state, grad, note);
  return by_edge(state.wanted, std::move(result.input), std::move(result.weight),
                 std::move(result.bias));
}

variable_list run_detached(const variable_list& grads, const Detached& node) {
  if (!grads[0].defined()) return variable_list(3);
  const auto& traits = node.traits;
  return gradients({nullptr,
                    /*is_running=*/false,
                    static_cast<Activation>(traits[0]),
                    static_cast<Activation>(traits[1]),
                    {node.wanted[0], node.wanted[1], node.wanted[2]},
                    node.variables},
                   grads[0], std::nullopt);
}

}  // namespace

std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation,
                                                Memory memory) {
  switch (activation) {
    case Activation::none:
      return {fused::linear(input, weight, bias), Tensor()};
    case Activation::relu: {
      if (policy_for_graph(input) == Policy::cublaslt) {
        return steps::linear_relu_aux(input, weight, bias);
      }
      // The output tells the gradient as well as the mask does, by torch's rule at zero, and the
      // next layer keeps it anyway.
      const auto output = linear_relu(input, weight, bias);
      return {output, memory == Memory::low ? relu_bits(output) : output};
    }
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
    case Activation::silu:
      // An epilogue applies it before the sum is rounded, which cannot be done again.
      if (memory == Memory::low) {
        const auto preactivation = fused::linear(input, weight, bias);
        return {activated(preactivation, activation, Time::first), preactivation};
      }
      // Rows padded for the epilogue would keep more than torch does.
      if (weight.sym_size(0) % 8 != 0 && policy_for_graph(input) != Policy::cublaslt) {
        const auto preactivation = fused::linear(input, weight, bias);
        return {activate(preactivation, activation), preactivation};
      }
      return activation == Activation::silu
                 ? steps::linear_silu_aux(input, weight, bias)
                 : steps::linear_gelu_aux(input, weight, bias, approximate_of(activation));
  }
  return {};
}

Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation) {
  switch (activation) {
    case Activation::none:
      return fused::linear(input, weight, bias);
    case Activation::relu:
      return linear_relu(input, weight, bias);
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return linear_gelu(input, weight, bias, approximate_of(activation));
    case Activation::silu:
      return linear_silu(input, weight, bias);
  }
  return {};
}

Tensor activated(const Tensor& preactivation, Activation activation, Time time) {
  const auto op = is_gelu(activation) ? "gelu" : fused::name(activation);
  const explain::Row row(op, preactivation, {});
  if (explain::enabled()) {
    const auto how = std::string("ATen ") + op + (time == Time::again ? ", recomputed" : "");
    explain::append(how.c_str());
  }
  return activate(preactivation, activation);
}

// ---- the node ----------------------------------------------------------------------------------

LinearNode::LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       Activation activation, Memory memory)
    : Producer({edge_of(input), edge_of(weight), edge_of(bias)}),
      activation_(activation),
      lends_(lends_preactivation(activation, memory)) {}

void LinearNode::keep(const Tensor& input, const Tensor& weight, const Tensor& output,
                      const Tensor& saved) {
  if (weight.requires_grad()) {
    const auto kept = input_to_keep(input);
    kept_[input_index] = SavedVariable(kept.tensor, /*is_output=*/false);
    input_is_of_ = kept.is_of;
  }
  if (input.requires_grad()) kept_[weight_index] = SavedVariable(weight, /*is_output=*/false);
  kept_[saved_index] = SavedVariable(saved, /*is_output=*/saved.is_same(output));
}

Tensor LinearNode::lend_preactivation() {
  if (!lends_) return {};
  try {
    return lend(saved_index);
  } catch (const c10::Error&) {
    return {};  // it was written to since
  }
}

std::string LinearNode::name() const {
  return std::string("FusedLinear_") + fused::name(activation_) + "_Backward";
}

std::vector<int64_t> LinearNode::traits() const {
  return {static_cast<int64_t>(activation_), static_cast<int64_t>(input_is_of_)};
}

Node::Backward LinearNode::backward() const { return run_detached; }

variable_list LinearNode::apply(variable_list&& grads) {
  const auto& grad = grads[0];
  if (!grad.defined()) return variable_list(3);
  // A hook may call the node by hand while the engine runs another one.
  const bool is_running = torch::autograd::get_current_node().get() == this;
  std::optional<handover::Note> note;
  if (is_running) note = take(torch::autograd::get_current_graph_task_id());
  // What has changed since it was unpacked for the note is unpacked again, for torch's own error.
  const bool has_saved = note && note->is_unchanged();
  auto variables = unpack(0, has_saved ? size_t{saved_index} : kept_.size());
  if (has_saved) variables.push_back(note->saved);
  return gradients(
      {this,
       is_running,
       activation_,
       input_is_of_,
       {task_should_compute_output(input_edge), task_should_compute_output(weight_edge),
        task_should_compute_output(bias_edge)},
       std::move(variables)},
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
