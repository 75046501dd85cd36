// A chain of layers in FP8. Forward: cast, multiply, and the activation with the next layer's cast
// in one pass. Backward, from the last layer down: act' with its cast and the bias's sum in one
// pass, then the weight's gradient and the gradient of what the layer was given.

#include "autograd/nodes.h"
#include "core/aten_activation.h"
#include "core/explain.h"
#include "float8/arguments.h"
#include "float8/blocks.h"
#include "float8/node.h"
#include "float8/support.h"
#include "reference/linear.h"

#include <algorithm>

namespace fused::float8 {
namespace {

// What is kept of each layer, undefined where no gradient is made of it.
struct Layer {
  Tensor input, inverse_input;    // columns and scale of what it was given
  Tensor weight, inverse_weight;  // columns and scale
  Tensor z;                       // what act' is read from: z itself, or of ReLU the bit mask
};
constexpr size_t per_layer = 5;

struct Form {
  const char* op;
  Activation activation;
  bool activates_last;
  at::ScalarType dtype;

  variable_list backward(Work work, const Tensor& grad) const;
  std::vector<int64_t> traits() const {
    return {static_cast<int64_t>(activation), activates_last, static_cast<int64_t>(dtype)};
  }
};

// The node's edges: input, weights, biases.
size_t weight_edge(size_t layer) { return 1 + layer; }
size_t bias_edge(size_t layer, size_t layers) { return 1 + layers + layer; }

// ---- the backward ------------------------------------------------------------------------------

class Backward {
 public:
  Backward(Work work, const Form& form)
      : work_(std::move(work)), form_(form), layers_((work_.wanted.size() - 1) / 2) {
    while (lowest_ + 1 < layers_ && is_idle(lowest_)) ++lowest_;
  }

  variable_list run(const Tensor& grad) {
    auto dz = top(reference::as_rows(grad));
    for (size_t i = layers_; i-- > lowest_;) {
      if (wants_bias(i)) result_[bias_edge(i, layers_)] = dz.sum;
      const auto below = step_down(i, dz.cast);
      if (i > lowest_) {
        dz = activation_backward(below, kept(i - 1).z, form_.activation, wants_bias(i - 1));
        done_with(i - 1, 4, 5);
      } else if (below.defined()) {
        result_[0] = like_rows_of(grad, below);
      }
    }
    return std::move(result_);
  }

 private:
  bool wants_weight(size_t layer) const { return work_.wanted[weight_edge(layer)]; }
  bool wants_bias(size_t layer) const { return work_.wanted[bias_edge(layer, layers_)]; }
  bool is_idle(size_t layer) const {
    return !work_.wanted[0] && !wants_weight(layer) && !wants_bias(layer);
  }

  Layer kept(size_t layer) const {
    const auto* first = &work_.kept[per_layer * layer];
    return {first[0], first[1], first[2], first[3], first[4]};
  }

  // Frees tensors of a layer, unless the graph is run again.
  void done_with(size_t layer, size_t first, size_t last) {
    if (!work_.releases) return;
    for (size_t k = per_layer * layer + first; k < per_layer * layer + last; ++k) {
      work_.kept[k].reset();
      static_cast<Node&>(*work_.node).release(k);
    }
  }

  GradientCast top(const Tensor& grad) {
    const size_t last = layers_ - 1;
    if (!form_.activates_last) return cast_gradient(grad, wants_bias(last));
    return activation_backward(grad, kept(last).z, form_.activation, wants_bias(last));
  }

  // Puts the weight's gradient. -> the gradient of what the layer was given.
  Tensor step_down(size_t i, const Cast& dz) {
    const auto [x, inverse_x, w, inverse_w, z] = kept(i);
    if (wants_weight(i)) {
      result_[weight_edge(i)] = weight_gradient(dz, {{}, x, inverse_x}, form_.dtype);
    }
    Tensor below;
    if (i > lowest_ || work_.wanted[0]) {
      below = input_gradient(dz, {{}, w, inverse_w}, form_.dtype);
    }
    done_with(i, 0, 4);
    return below;
  }

