// The node of fused::mlp. The backward goes down layer by layer: the step of a layer gives the
// gradient of its weight, applies act' of the layer below to the gradient of its input, and sums
// that layer's bias gradient. In the last backward over a graph it frees what it has read before it
// makes room for more.

#include "autograd/accumulation.h"
#include "autograd/double_backward.h"
#include "autograd/nodes.h"
#include "core/aten_activation.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <algorithm>
#include <utility>

namespace fused::autograd {
namespace {

// A chain's edges: input, weights, biases.
struct Edges {
  static constexpr size_t input = 0;

  size_t layers;

  static Edges of(size_t edges) { return {(edges - 1) / 2}; }
  size_t weight(size_t layer) const { return 1 + layer; }
  size_t bias(size_t layer) const { return 1 + layers + layer; }
};

// The tensors that the node keeps of a layer: its input, its weight and, if hidden, the tensor that
// act' is read from. One is undefined if torch would not keep it either, or if low memory computes
// it again.
struct Layer {
  enum Index { input_index, weight_index, saved_index, indices };

  static constexpr size_t at(size_t layer, Index index) { return indices * layer + index; }

  Tensor input, weight, saved;
};

// The facts of a node that compiled autograd may treat as constant.
struct Form {
  Activation activation;
  bool by_columns;  // the weight's gradient of the lowest trained layer, whose weight is not kept
  bool may_part;    // the lower layers may become a node of their own that reads this one's tensors
};

// Computes the gradients of a chain's first layers from the gradient of the last one's output,
// after its activation.
class Chain {
 public:
  // The tensors kept for `work` are given later.
  Chain(Work work, const Form& form, size_t layers)
      : work_(std::move(work)), form_(form), layers_(layers), kept_(Layer::indices * layers) {
    const bool takes_all = !form.may_part && at::GradMode::is_enabled();
    while (lowest_ + 1 < layers_ && (takes_all ? is_frozen(lowest_) : is_idle(lowest_))) ++lowest_;
  }

  // The saved tensors that the wanted gradients are made of: a layer further down may have been
  // written to, or not be asked for.
  std::pair<size_t, size_t> needed() const {
    const size_t first = Layer::indices * lowest_;
    // If the lowest layer's input was not saved, the activation of the layer below gives it.
    return {lowest_ == 0 ? 0 : first - 1, kept_.size()};
  }

  variable_list gradients(const Tensor& grad, variable_list variables) {
    const bool is_differentiable = must_be_differentiable(grad, variables);
    std::ranges::move(variables, kept_.begin() + needed().first);
    if (is_differentiable) {
      work_.releases = false;  // the graph of the gradients reads it again
      reconnect_layers(grad);
      go_down<reference::LinearFormula>(grad);
    } else {
      const KernelsOnly guard;
      go_down<Kernels>(grad);
    }
    return std::move(result_);
  }

 private:
  bool wants_input() const { return work_.wanted[Edges::input]; }
  bool wants_weight(size_t layer) const { return work_.wanted[edges_.weight(layer)]; }
  bool wants_bias(size_t layer) const { return work_.wanted[edges_.bias(layer)]; }
  bool is_idle(size_t layer) const {
    return !wants_input() && !wants_weight(layer) && !wants_bias(layer);
  }
  bool is_frozen(size_t layer) const {  // no tensor of it was saved
    const auto edges = {Edges::input, edges_.weight(layer), edges_.bias(layer)};
    return std::ranges::none_of(edges, [&](size_t edge) { return work_.edges[edge].is_valid(); });
  }
  bool goes_below(size_t layer) const { return layer > lowest_ || wants_input(); }
  bool is_hidden(size_t layer) const { return layer + 1 < edges_.layers; }

  Tensor& input(size_t layer) { return kept_[Layer::at(layer, Layer::input_index)]; }
  Tensor& weight(size_t layer) { return kept_[Layer::at(layer, Layer::weight_index)]; }
  Tensor& saved(size_t layer) { return kept_[Layer::at(layer, Layer::saved_index)]; }

  void done_with(size_t layer, Layer::Index index) {
    const auto at = Layer::at(layer, index);
    work_.done_with(kept_[at], at);
  }

  // ---- the way down ----------------------------------------------------------------------------

  // The kernels under the names of the formula's functions.
  struct Kernels {
    static constexpr auto activation_backward = steps::activation_backward;
    static constexpr auto linear_backward = steps::linear_backward;
    static constexpr auto linear_backward_across = steps::linear_backward_across;
  };
  template <class Steps>
  static constexpr bool are_kernels = std::is_same_v<Steps, Kernels>;

  template <class Steps>
  std::optional<accumulation::Target> target_of(size_t edge) const {
    if constexpr (!are_kernels<Steps>) return std::nullopt;
    return accumulation::target_of(work_.node.get(), edge, kept_);
  }

