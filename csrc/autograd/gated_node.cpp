// The node of fused::linear_glu and fused::gated_mlp. It saves the input and the two
// pre-activations. The backward computes act(gate) ⊙ up again while it reads them for their
// gradients. With memory="low" a block's product computes up's pre-activation again.

#include "autograd/accumulation.h"
#include "autograd/arguments.h"
#include "autograd/double_backward.h"
#include "autograd/nodes.h"
#include "core/explain.h"
#include "core/shapes.h"
#include "dispatch/gated.h"
#include "fused_linear.h"
#include "reference/gated.h"

#include <algorithm>
#include <utility>

namespace fused::autograd {
namespace {

using reference::as_rows;

// Without up, gate's edges are those of the stacked weight; without down, its two edges are
// invalid.
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

// The saved tensors. Each is defined if a gradient needs it.
enum Indices {
  input_index,
  gate_index,
  up_index,
  up_bias_index,  // if up's pre-activation is computed again
  down_index,
  hidden_index,  // down's input, if it is not computed again
  gate_z_index,  // pre-activations
  up_z_index,
  all_indices
};

// The facts of a node that compiled autograd may treat as constant.
struct Form {
  Activation activation;
  bool has_up, has_down;
  bool is_joined;      // one tensor [*, 2 hidden] holds both pre-activations, though up is given
  bool is_up_dropped;  // up's pre-activation is computed again
  bool is_in_aten;     // the gradients are recorded in ATen's operators, for a compiler to fuse
  std::array<bool, 3> by_columns;  // the gradients of gate, up and down

  bool is_one_tensor() const { return !has_up || is_joined; }

  // The wanted results of glu_backward: gradients of pre-activations and biases, and h.
  std::array<bool, 5> wanted_of_pass(const std::vector<bool>& wanted, bool hidden) const {
    if (is_one_tensor()) {
      return {wanted[input_edge] || wanted[gate_edge] || wanted[up_edge], false,
              wanted[gate_bias_edge] || wanted[up_bias_edge], false, hidden};
    }
    return {wanted[input_edge] || wanted[gate_edge], wanted[input_edge] || wanted[up_edge],
            wanted[gate_bias_edge], wanted[up_bias_edge], hidden};
  }
};

struct State : Work {
  Form form;

  bool wants_layer() const {
    return std::any_of(wanted.begin(), wanted.begin() + down_edge, [](bool w) { return w; });
  }

