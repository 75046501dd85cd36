#include "autograd/linear_node.h"

#include "autograd/double_backward.h"
#include "autograd/handover.h"
#include "core/aten_activation.h"
#include "core/explain.h"
#include "core/policy.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace fused::autograd {
namespace {

using reference::as_rows;
using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Edge = LinearActivation::Edge;

struct Gradients {
  Tensor input, weight, bias;
};

// What a node's backward works on.
struct State {
  Activation activation;
  bool has_bias;
  std::array<bool, 3> wanted;
  variable_list variables;  // input, weight, saved; undefined where not kept
  Activation input_is_of;   // none, or the GELU whose pre-activation is kept for the input
};

// What a node remembers beside tensors, in one integer: looking an entry up costs as much as a
// small allocation.
struct Traits {
  Activation activation;
  bool bias;
  bool lends;              // the next layer may keep this one's pre-activation for its input
  Activation input_is_of;  // none, or the GELU whose pre-activation is kept for the input

  // A byte for each.
  int64_t packed() const {
    return static_cast<int64_t>(activation) << 24 | static_cast<int64_t>(input_is_of) << 16 |
           lends << 8 | bias;
  }
  static Traits of(const AutogradContext& ctx) {
    const auto packed = ctx.saved_data.find("layer")->second.toInt();
    const auto byte = [packed](int n) { return packed >> 8 * n & 0xff; };
    return {static_cast<Activation>(byte(3)), byte(0) != 0, byte(1) != 0,
            static_cast<Activation>(byte(2))};
  }
};

// ---- low memory: GELU's output is kept by nobody -----------------------------------------------

// What a node keeps to have its input in the backward.
struct KeptInput {
  Tensor tensor;
  Activation is_of = Activation::none;  // see Traits
};

// The input, or where a layer of low memory has just computed it, the pre-activation that it was
// computed from, which that layer keeps anyway.
KeptInput input_to_keep(const Tensor& input) {
  KeptInput itself{input};
  if (input.is_leaf() || input.is_view() || input.output_nr() != 0) return itself;
  const auto* producer = dynamic_cast<CppNode<LinearActivation>*>(input.grad_fn().get());
  if (producer == nullptr) return itself;
  const auto traits = Traits::of(producer->ctx_);
  if (!traits.lends || input._version() != 0) return itself;
  try {
    return {producer->ctx_.get_saved_variables()[2], traits.activation};
  } catch (const c10::Error&) {
    return itself;  // a backward has freed them, or one of them was written to since
  }
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

// create_graph: gradients that are themselves differentiable.
Gradients differentiable(const State& state, const Tensor& grad) {
  auto kept = state.variables;
  if (state.input_is_of != Activation::none) {
    kept[0] = at_edge(gelu(kept[0], state.input_is_of, "ATen gelu, recomputed"), Edge::input_edge);
  }
  const auto [input, weight] = fill_in(kept[0], kept[1], grad);
  auto saved = kept[2];
  if (saved_for(state.activation) == Saved::preactivation) {
    OptionalTensor bias;
    if (state.has_bias) bias = at_edge(placeholder(grad, {grad.sym_size(-1)}), Edge::bias_edge);
    saved = reconnect(saved, kept[0].defined() ? input : at_edge(input, Edge::input_edge),
                      kept[1].defined() ? weight : at_edge(weight, Edge::weight_edge), bias);
  }
  const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
      {grad, input, weight, saved, state.activation, state.wanted});
  return {grad_input, grad_weight, grad_bias};
}

// ---- the usual backward, with hand-over (handover.h) -------------------------------------------

// What arrived at a node, with its own activation dealt with if the consumer has done so.
struct Arrived {
  Tensor grad;
  Activation still_to_apply;
  Tensor grad_bias;  // known already, or undefined
};

Arrived read_note(const State& state, const Tensor& grad,
                  const std::optional<handover::Note>& note) {
  if (!note) return {grad, state.activation, {}};
  if (grad.is_same(note->dz)) return {grad, Activation::none, note->grad_bias};
  // Another gradient was added to the one that had been dealt with (the tensor was a root of this
  // backward as well): the rest still has to pass through the derivative.
  const auto [rest, unused] =
      steps::activation_backward(grad - note->dz, state.variables[2], state.activation,
                                 /*bias_grad=*/false);
  // Beside an infinity the rest is lost, and does not matter.
  const auto dz = at::where(note->dz.isfinite(), note->dz + rest, note->dz);
  return {dz, Activation::none, state.wanted[2] ? as_rows(dz).sum(0) : Tensor()};
}

// The node of ours that produced this node's input and can be served, or why there is none.
std::pair<CppNode<LinearActivation>*, const char*> find_producer(Node& consumer) {
  auto* producer =
      dynamic_cast<CppNode<LinearActivation>*>(consumer.next_edge(Edge::input_edge).function.get());
  if (producer == nullptr) return {nullptr, "the input is not a fused layer's output"};
  if (Traits::of(producer->ctx_).activation == Activation::none) {
    return {nullptr, "no activation before"};
  }
  const char* objection = handover::objection(consumer);
  return {objection ? nullptr : producer, objection};
}

// The producer's side of a hand-over, read before the consumer does its work.
struct Receiver {
  Node* node;
  Activation activation;
  bool wants_bias;
  variable_list saved;
};

// Nothing, and the reason in words, where the plain way is taken.
std::pair<std::optional<Receiver>, const char*> find_receiver(const State& state, Node* consumer) {
  if (consumer == nullptr) return {std::nullopt, "no run of the eager engine"};
  if (!state.wanted[Edge::input_edge]) return {std::nullopt, "no gradient for the input is wanted"};
  const auto [producer, reason] = find_producer(*consumer);
  if (producer == nullptr) return {std::nullopt, reason};
  // Unpacking may run the user's code (checkpoint computes the layer anew, with autograd): nothing
  // must be switched off around it.
  const auto traits = Traits::of(producer->ctx_);
  return {Receiver{producer, traits.activation,
                   traits.bias && producer->task_should_compute_output(Edge::bias_edge),
                   producer->ctx_.get_saved_variables()},
          nullptr};
}

Gradients usual(const State& state, const Tensor& grad, const std::optional<handover::Note>& note,
                Node* node) {
  auto [receiver, reason] = find_receiver(state, node);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto arrived = read_note(state, grad, note);
  // Where the weight's gradient is not wanted only the shape is read, which is the same.
  const bool recompute = state.input_is_of != Activation::none && state.wanted[Edge::weight_edge];
  const auto [input, weight] =
      fill_in(recompute ? gelu(state.variables[0], state.input_is_of, "ATen gelu, recomputed")
                        : state.variables[0],
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
      layer, {receiver->saved[2], receiver->activation, receiver->wants_bias});
  handover::leave(receiver->node, torch::autograd::get_current_graph_task_id(),
                  handover::Note(dz, receiver->wants_bias ? receivers_bias : Tensor(),
                                 std::move(receiver->saved)));
  return {dz, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
}

// Gradients that must be differentiable themselves: create_graph, or forward over reverse.
bool must_be_differentiable(const State& state, const Tensor& grad) {
  return at::GradMode::is_enabled() || has_tangent(grad) ||
         std::ranges::any_of(state.variables, [](const Tensor& t) { return has_tangent(t); });
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
      // An epilogue applies GELU before the sum is rounded, which cannot be done again.
      if (memory == Memory::low) {
        const auto preactivation = fused::linear(input, weight, bias);
        return {gelu(preactivation, activation, "ATen gelu"), preactivation};
      }
      // Rows padded for the epilogue would keep more than torch does.
      if (weight.sym_size(0) % 8 != 0 && policy_for_graph(input) != Policy::cublaslt) {
        const auto preactivation = fused::linear(input, weight, bias);
        return {activate(preactivation, activation), preactivation};
      }
      return steps::linear_gelu_aux(input, weight, bias, approximate_of(activation));
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
  }
  return {};
}

Tensor gelu(const Tensor& preactivation, Activation activation, const char* how) {
  const explain::Row row("gelu", preactivation, {});
  explain::append(how);
  return activate(preactivation, activation);
}

Tensor LinearActivation::forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, Activation activation, Memory memory) {
  Tensor output, saved;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, saved) = forward_for_training(input, weight, bias, activation, memory);
  }
  const auto kept = weight.requires_grad() ? input_to_keep(input) : KeptInput();
  ctx->saved_data["layer"] =
      Traits{activation, has_value(bias), lends_preactivation(activation, memory), kept.is_of}
          .packed();
  ctx->set_materialize_grads(false);
  // No more is kept than torch keeps for the layer and its activation.
  ctx->save_for_backward({kept.tensor, input.requires_grad() ? weight : Tensor(), saved});
  return output;
}