  template <class Steps>
  void go_down(const Tensor& grad) {
    // Each step would copy an expanded gradient, such as a sum's.
    const bool is_copied = are_kernels<Steps> && !grad.is_non_overlapping_and_dense();
    auto dz = is_copied ? grad.contiguous() : grad;
    if (const size_t top = layers_ - 1; is_hidden(top)) {
      Tensor grad_bias;
      std::tie(dz, grad_bias) =
          Steps::activation_backward(grad, saved(top), form_.activation, wants_bias(top));
      put_hidden_bias<Steps>(top, grad_bias);
    }
    for (size_t i = layers_; i-- > lowest_;) dz = step_down<Steps>(i, dz);
    if (wants_input()) result_[Edges::input] = dz;
  }

  // Computes the gradients of a layer's parameters from dz. Returns dz of the layer below, or the
  // gradient of the lowest layer's input.
  template <class Steps>
  Tensor step_down(size_t i, const Tensor& dz) {
    const auto weight_edge = edges_.weight(i), bias_edge = edges_.bias(i);
    const bool wants_own_bias = wants_bias(i) && !is_hidden(i);  // else the step above has put it
    const auto weight_sum = target_of<Steps>(weight_edge);
    const auto bias_sum = wants_own_bias ? target_of<Steps>(bias_edge) : std::nullopt;
    const std::array<bool, 3> mask{goes_below(i), wants_weight(i) && !weight_sum,
                                   wants_own_bias && !bias_sum};
    if (are_kernels<Steps> && wants_weight(i) && !input(i).defined()) {
      input(i) = activated(saved(i - 1), form_.activation, Time::again);
    }
    if (weight_sum) result_[weight_edge] = weight_sum->add(dz, input(i));
    if (bias_sum) result_[bias_edge] = bias_sum->add(dz, {});
    if (mask[1] && !frees_input_first(i)) return step_together<Steps>(i, dz, mask);

    if (mask[1]) step_together<Steps>(i, dz, {false, true, mask[2]});
    done_with(i, Layer::input_index);
    return step_together<Steps>(i, dz, {mask[0], false, mask[2] && !mask[1]});
  }

  // Computes the gradients that the mask names by one step.
  template <class Steps>
  Tensor step_together(size_t i, const Tensor& dz, const std::array<bool, 3>& mask) {
    if (!mask[0] && !mask[1] && !mask[2]) return {};
    const bool goes_across = mask[0] && i > lowest_;
    Tensor below, grad_weight, grad_bias, hidden_bias;
    {
      const auto [x, w] = fill_in(input(i), weight(i), dz, form_.by_columns);
      const steps::LinearBackward layer{dz, x, w, std::nullopt, Activation::none, mask};
      if (goes_across) {
        std::tie(below, grad_weight, grad_bias, hidden_bias) = Steps::linear_backward_across(
            layer, {saved(i - 1), form_.activation, wants_bias(i - 1)});
      } else {
        std::tie(below, grad_weight, grad_bias) = Steps::linear_backward(layer);
      }
    }
    if (mask[1]) result_[edges_.weight(i)] = grad_weight;
    if (mask[2]) result_[edges_.bias(i)] = grad_bias;
    if (!goes_across) return below;
    put_hidden_bias<Steps>(i - 1, hidden_bias);
    for (const auto index : {Layer::input_index, Layer::weight_index}) done_with(i, index);
    done_with(i - 1, Layer::saved_index);
    return below;
  }

  // Stores a hidden layer's bias gradient, which the step of the layer above computes.
  template <class Steps>
  void put_hidden_bias(size_t layer, const Tensor& made) {
    if (!wants_bias(layer)) return;
    const auto sum = target_of<Steps>(edges_.bias(layer));
    result_[edges_.bias(layer)] = sum ? sum->add(made, {}) : made;
  }

  // Returns whether the weight's gradient is computed first, so that the layer's input is freed
  // before the step allocates dz. That takes one more launch, which slows down small layers, and
  // graphs would record it.
  bool frees_input_first(size_t i) {
    constexpr int64_t large = 1 << 20;  // bytes
    const auto& hidden = input(i);
    if (!work_.releases || i == lowest_ || hidden.is_same(saved(i - 1))) return false;
    const bool is_subclass = hidden.key_set().has(c10::DispatchKey::Python);
    return !is_subclass && hidden.numel() * hidden.element_size() >= large;
  }

  // ---- create_graph ----------------------------------------------------------------------------

