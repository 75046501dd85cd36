#pragma once

// Which way a convolution goes, of what was judged and timed. Pure logic.

#include "plans/select.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace fused::cuda {

enum class ConvWay { cudnn, own, aten };  // as in conv.h

// Of a way. inexact: not to be taken, for good; failed: to be tried again.
struct Judgement {
  plans::Verdict verdict = plans::Verdict::failed;
  const char* objection = nullptr;  // as explain's row shows it

  bool is_sound() const { return verdict == plans::Verdict::sound; }
  bool operator==(const Judgement&) const = default;
};

// ATen's way is eager's, and needs none.
struct Judgements {
  Judgement cudnn, own;

  bool are_final() const {
    return cudnn.verdict != plans::Verdict::failed && own.verdict != plans::Verdict::failed;
  }
  bool operator==(const Judgements&) const = default;
};

struct ConvTimes {  // of a call, of sound ways
  double cudnn, own, aten;
};

struct ConvChoice {
  ConvWay way = ConvWay::aten;
  const char* objection = nullptr;  // to cuDNN's
};

// The quickest of the sound ways; the first of them where nothing was timed.
inline ConvChoice choose(const Judgements& judged, const std::optional<ConvTimes>& times) {
  const auto [cudnn, own_if_sound, aten] = times.value_or(ConvTimes{1, 2, 3});
  const double own = judged.own.is_sound() ? own_if_sound : std::numeric_limits<double>::infinity();
  const auto other = aten < own ? ConvWay::aten : ConvWay::own;
  if (!judged.cudnn.is_sound()) return {other, judged.cudnn.objection};
  if (cudnn > std::min(own, aten)) return {other, "(not cuDNN's fused form: slower)"};
  return {ConvWay::cudnn, nullptr};
}

}  // namespace fused::cuda