  // Unless the graph is run again, nothing else holds them.
  void drop_preactivations() {
    for (const size_t index : {gate_z_index, up_z_index}) {
      kept[index].reset();
      if (releases) static_cast<Node&>(*node).release(index);
    }
  }
};

// ---- the backward ------------------------------------------------------------------------------

// Returns the pre-activations as glu_backward reads them. Up's was not saved if only up's gradients
// can be wanted.
std::pair<Tensor, OptionalTensor> preactivations(const State& state) {
  const auto &gate = state.kept[gate_z_index], &up = state.kept[up_z_index];
  if (state.form.is_one_tensor()) return {gate, std::nullopt};
  if (state.form.is_up_dropped) {
    const auto& bias = state.kept[up_bias_index];
    const KernelsOnly guard;
    return {gate, fused::linear(state.kept[input_index], state.kept[up_index],
                                bias.defined() ? OptionalTensor(bias) : std::nullopt)};
  }
  return {gate, up.defined() ? up : placeholder(gate, gate.sym_sizes().vec())};
}

// The gradients of the biases, by edge.
void put_bias_gradients(const State& state, const Quintuple& pass, variable_list& result) {
  const auto& [gate_z, up_z, gate_bias, up_bias, hidden] = pass;
  const bool split = state.form.has_up && state.form.is_one_tensor() && gate_bias.numel() > 0;
  const auto [first, second] = split ? gated::halves(gate_bias) : std::pair(gate_bias, up_bias);
  const auto put = [&](size_t edge, const Tensor& made) {
    if (!state.wanted[edge]) return;
    const auto sum = accumulation::target_of(state.node.get(), edge, state.kept);
    result[edge] = sum ? sum->add(made, {}) : made;
  };
  put(gate_bias_edge, first), put(up_bias_edge, second);
}

// The steps of a backward: kernels, or formulas that are differentiable.
struct Kernels {
  static constexpr auto linear_backward = steps::linear_backward;
  static constexpr auto glu = steps::glu;
  static constexpr auto glu_backward = steps::glu_backward;
};
struct Formulas : reference::GluFormula {
  static constexpr auto linear_backward = reference::LinearFormula::linear_backward;
};
template <class Steps>
constexpr bool are_kernels = std::is_same_v<Steps, Kernels>;

template <class Steps>
Triple backward_of_linear(const Tensor& grad, const Tensor& input, const Tensor& weight,
                          bool by_columns, const std::array<bool, 3>& wanted) {
  const auto [x, w] = fill_in(input, weight, grad, by_columns);
  return Steps::linear_backward({grad, x, w, std::nullopt, Activation::none, wanted});
}

// The product of one weight's gradient, which may be added to the existing gradient.
template <class Steps>
Triple backward_of_linear(const State& state, size_t edge, const Tensor& grad, const Tensor& input,
                          const Tensor& weight, bool by_columns, std::array<bool, 3> wanted) {
  const auto sum = accumulation::target_of(state.node.get(), edge, state.kept);
  if (!sum) return backward_of_linear<Steps>(grad, input, weight, by_columns, wanted);
  Tensor grad_input, none, grad_bias;
  if (wanted[0] || wanted[2]) {
    wanted[1] = false;
    std::tie(grad_input, none, grad_bias) =
        backward_of_linear<Steps>(grad, input, weight, by_columns, wanted);
  }
  return {grad_input, sum->add(grad, input), grad_bias};
}

// Computes the gradients of both weights by one product if their pre-activations are one tensor.
// Returns whether it did.
template <class Steps>
bool put_joined_products(const State& state, const Tensor& dz, variable_list& result) {
  const auto& wanted = state.wanted;
  const bool is_wanted = wanted[input_edge] && wanted[gate_edge] == wanted[up_edge];
  if (!state.form.is_joined || !is_wanted) return false;
  for (const size_t edge : {gate_edge, up_edge}) {
    if (accumulation::target_of(state.node.get(), edge)) return false;
  }
  const auto both = gated::joined(state.kept[gate_index], state.kept[up_index]);
  if (!both.defined()) return false;
  const bool wants_weights = wanted[gate_edge];
  Tensor weights;
  std::tie(result[input_edge], weights, std::ignore) = backward_of_linear<Steps>(
      dz, state.kept[input_index], both, false, {true, wants_weights, false});
  if (wants_weights) {
    const auto rows = weights.sym_size(0) / 2;
    result[gate_edge] = weights.narrow_symint(0, 0, rows);
    result[up_edge] = weights.narrow_symint(0, rows, rows);
  }
  return true;
}

// Returns grad_input + dz · up, and reuses grad_input's memory if it can.
template <class Steps>
Tensor plus_product(const State& state, const Tensor& grad_input, const Tensor& dz) {
  const auto& up = state.kept[up_index];
  // Sharded rows cannot always be viewed as a matrix, and eager uses another product for a vector.
  if (!are_kernels<Steps> || is_sharded(dz) || dz.dim() == 1 || is_batch_invariant()) {
    return grad_input +
           std::get<0>(backward_of_linear<Steps>(dz, state.kept[input_index], up,
                                                 state.form.by_columns[1], {true, false, false}));
  }
  auto sum = as_rows(grad_input);
  // A compiler fuses a plain sum with later operators, but copies for an addmm. vmap has no rule
  // for the form that writes to its argument.
  if (at::areAnyTensorSubclassLike({sum, dz, up})) {
    return grad_input + at::mm(as_rows(dz), up).view_as(grad_input);
  }
  const explain::Row row("linear_glu", dz, up);
  explain::append("ATen addmm");
  at::addmm_out(sum, sum, as_rows(dz), up);
  return grad_input;
}

// Computes the products of the gated layer's backward. gate_dz holds both gradients if they are one
// tensor.
template <class Steps>
void put_products(const State& state, const Tensor& gate_dz, const Tensor& up_dz,
                  variable_list& result) {
  const auto& wanted = state.wanted;
  const auto& form = state.form;
  const auto &input = state.kept[input_index], &gate = state.kept[gate_index],
             &up = state.kept[up_index];
  if (put_joined_products<Steps>(state, gate_dz, result)) return;
  const auto [first, second] = form.is_joined ? gated::halves(gate_dz) : std::pair(gate_dz, up_dz);
  const bool wants_input = wanted[input_edge];
  if (wants_input || wanted[gate_edge]) {
    std::tie(result[input_edge], result[gate_edge], std::ignore) =
        backward_of_linear<Steps>(state, gate_edge, first, input, gate, form.by_columns[0],
                                  {wants_input, wanted[gate_edge], false});
  }
  if (!form.has_up) return;
  if (wanted[up_edge]) {
    result[up_edge] = std::get<1>(backward_of_linear<Steps>(
        state, up_edge, second, input, up, form.by_columns[1], {false, true, false}));
  }
  if (wants_input) {
    result[input_edge] = plus_product<Steps>(state, result[input_edge], second);
  }
}

// Returns whether one step does the product with down's weight and glu_backward. Only a GPU has a
// kernel for it, which sums no biases. Sharded gradients may have to be summed in between.
bool takes_down(const Tensor& grad, bool is_one_tensor, const std::array<bool, 5>& wanted) {
  return grad.is_cuda() && c10::elementSize(grad.scalar_type()) == 2 && !is_sharded(grad) &&
         wanted[0] && (is_one_tensor || wanted[1]) && !wanted[2] && !wanted[3];
}

// Computes the gradients of the pre-activations and of the layer's biases in one sweep over memory,
// and down's input again if it is wanted.
template <class Steps>
Quintuple pass_of(const State& state, const Tensor& grad, const std::array<bool, 5>& wanted) {
  const auto& down = state.kept[down_index];
  const bool has_down = state.form.has_down;
  const bool in_one =
      are_kernels<Steps> && has_down && takes_down(grad, state.form.is_one_tensor(), wanted);
  auto grad_output = grad;
  if (has_down && !in_one) {
    grad_output = std::get<0>(
        backward_of_linear<Steps>(grad, {}, down, state.form.by_columns[2], {true, false, false}));
  }
  const auto [gate_z, up_z] = preactivations(state);
  if (are_kernels<Steps> && state.form.is_in_aten) {
    if (in_one) grad_output = at::matmul(grad, down);
    return Formulas::glu_backward({grad_output, gate_z, up_z, state.form.activation, wanted});
  }
  return Steps::glu_backward({grad_output, gate_z, up_z, state.form.activation, wanted,
                              in_one ? OptionalTensor(down) : std::nullopt});
}

// The gradients of down's weight and bias.
template <class Steps>
void put_down(const State& state, const Tensor& grad, const Tensor& hidden, variable_list& result) {
  const auto& wanted = state.wanted;
  const auto bias_sum = accumulation::target_of(state.node.get(), down_bias_edge, state.kept);
  std::tie(std::ignore, result[down_edge], result[down_bias_edge]) = backward_of_linear<Steps>(
      state, down_edge, grad, hidden, state.kept[down_index], state.form.by_columns[2],
      {false, wanted[down_edge], wanted[down_bias_edge] && !bias_sum});
  if (bias_sum) result[down_bias_edge] = bias_sum->add(grad, {});
}

template <class Steps>
variable_list gradients_with(State& state, const Tensor& grad) {
  variable_list result(all_edges);
  const auto& wanted = state.wanted;
  const bool wants_down = wanted[down_edge] || wanted[down_bias_edge];
  auto hidden = std::exchange(state.kept[hidden_index], {});
  // A second derivative needs the pre-activations in the graph.
  if (!are_kernels<Steps> && state.kept[gate_z_index].defined()) hidden.reset();
  const bool wants_hidden = state.form.has_down && wanted[down_edge] && !hidden.defined();
  const auto wanted_of_pass = state.form.wanted_of_pass(wanted, wants_hidden);
  Quintuple pass;
  if (state.wants_layer()) {
    pass = pass_of<Steps>(state, grad, wanted_of_pass);
    if (wants_hidden) hidden = std::exchange(std::get<4>(pass), {});
  } else if (wants_hidden) {
    const auto [gate_z, up_z] = preactivations(state);
    hidden = Steps::glu(gate_z, up_z, state.form.activation);
  }
  state.drop_preactivations();  // room for the gradients of the weights
  if (state.form.has_down && wants_down) put_down<Steps>(state, grad, hidden, result);
  hidden.reset();
  if (state.wants_layer()) {
    put_bias_gradients(state, pass, result);
    if (wanted_of_pass[0] || wanted_of_pass[1]) {
      put_products<Steps>(state, std::get<0>(pass), std::get<1>(pass), result);
    }
  }
  return result;
}

// For create_graph, puts the pre-activations back into the graph. Two halves become two tensors.
void reconnect_layer(State& state) {
  auto& [activation, has_up, has_down, is_joined, is_up_dropped, is_in_aten, by_columns] =
      state.form;
  auto& kept = state.kept;
  const auto connected = [&](const Tensor& z, size_t weight_index, size_t weight_edge,
                             size_t bias_edge) {
    const auto [x, w] = fill_in(kept[input_index], kept[weight_index], z, false);
    return reconnect(z, x, w,
                     {state.edges[input_edge], state.edges[weight_edge], state.edges[bias_edge]});
  };
  if (kept[gate_z_index].defined()) {
    auto [gate_z, up_z] = preactivations(state);
    if (is_joined) std::tie(gate_z, up_z) = gated::halves(gate_z);
    kept[gate_z_index] = connected(gate_z, gate_index, gate_edge, gate_bias_edge);
    if (is_joined || is_up_dropped || kept[up_z_index].defined()) {
      kept[up_z_index] = connected(*up_z, up_index, up_edge, up_bias_edge);
    }
  }
  is_joined = is_up_dropped = false;
  // The graph needs all saved tensors, and each gradient apart.
  state.node.reset(), state.releases = false;
}

// The gradients by edge.
variable_list run(State state, const Tensor& grad) {
  variable_list result;
  if (must_be_differentiable(grad, state.kept)) {
    reconnect_layer(state);
    result = gradients_with<Formulas>(state, grad);
  } else {
    const KernelsOnly guard;
    result = gradients_with<Kernels>(state, grad);
  }
  for (size_t i = 0; i < all_edges; ++i) {
    if (!state.wanted[i]) result[i].reset();  // a tensor of no elements
  }
  return result;
}

// ---- the node ----------------------------------------------------------------------------------

class GatedNode final : public Node {
 public:
  GatedNode(edge_list&& edges, const Form& form) : Node(std::move(edges)), form_(form) {}