  // Puts the tensors that the steps read back into the graph.
  void reconnect_layers(const Tensor& grad) {
    input(lowest_) = lowest_input();
    for (size_t i = lowest_; i < layers_; ++i) {
      const auto like = is_hidden(i) ? hidden_of(i, grad) : grad;  // [*, out] of this layer
      auto [x, w] = fill_in(input(i), weight(i), like, form_.by_columns);
      if (i == lowest_ && i > 0) x = above_lower_layers(x);
      input(i) = x, weight(i) = w;
      if (!is_hidden(i)) break;
      const auto from = i == 0 ? work_.edges[Edges::input] : edge_of(x);
      const auto preactivation =
          reconnect(like, x, w, {from, work_.edges[edges_.weight(i)], work_.edges[edges_.bias(i)]});
      const auto output = activate(preactivation, form_.activation);
      saved(i) = saved_for(form_.activation) == Saved::output ? output : preactivation;
      if (i + 1 < layers_) input(i + 1) = output;
    }
  }

  // Returns the lowest layer's input; undefined if nothing reads its values.
  Tensor lowest_input() {
    // The weight's gradient may be asked for later.
    const bool is_read = wants_weight(lowest_) || work_.edges[edges_.weight(lowest_)].is_valid();
    if (input(lowest_).defined() || !is_read) return input(lowest_);
    return activate(saved(lowest_ - 1), form_.activation);
  }

  // Returns that input as a function of all layers below.
  Tensor above_lower_layers(const Tensor& input);

  // Returns a hidden layer's output or pre-activation. If only ReLU's bit mask was saved, it is the
  // output that the next layer saved, or else any tensor with the same signs.
  Tensor hidden_of(size_t layer, const Tensor& grad) {
    const auto& kept = saved(layer);
    if (kept.scalar_type() != at::kByte) return kept;
    if (layer + 1 == layers_) return signs_of_mask(kept, grad, grad.sym_size(-1));
    if (input(layer + 1).defined()) return input(layer + 1);
    return signs_of_mask(kept, grad, weight(layer + 1).sym_size(1));
  }

  Work work_;
  const Form form_;
  const size_t layers_;
  const Edges edges_ = Edges::of(work_.edges.size());
  size_t lowest_ = 0;   // the lowest layer that has gradients to compute
  variable_list kept_;  // by layer, as Layer::at says
  variable_list result_ = variable_list(work_.edges.size());
};

class MlpNode final : public Node {
 public:
  MlpNode(edge_list&& edges, const Form& form)
      : Node(std::move(edges)),
        form_(form),
        kept_(Layer::indices * Edges::of(num_outputs()).layers) {}

  void keep(const std::vector<Layer>& layers) {
    for (size_t i = 0; i < layers.size(); ++i) {
      auto* kept = &kept_[Layer::at(i, Layer::input_index)];
      // Only this node holds the inputs of the layers above.
      kept[Layer::input_index] = i == 0 ? saved_input(layers[i].input)
                                        : SavedVariable(layers[i].input, /*is_output=*/false);
      kept[Layer::weight_index] = saved_weight(layers[i].weight);
      kept[Layer::saved_index] = SavedVariable(layers[i].saved, /*is_output=*/false);
      remember_bits(Layer::at(i, Layer::saved_index), layers[i].saved);
    }
  }

  // The wanted gradients of the first `layers` layers.
  variable_list gradients_of(size_t layers, const Tensor& grad, std::vector<bool> wanted) {
    Work work{{}, std::move(wanted), next_edges(), getptr(), runs_last()};
    Chain chain(std::move(work), form_, layers);
    const auto [first, last] = chain.needed();
    return chain.gradients(grad, unpack(first, last));
  }

  std::string name() const override { return "FusedMlpBackward"; }

 protected:
  friend class LowerLayersNode;

  variable_list gradients(const Tensor& grad) override {
    return gradients_of(Edges::of(num_outputs()).layers, grad, wanted_of(*this));
  }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    return {number(form_.activation), form_.by_columns};
  }
  Backward backward() const override {
    auto form = form_;
    form.may_part = false;
    return [form](const Work& work, const Tensor& grad) {
      const auto& all = work.kept;
      Chain chain({{}, work.wanted, work.edges}, form, all.size() / Layer::indices);
      const auto [first, last] = chain.needed();
      return chain.gradients(grad, {all.begin() + first, all.begin() + last});
    };
  }

 private:
  const Form form_;
  std::vector<SavedVariable> kept_;
};

// The lower layers of a chain as a node of their own, for the second derivative of those above.
class LowerLayersNode final : public Node {
 public:
  LowerLayersNode(NodePtr<MlpNode> whole, size_t layers)
      : Node(edges_of(*whole, layers)), whole_(std::move(whole)), layers_(layers) {}

  std::string name() const override { return "FusedMlpLowerLayersBackward"; }
  void release_variables() override {}  // the whole chain's node owns them

