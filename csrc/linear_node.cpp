#include "linear_node.h"

#include "composite.h"
#include "explain.h"
#include "fused_linear.h"
#include "handover.h"
#include "policy.h"

#include <torch/csrc/autograd/graph_task.h>

namespace fused {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::CppNode;
using torch::autograd::Function;
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

Activation activation_of(AutogradContext& ctx) {
  return static_cast<Activation>(ctx.saved_data["activation"].toInt());
}

// The operators take tensors, not holes: what was not kept is not read, only its shape is.
Tensor stand_in(const Tensor& like, const std::vector<c10::SymInt>& sizes) {
  return at::empty_symint({1}, like.options()).expand_symint(sizes);
}

std::pair<Tensor, Tensor> input_and_weight(const Step& step, const Tensor& grad) {
  auto input = step.variables[0], weight = step.variables[1];
  if (!input.defined()) {
    auto sizes = grad.sym_sizes().vec();
    sizes.back() = weight.defined() ? weight.sym_size(1) : c10::SymInt(0);
    input = stand_in(grad, sizes);
  }
  if (!weight.defined()) weight = stand_in(grad, {grad.sym_size(-1), input.sym_size(-1)});
  return {std::move(input), std::move(weight)};
}

// ---- create_graph: gradients that are themselves differentiable -------------------------------

// A saved pre-activation put back into the graph, as a function of input, weight and bias. Their
// values are needed only as far as the first backward needs them too, so a stand-in may take the
// place of one that was not kept.
struct ReconnectPreactivation : Function<ReconnectPreactivation> {
  static Tensor forward(AutogradContext* ctx, const Tensor& preactivation, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({input, weight});
    ctx->set_materialize_grads(false);
    ctx->saved_data["bias"] = has_value(bias);
    return preactivation.detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool bias = ctx->saved_data["bias"].toBool();
    if (!grads[0].defined()) return variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> wanted{ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                     bias && ctx->needs_input_grad(3)};
    const auto [input, weight, grad_bias] = Composite::linear_backward(
        grads[0], saved[0], saved[1], std::nullopt, Activation::none, wanted);
    return {Tensor(), wanted[0] ? input : Tensor(), wanted[1] ? weight : Tensor(),
            wanted[2] ? grad_bias : Tensor()};
  }
};

// A tensor without meaningful values at the end of one of the running node's own edges.
Tensor at_edge(const Tensor& values, Edge edge) {
  auto tensor = values.detach();
  if (const auto node = torch::autograd::get_current_node()) {
    torch::autograd::impl::set_gradient_edge(tensor, node->next_edge(edge));
  }
  return tensor;
}

Gradients differentiable(const Step& step, const Tensor& grad) {
  const auto [input, weight] = input_and_weight(step, grad);
  auto saved = step.variables[2];
  if (is_gelu(step.activation)) {
    OptionalTensor bias;
    if (step.has_bias) {
      bias = at_edge(stand_in(grad, {grad.sym_size(-1)}), LinearActivation::bias_edge);
    }
    const bool kept_input = step.variables[0].defined(), kept_weight = step.variables[1].defined();
    saved = ReconnectPreactivation::apply(
        saved, kept_input ? input : at_edge(input, LinearActivation::input_edge),
        kept_weight ? weight : at_edge(weight, LinearActivation::weight_edge), bias);
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
  const auto [rest, rest_bias] = steps::activation_backward(grad - note->dz, step.variables[2],
                                                            name(step.activation), step.wanted[2]);
  return {note->dz + rest, Activation::none,
          step.wanted[2] ? note->grad_bias + rest_bias : Tensor()};
}

// The node of ours that produced this node's input and can be served, or why there is none.
std::pair<CppNode<LinearActivation>*, const char*> find_producer(Node& consumer) {
  auto* producer =
      dynamic_cast<CppNode<LinearActivation>*>(consumer.next_edge(Edge::input_edge).function.get());
  if (producer == nullptr) return {nullptr, "the input is not a fused layer's output"};
  if (activation_of(producer->ctx_) == Activation::none) return {nullptr, "no activation before"};
  const char* objection = handover::objection(consumer);
  return {objection ? nullptr : producer, objection};
}

Gradients usual(const Step& step, const Tensor& grad, std::optional<handover::Note> note) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto arrived = read_note(step, grad, note);
  auto mask = step.wanted;
  if (arrived.grad_bias.defined()) mask[Edge::bias_edge] = false;
  const auto [input, weight] = input_and_weight(step, arrived.grad);
  const auto finish = [&](const Tensor& grad_input, const Tensor& grad_weight,
                          const Tensor& grad_bias) {
    return Gradients{grad_input, grad_weight,
                     arrived.grad_bias.defined() ? arrived.grad_bias : grad_bias};
  };

  const auto node = torch::autograd::get_current_node();
  CppNode<LinearActivation>* producer = nullptr;
  if (node && mask[Edge::input_edge]) {
    const char* reason;
    std::tie(producer, reason) = find_producer(*node);
    if (explain::enabled()) {
      explain::remark(producer ? "handed over" : std::string("plain: ") + reason);
    }
  }
  if (producer == nullptr) {
    const auto [grad_input, grad_weight, grad_bias] = steps::linear_backward(
        arrived.grad, input, weight, step.variables[2], name(arrived.still_to_apply), mask);
    return finish(grad_input, grad_weight, grad_bias);
  }

  auto producers = producer->ctx_.get_saved_variables();
  const bool producers_bias = producer->ctx_.saved_data["bias"].toBool() &&
                              producer->task_should_compute_output(Edge::bias_edge);
  auto [dz, grad_weight, grad_bias, grad_producers_bias] = steps::linear_backward_across(
      arrived.grad, input, weight, step.variables[2], name(arrived.still_to_apply), mask,
      producers[2], name(activation_of(producer->ctx_)), producers_bias);
  handover::leave(producer, torch::autograd::get_current_graph_task_id(),
                  {dz, producers_bias ? grad_producers_bias : Tensor(), std::move(producers)});
  return finish(dz, grad_weight, grad_bias);
}

}  // namespace