  Work work_;
  const Form& form_;
  const size_t layers_;
  size_t lowest_ = 0;  // the gradients go no further down
  variable_list result_ = variable_list(work_.wanted.size());
};

variable_list Form::backward(Work work, const Tensor& grad) const {
  return Backward(std::move(work), *this).run(reference::dense(grad));
}

// ---- the forward -------------------------------------------------------------------------------

bool activates(const Chain& chain, size_t layer) {
  return layer + 1 < chain.all_weights.size() || chain.activates_last;
}

// Fills what the node keeps of each layer, if there is a node.
Tensor run(const Chain& chain, std::vector<Layer>* kept) {
  const auto dtype = chain.input.scalar_type();
  const size_t last = chain.all_weights.size() - 1;
  bool below = requires_grad(chain.input);  // a gradient goes into the layer's input
  auto x = cast(reference::as_rows(chain.input));
  for (size_t i = 0;; ++i) {
    const auto& weight = chain.all_weights[i];
    const auto w = cast(weight);
    const auto z = forward_product(x, w, chain.biases[i], dtype);
    if (kept != nullptr) {
      auto& layer = (*kept)[i];
      if (requires_grad(weight)) layer.input = x.columns, layer.inverse_input = x.inverse;
      if (below) layer.weight = w.columns, layer.inverse_weight = w.inverse;
      below = below || requires_grad(weight) || requires_grad(chain.biases[i]);
      if (below && activates(chain, i)) {
        layer.z = chain.activation == Activation::relu ? steps::relu_mask(z) : z;
      }
    }
    if (i == last) {
      const auto y =
          activates(chain, i) ? autograd::activated(z, chain.activation, autograd::Time::first) : z;
      return like_rows_of(chain.input, y);
    }
    x = activation(z, chain.activation);
  }
}

variable_list flat(const std::vector<Layer>& layers) {
  variable_list result;
  for (const auto& layer : layers) {
    for (const auto& tensor :
         {layer.input, layer.inverse_input, layer.weight, layer.inverse_weight, layer.z}) {
      result.push_back(tensor);
    }
  }
  return result;
}

std::string name_of_weight(const Chain& chain, size_t layer) {
  return chain.op == std::string_view(Linear::name) ? "weight"
                                                    : "weights[" + std::to_string(layer) + "]";
}

}  // namespace

std::vector<OptionalTensor> Chain::tensors() const {
  std::vector<OptionalTensor> all{input};
  all.insert(all.end(), all_weights.begin(), all_weights.end());
  all.insert(all.end(), biases.begin(), biases.end());
  return all;
}

void Chain::check() const {
  check_input(op, input);
  auto features = input.sym_size(-1);
  for (size_t i = 0; i < all_weights.size(); ++i) {
    check_layer(op, name_of_weight(*this, i), input, features, all_weights[i], biases[i]);
    features = all_weights[i].sym_size(0);
  }
}

Tensor Chain::forward() const { return run(*this, nullptr); }

Tensor Chain::with_gradient() const {
  std::vector<Layer> kept(all_weights.size());
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = run(*this, &kept);
  }
  torch::autograd::edge_list edges;
  for (const auto& tensor : tensors()) edges.push_back(autograd::edge_of(tensor));
  Versions versions;
  for (size_t i = 0; i < all_weights.size(); ++i) {
    if (i == 0 && kept[i].input.defined()) versions.remember("input", input);
    if (kept[i].weight.defined()) versions.remember(name_of_weight(*this, i), all_weights[i]);
  }
  const auto node = autograd::make_node<BlockNode<Form>>(
      std::move(edges), Form{op, activation, activates_last, input.scalar_type()});
  autograd::set_history(output, node);
  node->keep(flat(kept), std::move(versions));
  autograd::announce(node);
  return output;
}

Tensor Chain::in_own_dtype() const {
  const auto own = [&](const auto& tensor) { return in_dtype(tensor, input.scalar_type()); };
  c10::List<OptionalTensor> own_biases;
  std::vector<Tensor> own_weights;
  for (size_t i = 0; i < all_weights.size(); ++i) {
    own_weights.push_back(own(all_weights[i]));
    own_biases.push_back(own(biases[i]));
  }
  if (!activates_last && all_weights.size() == 1) {
    return fused::linear(input, own_weights[0], own_biases.get(0));
  }
  if (activates_last) {
    return autograd::forward_for_inference(input, own_weights[0], own_biases.get(0), activation);
  }
  return fused::mlp(input, own_weights, own_biases, fused::name(activation));
}

}  // namespace fused::float8