variable_list LinearActivation::backward(AutogradContext* ctx, const variable_list& grads) {
  const auto& grad = grads[0];
  if (!grad.defined()) return variable_list(arguments);
  const auto traits = Traits::of(*ctx);
  State state{traits.activation,
              traits.bias,
              {ctx->needs_input_grad(input_edge), ctx->needs_input_grad(weight_edge),
               traits.bias && ctx->needs_input_grad(bias_edge)},
              {},
              traits.input_is_of};

  std::optional<handover::Note> note;
  const auto node = torch::autograd::get_current_node();
  if (node && state.activation != Activation::none) {
    note = handover::take(node.get(), torch::autograd::get_current_graph_task_id());
  }
  // Where something has changed them since they were unpacked for the note, asking once more gives
  // torch's own error.
  state.variables =
      note && note->is_unchanged() ? std::move(note->saved) : ctx->get_saved_variables();

  const auto gradients = must_be_differentiable(state, grad) ? differentiable(state, grad)
                                                             : usual(state, grad, note, node.get());
  variable_list result(arguments);
  if (state.wanted[0]) result[input_edge] = gradients.input;
  if (state.wanted[1]) result[weight_edge] = gradients.weight;
  if (state.wanted[2]) result[bias_edge] = gradients.bias;
  return result;
}

}  // namespace fused::autograd
