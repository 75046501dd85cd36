// The node of fused::mlp. In its backward every hidden layer's activation derivative and bias
// gradient come out of the next layer's step, with no protocol needed: it is all in one place.

#include "autograd/accumulation.h"
#include "autograd/double_backward.h"
#include "autograd/nodes.h"
#include "autograd/recompute.h"
#include "core/aten_activation.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <algorithm>

namespace fused::autograd {
namespace {

// Where the tensors of a chain of n layers stand among the node's edges: input, weights, biases.
struct Edges {
  static constexpr size_t input = 0;

  size_t layers;

  static Edges of(size_t edges) { return {(edges - 1) / 2}; }
  size_t weight(size_t layer) const { return 1 + layer; }
  size_t bias(size_t layer) const { return 1 + layers + layer; }
};

// Of one layer what the node keeps: its input, its weight and, if hidden, what act' is read from.
// Each is undefined where torch would not keep it either, or where low memory computes it again.
struct Layer {
  enum { input_index, weight_index, saved_index, indices };

  Tensor input, weight, saved;
};

// What does not change from call to call.
struct Form {
  Activation activation;
  bool by_columns;  // the weight's gradient of the lowest trained layer, whose weight is not kept
  bool may_part;  // the lower layers may become a node of their own, which reads what this one does
};

// The gradients of a node's first layers, given that of what comes out of the last of them, with
// its activation.
class Chain {
 public:
  // The tensors kept for `work` are given later.
  Chain(Work work, const Form& form, size_t layers)
      : work_(std::move(work)), form_(form), layers_(layers), kept_(layers) {
    const bool takes_all = !form.may_part && at::GradMode::is_enabled();
    while (lowest_ + 1 < layers_ && (takes_all ? is_frozen(lowest_) : is_idle(lowest_))) ++lowest_;
  }

  // The saved tensors that the wanted gradients are made of: a layer further down may have been
  // written to, or not be asked for.
  std::pair<size_t, size_t> needed() const {
    const size_t first = Layer::indices * lowest_;
    // The activation of the layer below gives the lowest layer's input where that is not kept.
    return {lowest_ == 0 ? 0 : first - 1, Layer::indices * layers_};
  }

