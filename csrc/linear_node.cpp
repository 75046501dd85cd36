#include "linear_node.h"

#include "composite.h"
#include "explain.h"
#include "fused_linear.h"
#include "handover.h"
#include "policy.h"
#include "reconnect.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

namespace fused {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Edge = LinearActivation::Edge;

struct Gradients {
  Tensor input, weight, bias;
};

// What a node's backward works on.
struct Step {
  Activation activation;
  bool has_bias;
  std::array<bool, 3> wanted;
  variable_list variables;  // input, weight, saved; undefined where not kept
};

// What a node remembers beside tensors, in one integer: looking an entry up costs as much as a
// small allocation.
struct Traits {
  Activation activation;
  bool bias;

  int64_t packed() const { return static_cast<int64_t>(activation) << 1 | bias; }
  static Traits of(const AutogradContext& ctx) {
    const auto packed = ctx.saved_data.find("layer")->second.toInt();
    return {static_cast<Activation>(packed >> 1), (packed & 1) != 0};
  }
};

// create_graph: gradients that are themselves differentiable.
Gradients differentiable(const Step& step, const Tensor& grad) {
  const auto& kept = step.variables;
  const auto [input, weight] = fill_in(kept[0], kept[1], grad);
  auto saved = kept[2];
  if (is_gelu(step.activation)) {
    OptionalTensor bias;
    if (step.has_bias) bias = at_edge(stand_in(grad, {grad.sym_size(-1)}), Edge::bias_edge);
    saved = reconnect(saved, kept[0].defined() ? input : at_edge(input, Edge::input_edge),
                      kept[1].defined() ? weight : at_edge(weight, Edge::weight_edge), bias);
  }
  const auto [grad_input, grad_weight, grad_bias] =
      Composite::linear_backward(grad, input, weight, saved, step.activation, step.wanted);
  return {grad_input, grad_weight, grad_bias};
}

// ---- the usual backward, with hand-over (handover.h) -------------------------------------------

// What arrived at a node, with its own activation dealt with if the consumer has done so.
struct Arrived {
  Tensor grad;
  Activation still_to_apply;
  Tensor grad_bias;  // known already, or undefined
};

Arrived read_note(const Step& step, const Tensor& grad, const std::optional<handover::Note>& note) {
  if (!note) return {grad, step.activation, {}};
  if (grad.is_same(note->dz)) return {grad, Activation::none, note->grad_bias};
  // Another gradient was added to the one that had been dealt with (the tensor was a root of this
  // backward as well): the rest still has to pass through the derivative.
  const auto [rest, unused] =
      steps::activation_backward(grad - note->dz, step.variables[2], name(step.activation),
                                 /*bias_grad=*/false);
  // Beside an infinity the rest is lost, and does not matter.
  const auto dz = at::where(note->dz.isfinite(), note->dz + rest, note->dz);
  return {dz, Activation::none, step.wanted[2] ? as_rows(dz).sum(0) : Tensor()};
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
std::pair<std::optional<Receiver>, const char*> find_receiver(const Step& step, Node* consumer) {
  if (consumer == nullptr) return {std::nullopt, "no run of the eager engine"};
  if (!step.wanted[Edge::input_edge]) return {std::nullopt, "no gradient for the input is wanted"};
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

Gradients usual(const Step& step, const Tensor& grad, const std::optional<handover::Note>& note,
                Node* node) {
  auto [receiver, reason] = find_receiver(step, node);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto arrived = read_note(step, grad, note);
  const auto [input, weight] = fill_in(step.variables[0], step.variables[1], arrived.grad);
  const bool bias_known = arrived.grad_bias.defined();
  auto mask = step.wanted;
  mask[Edge::bias_edge] = mask[Edge::bias_edge] && !bias_known;
  if (explain::enabled()) {
    explain::remark(receiver ? "handed over" : std::string("plain: ") + reason);
  }
  if (!receiver) {
    const auto [grad_input, grad_weight, grad_bias] = steps::linear_backward(
        arrived.grad, input, weight, step.variables[2], name(arrived.still_to_apply), mask);
    return {grad_input, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
  }
  auto [dz, grad_weight, grad_bias, receivers_bias] = steps::linear_backward_across(
      arrived.grad, input, weight, step.variables[2], name(arrived.still_to_apply), mask,
      receiver->saved[2], name(receiver->activation), receiver->wants_bias);
  handover::leave(receiver->node, torch::autograd::get_current_graph_task_id(),
                  handover::Note(dz, receiver->wants_bias ? receivers_bias : Tensor(),
                                 std::move(receiver->saved)));
  return {dz, grad_weight, bias_known ? arrived.grad_bias : grad_bias};
}

// Gradients that must be differentiable themselves: create_graph, or forward over reverse.
bool must_be_differentiable(const Step& step, const Tensor& grad) {
  return at::GradMode::is_enabled() || has_tangent(grad) ||
         std::ranges::any_of(step.variables, [](const Tensor& t) { return has_tangent(t); });
}

}  // namespace

std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
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
      return {output, output};
    }
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      // Rows padded for the epilogue would keep more than torch does.
      if (weight.sym_size(0) % 8 != 0 && policy_for_graph(input) != Policy::cublaslt) {
        const auto preactivation = fused::linear(input, weight, bias);
        return {Composite::activate(preactivation, activation), preactivation};
      }
      return steps::linear_gelu_aux(input, weight, bias, approximate_of(activation));
  }
  return {};
}

Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation) {
  if (activation == Activation::none) return fused::linear(input, weight, bias);
  if (activation == Activation::relu) return linear_relu(input, weight, bias);
  return linear_gelu(input, weight, bias, approximate_of(activation));
}

Tensor LinearActivation::forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, int64_t activation) {
  Tensor output, saved;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, saved) =
        forward_for_training(input, weight, bias, static_cast<Activation>(activation));
  }
  ctx->saved_data["layer"] = Traits{static_cast<Activation>(activation), has_value(bias)}.packed();
  ctx->set_materialize_grads(false);
  // No more is kept than torch keeps for the layer and its activation.
  ctx->save_for_backward({weight.requires_grad() ? input : Tensor(),
                          input.requires_grad() ? weight : Tensor(), saved});
  return output;
}

variable_list LinearActivation::backward(AutogradContext* ctx, const variable_list& grads) {
  const auto& grad = grads[0];
  if (!grad.defined()) return variable_list(4);
  const auto traits = Traits::of(*ctx);
  Step step{traits.activation,
            traits.bias,
            {ctx->needs_input_grad(input_edge), ctx->needs_input_grad(weight_edge),
             traits.bias && ctx->needs_input_grad(bias_edge)},
            {}};

  std::optional<handover::Note> note;
  const auto node = torch::autograd::get_current_node();
  if (node && step.activation != Activation::none) {
    note = handover::take(node.get(), torch::autograd::get_current_graph_task_id());
  }
  // Where something has changed them since they were unpacked for the note, asking once more gives
  // torch's own error.
  step.variables =
      note && note->is_unchanged() ? std::move(note->saved) : ctx->get_saved_variables();

  const auto gradients = must_be_differentiable(step, grad) ? differentiable(step, grad)
                                                            : usual(step, grad, note, node.get());
  return {step.wanted[0] ? gradients.input : Tensor(), step.wanted[1] ? gradients.weight : Tensor(),
          step.wanted[2] ? gradients.bias : Tensor(), Tensor()};
}

}  // namespace fused
