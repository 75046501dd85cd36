#pragma once

// What the node of gated layers computes in a backward.

#include "autograd/handover.h"
#include "core/gated.h"

#include <algorithm>

namespace fused::autograd::gating {

// Without up, gate's edges are of both; without down its two lead nowhere.
enum Edges {
  input_edge,
  gate_edge,
  up_edge,
  gate_bias_edge,
  up_bias_edge,
  down_edge,
  down_bias_edge,
  all_edges
};

// What is kept, each where a gradient needs it.
enum Indices {
  input_index,
  gate_index,
  up_index,
  up_bias_index,  // where up's pre-activation is computed again
  down_index,
  hidden_index,  // what goes into down, where nothing before that wants a gradient
  gate_z_index,  // pre-activations: the last, which may come with a note
  up_z_index,
  all_indices
};

// What does not change from call to call.
struct Form {
  Activation activation;
  bool has_up, has_down;
  bool is_joined;      // gate's pre-activations are both, [*, 2 hidden], though there is up
  bool is_up_dropped;  // up's pre-activation is computed again
  std::array<bool, 3> by_columns;  // the gradients of gate, up and down

  bool is_one_tensor() const { return !has_up || is_joined; }
};

// Of the pass: gradients of the pre-activations, of the biases, and the layer's result.
inline std::array<bool, 5> wanted_of_pass(const Form& form, const std::vector<bool>& wanted,
                                          bool hidden) {
  if (form.is_one_tensor()) {
    return {wanted[input_edge] || wanted[gate_edge] || wanted[up_edge], false,
            wanted[gate_bias_edge] || wanted[up_bias_edge], false, hidden};
  }
  return {wanted[input_edge] || wanted[gate_edge], wanted[input_edge] || wanted[up_edge],
          wanted[gate_bias_edge], wanted[up_bias_edge], hidden};
}

struct State : Work {
  Form form;
  std::optional<handover::Note> note = {};

  bool wants_layer() const {
    return std::any_of(wanted.begin(), wanted.begin() + down_edge, [](bool w) { return w; });
  }
  bool wants_hidden() const { return form.has_down && wanted[down_edge]; }

  std::array<bool, 5> wanted_of_pass(const Tensor& hidden) const {
    return gating::wanted_of_pass(form, wanted, wants_hidden() && !hidden.defined());
  }

  // Where the graph is not run again, nobody else holds them.
  void drop_preactivations() {
    for (const size_t index : {gate_z_index, up_z_index}) kept[index].reset();
    if (is_running) static_cast<Node&>(*node).done_with(gate_z_index);
  }
};

// The gradients by edge.
variable_list run(State state, const Tensor& grad);

}  // namespace fused::autograd::gating
