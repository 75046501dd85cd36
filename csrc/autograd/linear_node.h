#pragma once

// The autograd node of one layer. The activation is a value: one class serves them all.

#include "autograd/handover.h"
#include "core/activation.h"
#include "core/memory.h"

#include <array>

namespace fused::autograd {

// A layer of which a gradient is wanted.
Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory);

class LinearNode final : public handover::Producer {
 public:
  enum Edge { input_edge, weight_edge, bias_edge };

  LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             Activation activation, Memory memory);

  // Saves what the backward needs, no more than torch keeps for the layer and its activation.
  void keep(const Tensor& input, const Tensor& weight, const Tensor& output, const Tensor& saved);

  Activation activation() const { return activation_; }

  // What act' is read from; undefined where it has been released.
  Tensor lend_saved() { return lend(saved_index); }

  // The pre-activation, where the next layer may keep it in place of the output: with low memory
  // nobody keeps that.
  Tensor lend_preactivation();

  std::string name() const override;

 protected:
  variable_list apply(variable_list&& grads) override;
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override;
  Backward backward() const override;

 private:
  enum { input_index, weight_index, saved_index };

  const Activation activation_;
  const bool lends_;
  Activation input_is_of_ = Activation::none;  // or that of the pre-activation kept instead
  std::array<SavedVariable, 3> kept_;          // input, weight, saved
};

// One layer's forward for training, as a node runs it: the output, and what its activation's
// derivative will be read from (undefined for none). Of tensors without autograd.
std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation,
                                                Memory memory);

// The same where nobody wants a gradient: nothing is kept.
Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation);

// The activation of the pre-activation that a node keeps. With low memory the forward takes the
// same way as the backward, so that what the latter recomputes has the same bits.
enum class Time { first, again };
Tensor activated(const Tensor& preactivation, Activation activation, Time time = Time::again);

}  // namespace fused::autograd
