#pragma once

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace fused {

inline const char* environment(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

// A number from 0 to `most`, whatever the locale. Throws (ValueError) where it is none.
template <typename Number>
Number number_of_environment(const char* variable, Number otherwise, Number most) {
  const char* text = environment(variable);
  if (text == nullptr) return otherwise;
  Number value{};
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  TORCH_CHECK_VALUE(error == std::errc() && stop == end && value >= 0 && value <= most, variable,
                    " must be ", std::is_integral_v<Number> ? "an integer" : "a number",
                    " from 0 to ", most, ", got '", text, "'");
  return value;
}

}  // namespace fused