  void keep(Indices index, const Tensor& tensor) {
    kept_[index] = SavedVariable(tensor, /*is_output=*/false);
  }
  void keep_weight(Indices index, const Tensor& weight) { kept_[index] = saved_weight(weight); }
  void keep_input(const Tensor& input) {
    // up's product is computed again from the input of the forward.
    kept_[input_index] = form_.is_up_dropped ? saved_weight(input) : saved_input(input);
  }

  std::string name() const override {
    return std::string(form_.has_down ? "FusedGatedMlp_" : "FusedLinearGlu_") +
           fused::name(form_.activation) + "_Backward";
  }

 protected:
  variable_list gradients(const Tensor& grad) override { return run({work(), form_}, grad); }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    return {number(form_.activation), form_.has_up,        form_.has_down,
            form_.is_joined,          form_.is_up_dropped, form_.is_in_aten,
            form_.by_columns[0],      form_.by_columns[1], form_.by_columns[2]};
  }
  Backward backward() const override {
    return [form = form_](Work work, const Tensor& grad) {
      return run({std::move(work), form}, grad);
    };
  }

 private:
  const Form form_;
  std::array<SavedVariable, all_indices> kept_;
};

// ---- the forward -------------------------------------------------------------------------------

// The parts of a call that need a gradient; they decide which tensors its node keeps.
struct Needs {
  bool before_gate, before_up;  // gate's pre-activation needs a gradient, up's does
  bool before_down;             // down's input needs a gradient
  bool reads_up;                // glu_backward reads up's pre-activation
  bool drops_up;                // up's pre-activation is not saved, but computed again
  bool keeps_hidden;            // down's input is saved

