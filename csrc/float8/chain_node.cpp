// A chain of layers in FP8. The forward casts and multiplies; one step does the activation and the
// next layer's cast. The backward goes from the last layer down; one step does act', its cast and
// the bias's gradient, then come the gradients of the weight and of the layer's input.

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

// The saved tensors of each layer; undefined if no gradient needs them.
struct Layer {
  // The input: its columns, or the scale if the backward computes them again from the z below.
  Tensor input, inverse_input, scale_input;
  Tensor weight, inverse_weight;  // columns and scale
  Tensor z;                       // act' is read from it: z itself, or ReLU's bit mask
};
constexpr size_t per_layer = 6;
constexpr size_t z_index = 5;

struct Form {
  const char* op;
  Activation activation;
  bool activates_last;
  at::ScalarType dtype;

  variable_list backward(Work work, const Tensor& grad) const;
  std::vector<int64_t> traits() const {
    return {number(activation), activates_last, static_cast<int64_t>(dtype)};
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
      if (i > lowest_) {
        dz = step_down(i, std::move(dz.cast));
        continue;
      }
      if (work_.wanted[0]) result_[0] = like_rows_of(grad, through(i, dz.cast));
      put_weight_gradient(i, dz.cast, kept(i).input.defined() ? kept(i).input : hidden(i));
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
    return {first[0], first[1], first[2], first[3], first[4], first[z_index]};
  }

  void done_with(size_t layer, size_t first, size_t last) {
    for (size_t k = per_layer * layer + first; k < per_layer * layer + last; ++k) {
      work_.done_with(work_.kept[k], k);
    }
  }

  GradientCast top(const Tensor& grad) {
    const size_t last = layers_ - 1;
    if (!form_.activates_last) return cast_gradient(grad, wants_bias(last), wants_weight(last));
    return activation_backward(grad, kept(last).z, form_.activation, wants_bias(last)).first;
  }

  // Returns the gradient of the layer's input.
  Tensor through(size_t i, const Cast& dz) const {
    const auto layer = kept(i);
    return input_gradient(dz, {{}, layer.weight, layer.inverse_weight}, form_.dtype);
  }

  // Computes the weight's gradient and returns dz of the layer below. One step computes dz, and the
  // columns of this layer's input again if they were not saved.
  GradientCast step_down(size_t i, Cast dz) {
    const auto layer = kept(i);
    const auto below = through(i, dz);
    dz.rows.reset();
    const bool again = wants_weight(i) && !layer.input.defined();
    const auto scale = again ? OptionalTensor(layer.scale_input) : std::nullopt;
    auto [next, made] =
        activation_backward(below, kept(i - 1).z, form_.activation, wants_bias(i - 1), scale);
    done_with(i - 1, z_index, per_layer);
    put_weight_gradient(i, dz, again ? made : layer.input);
    return std::move(next);
  }

  // Returns the columns of a layer's input if the gradient goes no further down.
  Tensor hidden(size_t i) const {
    if (!wants_weight(i)) return {};
    return activation(kept(i - 1).z, form_.activation, /*columns=*/true).cast.columns;
  }

  void put_weight_gradient(size_t i, const Cast& dz, const Tensor& columns) {
    if (wants_weight(i)) {
      const Cast input{{}, columns, kept(i).inverse_input};
      result_[weight_edge(i)] = weight_gradient(dz, input, form_.dtype);
    }
    done_with(i, 0, z_index);
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

// Runs the forward, and fills each layer's saved tensors if there is a node.
class Forward {
 public:
  Forward(const Chain& chain, std::vector<Layer>* kept)
      : chain_(chain),
        dtype_(chain.input.scalar_type()),
        kept_(kept),
        below_(kept != nullptr && requires_grad(chain.input)) {}

  Tensor run() {
    const size_t last = chain_.all_weights.size() - 1;
    auto x = cast(reference::as_rows(chain_.input), trains(0));
    if (trains(0)) keep_input(0, x);
    for (size_t i = 0; i < last; ++i) x = activated(i, x);
    const auto z = product(last, x);
    const auto y = activates(chain_, last)
                       ? autograd::activated(z, chain_.activation, autograd::Time::first)
                       : z;
    return like_rows_of(chain_.input, y);
  }

 private:
  bool trains(size_t i) const { return kept_ != nullptr && requires_grad(chain_.all_weights[i]); }

  void keep_input(size_t i, const Cast& x, const Tensor& scale = {}) {
    auto& layer = (*kept_)[i];
    layer.inverse_input = x.inverse;
    layer.scale_input = scale;
    if (!scale.defined()) layer.input = x.columns;
  }

  // Returns a layer's z, and saves the tensor that act' is read from if a gradient needs it.
  Tensor product(size_t i, const Cast& x) {
    const auto& weight = chain_.all_weights[i];
    const auto w = cast(weight, below_);
    const auto z = forward_product(x, w, chain_.biases[i], dtype_);
    if (kept_ == nullptr) return z;
    auto& layer = (*kept_)[i];
    if (below_) layer.weight = w.columns, layer.inverse_weight = w.inverse;
    below_ = below_ || requires_grad(weight) || requires_grad(chain_.biases[i]);
    if (below_ && activates(chain_, i)) {
      layer.z = chain_.activation == Activation::relu ? steps::relu_mask(z) : z;
    }
    return z;
  }

  // Returns the cast input of the next layer.
  Cast activated(size_t i, const Cast& x) {
    const auto z = product(i, x);
    // The backward computes the columns again from z if it reads z in any case.
    const bool again = below_ && chain_.activation != Activation::relu;
    auto made = activation(z, chain_.activation, trains(i + 1) && !again);
    if (trains(i + 1)) keep_input(i + 1, made.cast, again ? made.scale : Tensor());
    return std::move(made.cast);
  }

  const Chain& chain_;
  const at::ScalarType dtype_;
  std::vector<Layer>* const kept_;
  bool below_;  // a gradient goes into the next layer's input
};

variable_list flat(const std::vector<Layer>& layers) {
  variable_list result;
  for (const auto& layer : layers) {
    for (const auto& tensor : {layer.input, layer.inverse_input, layer.scale_input, layer.weight,
                               layer.inverse_weight, layer.z}) {
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

Tensor Chain::forward() const { return Forward(*this, nullptr).run(); }

Tensor Chain::with_gradient() const {
  std::vector<Layer> kept(all_weights.size());
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = Forward(*this, &kept).run();
  }
  Versions versions;
  for (size_t i = 0; i < all_weights.size(); ++i) {
    if (i == 0 && kept[i].input.defined()) versions.remember("input", input);
    if (kept[i].weight.defined()) versions.remember(name_of_weight(*this, i), all_weights[i]);
  }
  record(output, tensors(), Form{op, activation, activates_last, input.scalar_type()}, flat(kept),
         std::move(versions));
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
