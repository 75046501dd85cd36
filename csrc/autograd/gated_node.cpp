// The node of fused::linear_glu and fused::gated_mlp. It keeps the input and the two
// pre-activations; what was made of them is computed again in the pass that the backward makes over
// memory anyway. With low memory up's pre-activation of a block is computed again by its product,
// and the layer after linear_glu keeps the pre-activations in place of its input.

#include "autograd/accumulation.h"
#include "autograd/arguments.h"
#include "autograd/double_backward.h"
#include "autograd/handover.h"
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

  // Of the pass: gradients of the pre-activations, of the biases, and the layer's result.
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
  std::optional<handover::Note> note = {};

  bool wants_layer() const {
    return std::any_of(wanted.begin(), wanted.begin() + down_edge, [](bool w) { return w; });
  }

  // Where the graph is not run again, nobody else holds them.
  void drop_preactivations() {
    for (const size_t index : {gate_z_index, up_z_index}) kept[index].reset();
    if (is_running) static_cast<Node&>(*node).done_with(gate_z_index);
  }
};

// ---- the backward ------------------------------------------------------------------------------

// What the pass reads. Up's pre-activation is not kept where only up's gradients can be wanted.
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

// What a backward is made of: kernels, or what is differentiable itself.
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

// The same of a weight of the node's, whose gradient may be added to what is there.
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

// The products of the layer's backward. dz is of both, or of gate.
template <class Steps>
void put_products(const State& state, const Tensor& dz, const Tensor& up_dz,
                  variable_list& result) {
  const auto& wanted = state.wanted;
  const auto &input = state.kept[input_index], &gate = state.kept[gate_index],
             &up = state.kept[up_index];
  const auto& by_columns = state.form.by_columns;
  const bool wants_input = wanted[input_edge];
  if (!state.form.has_up) {
    std::tie(result[input_edge], result[gate_edge], std::ignore) = backward_of_linear<Steps>(
        state, gate_edge, dz, input, gate, by_columns[0], {wants_input, wanted[gate_edge], false});
    return;
  }
  const auto both = state.form.is_joined && wants_input ? gated::joined(gate, up) : Tensor();
  const bool adds = accumulation::target_of(state.node.get(), gate_edge) ||
                    accumulation::target_of(state.node.get(), up_edge);
  if (both.defined() && !adds && wanted[gate_edge] == wanted[up_edge]) {
    const bool wants_weights = wanted[gate_edge];
    Tensor weights;
    std::tie(result[input_edge], weights, std::ignore) =
        backward_of_linear<Steps>(dz, input, both, false, {true, wants_weights, false});
    if (wants_weights) {
      const auto rows = weights.sym_size(0) / 2;
      result[gate_edge] = weights.narrow_symint(0, 0, rows);
      result[up_edge] = weights.narrow_symint(0, rows, rows);
    }
    return;
  }
  const auto [first, second] = state.form.is_joined ? gated::halves(dz) : std::pair(dz, up_dz);
  if (wants_input || wanted[gate_edge]) {
    std::tie(result[input_edge], result[gate_edge], std::ignore) =
        backward_of_linear<Steps>(state, gate_edge, first, input, gate, by_columns[0],
                                  {wants_input, wanted[gate_edge], false});
  }
  if (wanted[up_edge]) {
    result[up_edge] = std::get<1>(backward_of_linear<Steps>(state, up_edge, second, input, up,
                                                            by_columns[1], {false, true, false}));
  }
  // Sharded rows cannot always be viewed as a matrix's, and of a vector eager takes another
  // product.
  if (wants_input && (!are_kernels<Steps> || is_sharded(second) || second.dim() == 1)) {
    const auto through_up = std::get<0>(
        backward_of_linear<Steps>(second, input, up, by_columns[1], {true, false, false}));
    result[input_edge] = result[input_edge] + through_up;
  } else if (wants_input) {
    auto sum = as_rows(result[input_edge]);
    // A compiler fuses a sum of its own with what comes after, where it would copy for an addmm;
    // and vmap has no rule for the form that writes to what it reads.
    if (at::areAnyTensorSubclassLike({sum, second, up})) {
      result[input_edge] =
          result[input_edge] + at::mm(as_rows(second), up).view_as(result[input_edge]);
    } else {
      const explain::Row row("linear_glu", second, up);
      explain::append("ATen addmm");
      at::addmm_out(sum, sum, as_rows(second), up);
    }
  }
}

// The gradients of the pass over memory, or what a consumer has left of them (handover.h).
template <typename Pass>
Quintuple arrive(const Tensor& grad, const std::optional<handover::Note>& note, const Pass& pass) {
  if (!note) return pass(grad);
  const auto& known = note->gradients;
  return {known[0], known[1], known[2], known[3], Tensor()};
}

// Whether the product with down's weight and the pass are one step: only a GPU has a kernel for it,
// which sums no biases, and sharded gradients may have to be summed in between.
bool takes_down(const Tensor& grad, bool is_one_tensor, const std::array<bool, 5>& wanted) {
  return grad.is_cuda() && c10::elementSize(grad.scalar_type()) == 2 && !is_sharded(grad) &&
         wanted[0] && (is_one_tensor || wanted[1]) && !wanted[2] && !wanted[3];
}