  static Needs of(const gated::Layer& layer, const gated::Down& down, Memory memory) {
    const auto& [input, gate, up, gate_bias, up_bias] = layer;
    const bool before_gate =
        requires_grad(input) || requires_grad(gate) || requires_grad(gate_bias);
    const bool before_up = requires_grad(input) || requires_grad(up) || requires_grad(up_bias);
    const bool before_down = before_gate || before_up;
    const bool wants_down = requires_grad(down.weight);
    const bool reads_up = before_down && (before_gate || wants_down);
    const bool drops_up = memory == Memory::low && down.exists() && !layer.is_stacked() && reads_up;
    const bool keeps_hidden = wants_down && (!before_down || memory == Memory::compiled);
    return {before_gate, before_up, before_down, reads_up, drops_up, keeps_hidden};
  }
};

void keep(GatedNode& node, const gated::Layer& layer, const gated::Down& down, const Needs& needs,
          const Triple& made) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  const auto& [hidden, gate_z, up_z] = made;
  const bool drops_up = needs.drops_up;
  if (requires_grad(gate) || requires_grad(up) || drops_up) node.keep_input(input);
  if (requires_grad(input)) node.keep_weight(gate_index, gate);
  if (!layer.is_stacked() && (requires_grad(input) || drops_up)) node.keep_weight(up_index, *up);
  if (drops_up && has_value(up_bias)) node.keep_weight(up_bias_index, *up_bias);
  if (needs.before_down) {
    if (down.exists()) node.keep_weight(down_index, down.weight);
    node.keep(gate_z_index, gate_z);
    if (up_z.defined() && needs.reads_up && !drops_up) node.keep(up_z_index, up_z);
  }
  if (needs.keeps_hidden) node.keep(hidden_index, hidden);
}

}  // namespace

