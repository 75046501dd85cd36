// The schema of every operator of the namespace `fused`. Kernels are registered in autograd/,
// dispatch/, cpu/ and cuda/.

#include "autograd/handover.h"
#include "core/explain.h"
#include "core/policy.h"
#include "cpu/packed_weights.h"
#include "plans/registry.h"

#include <torch/library.h>

namespace {

std::string get_policy() { return fused::name(fused::policy()); }
void set_policy(std::string_view text) {
  fused::set_policy(fused::parse_policy(text, "set_policy: policy"));
}

}  // namespace

TORCH_LIBRARY(fused, m) {
  // Inductor hands the arguments over in the strides they were traced with.
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};

  // What users call. Nothing but the result is written where no gradient is wanted. With the memory
  // 'low' the backward recomputes what it can instead of keeping it.
  m.def("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", tags);
  m.def(
      "linear_relu(Tensor input, Tensor weight, Tensor? bias=None, *, str memory='default') -> "
      "Tensor",
      tags);
  m.def(
      "linear_gelu(Tensor input, Tensor weight, Tensor? bias=None, *, str approximate='tanh', "
      "str memory='default') -> Tensor",
      tags);

  m.def(
      "linear_silu(Tensor input, Tensor weight, Tensor? bias=None, *, str memory='default') -> "
      "Tensor",
      tags);

  // Layers in a chain, the activation ('relu', 'gelu_tanh', 'gelu_erf', 'silu') between them.
  m.def(
      "mlp(Tensor input, Tensor[] weights, Tensor?[] biases, str activation, *, "
      "str memory='default') -> Tensor",
      tags);

  // act(input gateᵀ) ⊙ (input upᵀ); without up, gate is both weights. The block with a linear layer
  // after it.
  m.def(
      "linear_glu(Tensor input, Tensor gate, Tensor? up=None, Tensor? gate_bias=None, "
      "Tensor? up_bias=None, *, str activation='silu', str memory='default') -> Tensor",
      tags);
  m.def(
      "gated_mlp(Tensor input, Tensor gate, Tensor? up, Tensor down, Tensor? gate_bias=None, "
      "Tensor? up_bias=None, Tensor? down_bias=None, *, str activation='silu', "
      "str memory='default') -> Tensor",
      tags);

  // relu(conv2d(input, weight) + bias)
  m.def(
      "conv2d_relu(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, "
      "SymInt[2] padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor",
      tags);

  // Forward that also gives what the backward needs: ReLU's bit mask, else the pre-activation.
  m.def(
      "_linear_relu_aux(Tensor input, Tensor weight, Tensor? bias=None) -> "
      "(Tensor output, Tensor mask)",
      tags);
  m.def(
      "_linear_gelu_aux(Tensor input, Tensor weight, Tensor? bias=None, *, "
      "str approximate='tanh') -> (Tensor output, Tensor preactivation)",
      tags);
  m.def(
      "_linear_silu_aux(Tensor input, Tensor weight, Tensor? bias=None) -> "
      "(Tensor output, Tensor preactivation)",
      tags);

  // What low memory keeps of ReLU's output: a bit for each element, 0 where output <= 0.
  m.def("_relu_mask(Tensor output) -> Tensor", tags);
  m.def(
      "_linear_relu_bits(Tensor input, Tensor weight, Tensor? bias=None) -> "
      "(Tensor output, Tensor mask)",
      tags);

  // act'(saved) · grad_output and its column sums, in one pass over memory.
  m.def(
      "_activation_backward(Tensor grad_output, Tensor saved, str activation, bool bias_grad) -> "
      "(Tensor grad_preactivation, Tensor grad_bias)",
      tags);

  // The same for ReLU's output of a convolution, summed for each channel.
  m.def(
      "_channels_relu_backward(Tensor grad_output, Tensor output, bool bias_grad) -> "
      "(Tensor grad_preactivation, Tensor grad_bias)",
      tags);

  // The convolution's own backward on tensors that are sharded over devices, for which torch's rule
  // knows one layout; gradients not wanted are tensors of no elements.
  m.def(
      "_conv2d_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[2] stride, "
      "SymInt[2] padding, SymInt[2] dilation, SymInt groups, bool[3] output_mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);

  // The whole backward of one layer; gradients not wanted are tensors of no elements.
  m.def(
      "_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
      "str activation, bool[3] output_mask) -> "
      "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
      tags);

  // The same, and on along the edge to the layer before, whose activation's derivative is applied
  // to grad_input and whose bias gradient is summed on the way.
  m.def(
      "_linear_backward_across(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
      "str activation, bool[3] output_mask, Tensor previous_saved, str previous_activation, "
      "bool previous_bias_grad) -> (Tensor grad_previous_preactivation, Tensor grad_weight, "
      "Tensor grad_bias, Tensor grad_previous_bias)",
      tags);

  // A gated layer whole, and the pre-activations if they are kept; without up both are in the
  // first.
  m.def(
      "_linear_glu_aux(Tensor input, Tensor gate, Tensor? up, Tensor? gate_bias, Tensor? up_bias, "
      "str activation, bool keeps) -> (Tensor output, Tensor gate_preactivation, Tensor "
      "up_preactivation)",
      tags);

  // act(gate) ⊙ up of pre-activations; its gradients, their column sums and the result again, in
  // one pass over memory. What is not wanted is a tensor of no elements. With the weight of the
  // layer after it grad_output is of that layer's output.
  m.def("_glu(Tensor gate, Tensor? up, str activation) -> Tensor", tags);
  m.def(
      "_glu_backward(Tensor grad_output, Tensor gate, Tensor? up, str activation, "
      "bool[5] output_mask, Tensor? down=None) -> (Tensor grad_gate, Tensor grad_up, Tensor "
      "grad_gate_bias, "
      "Tensor grad_up_bias, Tensor output)",
      tags);

  // Whether any of the tensors is of a Python class that has to be asked, and whether one is
  // sharded over devices: Python has the kernels.
  m.def("_any_foreign(Tensor[] tensors) -> bool");
  m.def("_is_sharded(Tensor tensor) -> bool");

  // Process-wide choice of how the work is done: 'auto', 'cublaslt' or 'eager'.
  m.def("_policy() -> str", get_policy);
  m.def("_set_policy(str policy) -> ()", set_policy);

  // Whether separate layers hand gradients over to each other.
  m.def("_handover() -> bool", fused::autograd::handover::enabled);
  m.def("_set_handover(bool enabled) -> ()", fused::autograd::handover::set_enabled);

  // Declares a frozen weight, which a CPU may then keep packed; takes that back.
  m.def("_pack_weight(Tensor weight, str name) -> ()", fused::cpu::packed::declare);
  m.def("_unpack_weight(Tensor weight) -> bool", fused::cpu::packed::drop);

  // Plans: how long a problem may be measured, what has been decided, files of it.
  m.def("_plans_budget() -> float", fused::plans::budget);
  m.def("_plans_set_budget(float milliseconds) -> ()", fused::plans::set_budget);
  m.def("_plans_patience() -> int", fused::plans::patience);
  m.def("_plans_set_patience(int calls) -> ()", fused::plans::set_patience);
  m.def("_plans_verbosity() -> int", fused::plans::verbosity);
  m.def("_plans_set_verbosity(int level) -> ()", fused::plans::set_verbosity);
  m.def("_plans_save(str path) -> ()", fused::plans::save);
  m.def("_plans_load(str path) -> int", fused::plans::load);
  m.def("_plans_clear() -> ()", fused::plans::clear);
  m.def("_plans_show() -> str[]", fused::plans::show);
  m.def("_plans_from_environment() -> ()", fused::plans::from_environment);

  // A report of what ran: the rows between the two calls. A row of what Python does instead.
  m.def("_explain_start() -> int", fused::explain::start);
  m.def("_explain_stop(int report) -> str[]", fused::explain::stop);
  m.def("_explain_note(str row) -> ()", fused::explain::note);
}