template <class Steps>
variable_list gradients(State& state, const Tensor& grad) {
  variable_list result(all_edges);
  const auto& wanted = state.wanted;
  const auto& down = state.kept[down_index];
  const bool has_down = state.form.has_down, by_columns = state.form.by_columns[2];
  auto hidden = std::exchange(state.kept[hidden_index], {});
  const bool wants_hidden = has_down && wanted[down_edge] && !hidden.defined();
  const auto wanted_of_pass = state.form.wanted_of_pass(wanted, wants_hidden);
  Quintuple pass;
  if (state.wants_layer()) {
    const bool in_one = are_kernels<Steps> && has_down &&
                        takes_down(grad, state.form.is_one_tensor(), wanted_of_pass);
    const auto grad_hidden = has_down && !in_one
                                 ? std::get<0>(backward_of_linear<Steps>(grad, {}, down, by_columns,
                                                                         {true, false, false}))
                                 : grad;
    pass = arrive(grad_hidden, state.note, [&](const Tensor& grad_output) {
      const auto [gate_z, up_z] = preactivations(state);
      return Steps::glu_backward({grad_output, gate_z, up_z, state.form.activation, wanted_of_pass,
                                  in_one ? OptionalTensor(down) : std::nullopt});
    });
    if (wanted_of_pass[4]) hidden = std::exchange(std::get<4>(pass), {});
  } else if (wanted_of_pass[4]) {
    const auto [gate_z, up_z] = preactivations(state);
    hidden = Steps::glu(gate_z, up_z, state.form.activation);
  }
  // Room for the gradients of the weights.
  state.note.reset();
  state.drop_preactivations();
  if (has_down && (wanted[down_edge] || wanted[down_bias_edge])) {
    const auto bias_sum = accumulation::target_of(state.node.get(), down_bias_edge, state.kept);
    std::tie(std::ignore, result[down_edge], result[down_bias_edge]) =
        backward_of_linear<Steps>(state, down_edge, grad, hidden, down, by_columns,
                                  {false, wanted[down_edge], wanted[down_bias_edge] && !bias_sum});
    if (bias_sum) result[down_bias_edge] = bias_sum->add(grad, {});
    hidden.reset();
  }
  if (state.wants_layer()) {
    put_bias_gradients(state, pass, result);
    if (wanted_of_pass[0] || wanted_of_pass[1]) {
      put_products<Steps>(state, std::get<0>(pass), std::get<1>(pass), result);
    }
  }
  return result;
}

// create_graph: puts the pre-activations back into the graph, halves of one tensor as two.
void reconnect_layer(State& state) {
  auto& [activation, has_up, has_down, is_joined, is_up_dropped, by_columns] = state.form;
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
  if (is_joined && state.note) {
    auto& known = state.note->gradients;
    std::tie(known[0], known[1]) = gated::halves(known[0]);
    if (known[2].numel() > 0) std::tie(known[2], known[3]) = gated::halves(known[2]);
  }
  is_joined = is_up_dropped = false;
  // The graph needs all that is kept, and each gradient by itself.
  state.node.reset(), state.is_running = false;
}

// The gradients by edge.
variable_list run(State state, const Tensor& grad) {
  variable_list result;
  if (must_be_differentiable(grad, state.kept)) {
    reconnect_layer(state);
    result = gradients<Formulas>(state, grad);
  } else {
    const auto search = handover::find_receiver(state);
    const KernelsOnly guard;
    search.remark();
    result = gradients<Kernels>(state, grad);
    if (const auto& receiver = search.receiver) {
      auto left = receiver->node->derive(result[input_edge], receiver->saved);
      result[input_edge] = left.passed;
      receiver->leave(std::move(left));
    }
  }
  for (size_t i = 0; i < all_edges; ++i) {
    if (!state.wanted[i]) result[i].reset();  // a tensor of no elements
  }
  return result;
}

// ---- the node ----------------------------------------------------------------------------------

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
  void keep_input(const Tensor& input) {
    // up's product is made again of what its first was.
    kept_[input_index] = form_.is_up_dropped ? saved_weight(input) : saved_input(input);
  }

  std::string name() const override {
    return std::string(form_.has_down ? "FusedGatedMlp_" : "FusedLinearGlu_") +
           fused::name(form_.activation) + "_Backward";
  }

  const char* refusal() const override {
    if (form_.has_down) return "no activation before";
    // What is passed on is gate's.
    return form_.wanted_of_pass(wanted_of(*this), false)[0] ? nullptr : "its gate is frozen";
  }

  variable_list lend_saved() override {
    auto gate = lend(gate_z_index);
    return gate.defined() ? variable_list{std::move(gate), lend(up_z_index)} : variable_list();
  }

  handover::Note derive(const Tensor& grad, variable_list saved, Tensor* output) override {
    const auto& gate_z = saved[0];
    OptionalTensor up_z;
    if (!form_.is_one_tensor()) up_z = saved[1];
    const auto wanted = form_.wanted_of_pass(wanted_of(*this), output != nullptr);
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
    auto [work, note] = begin(grad, gate_z_index);
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

  if (requires_grad(gate) || requires_grad(up) || drops_up) node->keep_input(input);
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