Tensor gated_with_gradient(const gated::Layer& layer, const gated::Down& down,
                           Activation activation, Memory memory) {
  const auto& [input, gate, up, gate_bias, up_bias] = layer;
  const auto needs = Needs::of(layer, down, memory);
  Triple made;  // the layer's output and the two pre-activations
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    // If they are two tensors, one may be left out; a checkpoint may find the weights elsewhere.
    const bool may_join = needs.before_gate && !needs.drops_up && are_kept_as_they_are();
    made = dispatch::gated_forward(layer, activation, needs.before_down, may_join);
    const auto& hidden = std::get<0>(made);
    output = down.exists() ? fused::linear(hidden, down.weight, down.bias) : hidden;
  }
  const bool is_joined = !layer.is_stacked() && !std::get<2>(made).defined();
  const auto node = make_node<GatedNode>(
      edge_list{edge_of(input), edge_of(gate), edge_of(up), edge_of(gate_bias), edge_of(up_bias),
                edge_of(down.weight), edge_of(down.bias)},
      Form{activation,
           !layer.is_stacked(),
           down.exists(),
           is_joined,
           needs.drops_up,
           memory == Memory::compiled,
           {grad_lies_by_columns(gate), has_value(up) && grad_lies_by_columns(*up),
            down.exists() && grad_lies_by_columns(down.weight)}});
  set_history(output, node);
  keep(*node, layer, down, needs, made);
  announce(node);
  return output;
}

}  // namespace fused::autograd
