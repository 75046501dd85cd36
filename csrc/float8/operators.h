#pragma once

// FP8 training by torchao's `tensorwise` recipe: operators that users call, and the steps that
// their nodes are made of. One scale for each tensor; e4m3 for inputs and weights, e5m2 for
// gradients.
//
// A cast comes in two layouts, as cuBLASLt multiplies FP8 only where both operands are contiguous
// along the summed dimension: `rows` [M, N] for one product, `columns` [N, M] for the other.

#include "dispatch/operators.h"

#include <tuple>

namespace fused::float8 {

using dispatch::Operator;
using dispatch::Text;

using Nonuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// ---- what users call ---------------------------------------------------------------------------

// act(x Wᵀ + b)
using Linear = Operator<
    "float8_linear(Tensor input, Tensor weight, Tensor? bias=None, str activation='none') -> "
    "Tensor",
    Tensor(const Tensor&, const Tensor&, const OptionalTensor&, std::string_view)>;

// The activation between the layers and none after the last.
using Mlp = Operator<
    "float8_mlp(Tensor input, Tensor[] weights, Tensor?[] biases, str activation='relu') -> Tensor",
    Tensor(const Tensor&, at::TensorList, const c10::List<OptionalTensor>&, std::string_view)>;

// Without up, gate is both weights, [2 hidden, in], gate's rows first.
using GatedMlp = Operator<
    "float8_gated_mlp(Tensor input, Tensor gate, Tensor? up, Tensor down, Tensor? gate_bias=None, "
    "Tensor? up_bias=None, Tensor? down_bias=None, str activation='silu') -> Tensor",
    Tensor(const Tensor&, const Tensor&, const OptionalTensor&, const Tensor&,
           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, std::string_view)>;

using Public = std::tuple<Linear, Mlp, GatedMlp>;

// ---- what nodes call ---------------------------------------------------------------------------

// Casts to e4m3, or a gradient to e5m2; its sum over all rows, the bias gradient, or [0]. Columns
// that are not wanted are [0], in the steps below as well.
using CastStep = Operator<
    "_float8_cast(Tensor input, bool gradient, bool sum, bool columns=True) -> "
    "(Tensor rows, Tensor columns, Tensor inverse_scale, Tensor sum)",
    Quadruple(const Tensor&, bool, bool, bool)>;

// The cast of h = act(z), which is rounded to z's dtype first. By its scale the backward makes
// h's columns again, from z, so that they need not be kept.
using ActivationStep = Operator<
    "_float8_activation(Tensor z, int activation, bool columns=True) -> "
    "(Tensor rows, Tensor columns, Tensor inverse_scale, Tensor scale)",
    Quadruple(const Tensor&, int64_t, bool)>;

// The cast of dz = act'(z) · grad, rounded to grad's dtype first, and its sum; with h's scale also
// h's columns, or [0]. ReLU reads the bit mask that _relu_mask gives in place of z, without h.
using ActivationBackwardStep = Operator<
    "_float8_activation_backward(Tensor grad, Tensor z, int activation, bool sum, "
    "Tensor? scale=None) -> "
    "(Tensor rows, Tensor columns, Tensor inverse_scale, Tensor sum, Tensor hidden)",
    Quintuple(const Tensor&, const Tensor&, int64_t, bool, const OptionalTensor&)>;

// The cast of h = act(gate) ⊙ up, and its scale. Both may be column halves of one tensor.
using GatingStep = Operator<
    "_float8_gating(Tensor gate, Tensor up, int activation, bool columns=True) -> "
    "(Tensor rows, Tensor columns, Tensor inverse_scale, Tensor scale)",
    Quadruple(const Tensor&, const Tensor&, int64_t, bool)>;

// The casts of the gradients of gate and up, and their sums. `together`, for weights that are one
// tensor: one cast of both, rows [M, 2H], columns [2H, M] and sum [2H]; the second four are [0].
// With h's scale also h's columns, or [0].
using GatingBackwardStep = Operator<
    "_float8_gating_backward(Tensor grad, Tensor gate, Tensor up, int activation, bool together, "
    "bool sum, Tensor? scale=None) -> (Tensor rows_gate, Tensor columns_gate, "
    "Tensor inverse_scale_gate, Tensor sum_gate, Tensor rows_up, Tensor columns_up, "
    "Tensor inverse_scale_up, Tensor sum_up, Tensor hidden)",
    Nonuple(const Tensor&, const Tensor&, const Tensor&, int64_t, bool, bool,
            const OptionalTensor&)>;

// (a bᵀ) · inverse_a · inverse_b + bias + add, rounded once; a [M, K] and b [N, K] by rows.
using ProductStep = Operator<
    "_float8_product(Tensor a, Tensor b, Tensor inverse_a, Tensor inverse_b, Tensor? bias, "
    "Tensor? add, ScalarType dtype, bool fast) -> Tensor",
    Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
           const OptionalTensor&, at::ScalarType, bool)>;

using Steps = std::tuple<CastStep, ActivationStep, ActivationBackwardStep, GatingStep,
                         GatingBackwardStep, ProductStep>;

}  // namespace fused::float8