  variable_list gradients(const Tensor& grad, const variable_list& variables) {
    const auto [first, last] = needed();
    for (size_t i = first; i < last; ++i) {
      auto& layer = kept_[i / Layer::indices];
      (i % Layer::indices == Layer::input_index    ? layer.input
       : i % Layer::indices == Layer::weight_index ? layer.weight
                                                   : layer.saved) = variables[i - first];
    }
    if (must_be_differentiable(grad, variables)) {
      reconnect_layers(grad);
      go_down<reference::LinearFormula>(grad, variables);
    } else {
      const KernelsOnly guard;
      go_down<Kernels>(grad, variables);
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
  bool is_frozen(size_t layer) const {  // nothing was kept of it
    const auto edges = {Edges::input, edges_.weight(layer), edges_.bias(layer)};
    return std::ranges::none_of(edges, [&](size_t edge) { return work_.edges[edge].is_valid(); });
  }
  bool goes_below(size_t layer) const { return layer > lowest_ || wants_input(); }
  bool is_hidden(size_t layer) const { return layer + 1 < edges_.layers; }

  // The steps under the formula's names.
  struct Kernels {
    static constexpr auto activation_backward = steps::activation_backward;
    static constexpr auto linear_backward = steps::linear_backward;
    static constexpr auto linear_backward_across = steps::linear_backward_across;
  };

  template <class Steps>
  void go_down(const Tensor& grad, const variable_list& variables) {
    constexpr bool usual = std::is_same_v<Steps, Kernels>;
    const auto target_of = [&](size_t edge) {
      return usual ? accumulation::target_of(work_.node.get(), edge, variables) : std::nullopt;
    };
    const auto put_bias = [&](size_t layer, const Tensor& made) {
      if (!wants_bias(layer)) return;
      const auto sum = target_of(edges_.bias(layer));
      result_[edges_.bias(layer)] = sum ? sum->add(made, {}) : made;
    };
    auto dz = grad;
    if (const size_t top = layers_ - 1; is_hidden(top)) {
      Tensor grad_bias;
      std::tie(dz, grad_bias) =
          Steps::activation_backward(grad, kept_[top].saved, form_.activation, wants_bias(top));
      put_bias(top, grad_bias);
    }
    for (size_t i = layers_; i-- > lowest_;) {
      // A hidden layer's bias gradient has come with the step of the layer above.
      const auto sum = target_of(edges_.weight(i));
      const bool wants_sum = wants_bias(i) && !is_hidden(i);
      const auto bias_sum = wants_sum ? target_of(edges_.bias(i)) : std::nullopt;
      const std::array<bool, 3> mask{goes_below(i), wants_weight(i) && !sum,
                                     wants_sum && !bias_sum};
      auto kept_input = kept_[i].input;
      if (usual && wants_weight(i) && !kept_input.defined()) {
        kept_input = activated(kept_[i - 1].saved, form_.activation);
      }
      const auto [input, weight] = fill_in(kept_input, kept_[i].weight, dz, form_.by_columns);
      const auto grad_output = dz;
      const steps::LinearBackward layer{grad_output,      input, weight, std::nullopt,
                                        Activation::none, mask};
      Tensor grad_weight, grad_bias, grad_bias_below;
      if (i > lowest_) {
        std::tie(dz, grad_weight, grad_bias, grad_bias_below) = Steps::linear_backward_across(
            layer, {kept_[i - 1].saved, form_.activation, wants_bias(i - 1)});
      } else {
        std::tie(dz, grad_weight, grad_bias) = Steps::linear_backward(layer);
      }
      if (sum) grad_weight = sum->add(grad_output, kept_input);
      if (wants_weight(i)) result_[edges_.weight(i)] = grad_weight;
      if (wants_sum) {
        result_[edges_.bias(i)] = bias_sum ? bias_sum->add(grad_output, {}) : grad_bias;
      }
      if (i > lowest_) put_bias(i - 1, grad_bias_below);  // the gradient above has been read
    }
    if (wants_input()) result_[Edges::input] = dz;
  }

  // create_graph: puts the tensors that the steps read back into the graph.
  void reconnect_layers(const Tensor& grad) {
    kept_[lowest_].input = lowest_input();
    for (size_t i = lowest_; i < layers_; ++i) {
      auto& layer = kept_[i];
      const auto like = is_hidden(i) ? hidden_of(i, grad) : grad;  // [*, out] of this layer
      auto [input, weight] = fill_in(layer.input, layer.weight, like, form_.by_columns);
      if (i == lowest_ && i > 0) input = above_lower_layers(input);
      layer.input = input, layer.weight = weight;
      if (!is_hidden(i)) break;
      const auto from = i == 0 ? work_.edges[Edges::input] : edge_of(input);
      const auto preactivation = reconnect(
          like, input, weight, {from, work_.edges[edges_.weight(i)], work_.edges[edges_.bias(i)]});
      const auto output = activate(preactivation, form_.activation);
      layer.saved = saved_for(form_.activation) == Saved::output ? output : preactivation;
      if (i + 1 < layers_) kept_[i + 1].input = output;
    }
  }

  // What goes into the lowest layer; undefined where nobody reads its values.
  Tensor lowest_input() const {
    const auto& input = kept_[lowest_].input;
    // The weight's gradient may be asked for later.
    const bool is_read = wants_weight(lowest_) || work_.edges[edges_.weight(lowest_)].is_valid();
    if (input.defined() || !is_read) return input;
    return activate(kept_[lowest_ - 1].saved, form_.activation);
  }

  // The same as a function of all that lies below.
  Tensor above_lower_layers(const Tensor& input) const;

  // A hidden layer's output or pre-activation. Where only ReLU's bit mask was kept: the output that
  // the next layer has kept, else any with the same signs.
  Tensor hidden_of(size_t layer, const Tensor& grad) const {
    const auto& saved = kept_[layer].saved;
    if (saved.scalar_type() != at::kByte) return saved;
    if (layer + 1 == layers_) return signs_of_mask(saved, grad, grad.sym_size(-1));
    const auto& above = kept_[layer + 1];
    return above.input.defined() ? above.input
                                 : signs_of_mask(saved, grad, above.weight.sym_size(1));
  }

  const Work work_;
  const Form form_;
  const size_t layers_;
  const Edges edges_ = Edges::of(work_.edges.size());
  size_t lowest_ = 0;  // the lowest layer with anything to do
  std::vector<Layer> kept_;
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
      auto* kept = &kept_[Layer::indices * i];
      // Nobody else has the inputs of the layers above.
      kept[Layer::input_index] = i == 0 ? saved_input(layers[i].input)
                                        : SavedVariable(layers[i].input, /*is_output=*/false);
      kept[Layer::weight_index] = saved_weight(layers[i].weight);
      kept[Layer::saved_index] = SavedVariable(layers[i].saved, /*is_output=*/false);
      remember_bits(Layer::indices * i + Layer::saved_index, layers[i].saved);
    }
  }