std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
  switch (activation) {
    case Activation::none:
      return {fused::linear(input, weight, bias), Tensor()};
    case Activation::relu: {
      if (policy() == Policy::cublaslt) return steps::linear_relu_aux(input, weight, bias);
      // The output tells the gradient as well as the mask does, by torch's rule at zero, and the
      // next layer keeps it anyway.
      const auto output = linear_relu(input, weight, bias);
      return {output, output};
    }
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return steps::linear_gelu_aux(input, weight, bias, approximate_of(activation));
  }
  return {};
}

Tensor LinearActivation::forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, int64_t activation) {
  Tensor output, saved;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, saved) =
        forward_for_training(input, weight, bias, static_cast<Activation>(activation));
  }
  ctx->saved_data["activation"] = activation;
  ctx->saved_data["bias"] = has_value(bias);
  ctx->set_materialize_grads(false);
  // No more is kept than torch keeps for the layer and its activation.
  ctx->save_for_backward({weight.requires_grad() ? input : Tensor(),
                          input.requires_grad() ? weight : Tensor(), saved});
  return output;
}

variable_list LinearActivation::backward(AutogradContext* ctx, const variable_list& grads) {
  const auto& grad = grads[0];
  if (!grad.defined()) return variable_list(4);
  const bool bias = ctx->saved_data["bias"].toBool();
  Step step{activation_of(*ctx),
            bias,
            {ctx->needs_input_grad(input_edge), ctx->needs_input_grad(weight_edge),
             bias && ctx->needs_input_grad(bias_edge)},
            {}};

  std::optional<handover::Note> note;
  const auto node = torch::autograd::get_current_node();
  if (node && step.activation != Activation::none) {
    note = handover::take(node.get(), torch::autograd::get_current_graph_task_id());
  }
  step.variables = note ? note->saved : ctx->get_saved_variables();

  const auto gradients =
      at::GradMode::is_enabled() ? differentiable(step, grad) : usual(step, grad, std::move(note));
  return {step.wanted[0] ? gradients.input : Tensor(), step.wanted[1] ? gradients.weight : Tensor(),
          step.wanted[2] ? gradients.bias : Tensor(), Tensor()};
}

}  // namespace fused