 protected:
  variable_list gradients(const Tensor& grad) override {
    return whole_->gradients_of(layers_, grad, wanted_of(*this));
  }
  // For compiled autograd, which reads no node while others run.
  std::span<SavedVariable> kept() override {
    return whole_->kept().first(Layer::indices * layers_);
  }
  std::vector<int64_t> traits() const override { return whole_->traits(); }
  Backward backward() const override { return whole_->backward(); }

 private:
  static edge_list edges_of(const MlpNode& whole, size_t layers) {
    auto result = whole.next_edges();
    const auto edges = Edges::of(result.size());
    for (size_t i = layers; i < edges.layers; ++i) {
      result[edges.weight(i)] = result[edges.bias(i)] = torch::autograd::Edge();
    }
    return result;
  }

  NodePtr<MlpNode> whole_;
  size_t layers_;
};

Tensor Chain::above_lower_layers(const Tensor& input) {
  const bool has_gradient = weight(lowest_).defined();
  if (!has_gradient || !work_.node || !at::GradMode::is_enabled()) return input;
  const auto result = input.detach();
  auto whole = node_cast<MlpNode>(work_.node);
  const auto node = make_node<LowerLayersNode>(std::move(whole), lowest_);
  set_history(result, node);
  announce(node);
  return result;
}

// ---- the forward -------------------------------------------------------------------------------

struct Arguments {
  const Tensor& input;
  at::TensorList weights;
  const c10::List<OptionalTensor>& biases;
  Activation activation;
  Memory memory;

  bool is_trained(size_t layer) const {
    const OptionalTensor bias = biases.get(layer);
    return weights[layer].requires_grad() || (has_value(bias) && bias->requires_grad());
  }
};

NodePtr<MlpNode> node_of(const Arguments& call) {
  edge_list edges{edge_of(call.input)};
  for (const auto& weight : call.weights) edges.push_back(edge_of(weight));
  for (const OptionalTensor& bias : call.biases) edges.push_back(edge_of(bias));
  const auto trained =
      std::ranges::find_if(call.weights, [](const Tensor& w) { return w.requires_grad(); });
  const bool by_columns = trained != call.weights.end() && grad_lies_by_columns(*trained);
  return make_node<MlpNode>(std::move(edges),
                            Form{call.activation, by_columns, are_kept_as_they_are()});
}

// Runs a small network in one launch: every layer's output, then the tensors that act' is read
// from. Empty if no kernel runs the whole network.
std::vector<Tensor> run_in_one(const Arguments& call) {
  const bool may_run =
      call.input.is_cuda() && call.memory == Memory::standard && !is_traced(call.input);
  if (!may_run) return {};
  const at::AutoDispatchBelowADInplaceOrView guard;
  return dispatch::MlpInOne::call(call.input, call.weights, call.biases, number(call.activation));
}

// Returns a layer's output and the tensor that act' is read from. `below`: its product needs a
// gradient.
Pair run_layer(const Arguments& call, size_t i, const Tensor& input, bool below) {
  const bool is_last = i + 1 == call.weights.size();
  const auto activation = is_last ? Activation::none : call.activation;
  const OptionalTensor bias = call.biases.get(i);
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (!below) {
    return {forward_for_inference(input, call.weights[i], bias, activation), Tensor()};
  }
  // The next layer saves ReLU's output, which this layer's backward can read as well.
  const bool is_output_kept =
      saved_for(activation) == Saved::output && call.weights[i + 1].requires_grad();
  return forward_for_training(input, call.weights[i], bias, activation,
                              is_output_kept ? Memory::standard : call.memory);
}

}  // namespace

Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory) {
  const Arguments call{input, weights, biases, activation, memory};
  const auto node = node_of(call);
  const size_t count = weights.size();
  const auto in_one = run_in_one(call);
  const bool recomputes = memory == Memory::low && saved_for(activation) == Saved::preactivation;
  std::vector<Layer> kept(count);
  auto hidden = input;
  bool below = input.requires_grad();  // whether a gradient goes into the layer's input
  for (size_t i = 0; i < count; ++i) {
    const bool is_recomputed = recomputes && i > 0 && kept[i - 1].saved.defined();
    if (weights[i].requires_grad() && !is_recomputed) kept[i].input = hidden;
    if (below) kept[i].weight = weights[i];
    below = below || call.is_trained(i);
    if (in_one.empty()) {
      std::tie(hidden, kept[i].saved) = run_layer(call, i, hidden, below);
    } else {
      hidden = in_one[i];
      const bool is_hidden = i + 1 < count;
      if (below && is_hidden) kept[i].saved = in_one.size() > count ? in_one[count + i] : hidden;
    }
  }
  set_history(hidden, node);
  node->keep(kept);
  announce(node);
  return hidden;
}

}  // namespace fused::autograd