  // Of the first `layers`, as far as `wanted` says.
  variable_list gradients_of(size_t layers, const Tensor& grad, std::vector<bool> wanted) {
    Chain chain({{}, std::move(wanted), next_edges(), getptr()}, form_, layers);
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
    return {static_cast<int64_t>(form_.activation), form_.by_columns};
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
  void release_variables() override {}  // which are the whole chain's

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

Tensor Chain::above_lower_layers(const Tensor& input) const {
  const bool has_gradient = kept_[lowest_].weight.defined();
  if (!has_gradient || !work_.node || !at::GradMode::is_enabled()) return input;
  const auto result = input.detach();
  auto whole = node_cast<MlpNode>(work_.node);
  const auto node = make_node<LowerLayersNode>(std::move(whole), lowest_);
  set_history(result, node);
  announce(node);
  return result;
}

}  // namespace

Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory) {
  const size_t count = weights.size();
  edge_list edges{edge_of(input)};
  for (const auto& weight : weights) edges.push_back(edge_of(weight));
  for (const OptionalTensor& bias : biases) edges.push_back(edge_of(bias));
  const auto trained =
      std::ranges::find_if(weights, [](const Tensor& w) { return w.requires_grad(); });
  const bool by_columns = trained != weights.end() && grad_lies_by_columns(*trained);
  const auto node =
      make_node<MlpNode>(std::move(edges), Form{activation, by_columns, are_kept_as_they_are()});

  std::vector<Layer> kept(count);
  std::vector<Tensor> in_one;
  if (input.is_cuda() && memory == Memory::standard && !is_traced(input)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    in_one = dispatch::MlpInOne::call(input, weights, biases, name(activation));
  }
  auto hidden = input;
  bool below = input.requires_grad();  // whether a gradient goes into the layer's input
  for (size_t i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const OptionalTensor bias = biases.get(i);
    const bool recomputable = i > 0 && memory == Memory::low &&
                              saved_for(activation) == Saved::preactivation &&
                              kept[i - 1].saved.defined();
    if (weights[i].requires_grad() && !recomputable) kept[i].input = hidden;
    if (below) kept[i].weight = weights[i];
    below = below || weights[i].requires_grad() || (has_value(bias) && bias->requires_grad());

    // The output of ReLU that the next layer keeps serves this one as well.
    const auto own = last ? Activation::none : activation;
    const bool output_kept = saved_for(own) == Saved::output && weights[i + 1].requires_grad();
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (!in_one.empty()) {
      hidden = in_one[i];
      if (below && !last) kept[i].saved = in_one.size() > count ? in_one[count + i] : hidden;
    } else if (below) {
      std::tie(hidden, kept[i].saved) = forward_for_training(
          hidden, weights[i], bias, own, output_kept ? Memory::standard : memory);
    } else {
      hidden = forward_for_inference(hidden, weights[i], bias, own);
    }
  }
  set_history(hidden, node);
  node->keep(kept);
  announce(node);
  return hidden;
}

}  // namespace fused::autograd
