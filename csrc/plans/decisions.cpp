#include "plans/decisions.h"

#include "gemm/choice.h"

#include <charconv>
#include <iomanip>
#include <sstream>

namespace fused::plans {
namespace {

using gemm::Keeps, gemm::Math, gemm::Provider, gemm::SplitK, gemm::Type;

// The fields of a line, in order: one list for writing and reading, so that they cannot differ.
template <typename Problem_, typename Decision_, typename Visit>
void each_field(Problem_& p, Decision_& d, const Visit& visit) {
  visit(p.pass), visit(p.activation), visit(p.bias), visit(p.keeps);
  visit(p.library_only);
  for (auto& features : p.further) visit(features);
  auto& g = p.matmul;
  visit(g.arch), visit(g.type), visit(g.to_f32), visit(g.adds), visit(g.math);
  visit(g.split_k);
  visit(g.transpose_a), visit(g.transpose_b);
  visit(g.m), visit(g.n), visit(g.k), visit(g.lda), visit(g.ldb), visit(g.ldd), visit(g.ld_aux);
  visit(g.aligned_a), visit(g.aligned_b), visit(g.aligned_d);
  visit(g.aligned_bias), visit(g.aligned_aux);
  visit(g.workspace_limit);
  for (auto& word : d.algorithm.bytes) visit(word);
  visit(d.algorithm.workspace), visit(d.microseconds), visit(d.eager_microseconds);
}

template <typename T>
void write(std::ostream& out, const T& value) {
  if constexpr (std::is_enum_v<T> || sizeof(T) == 1) {
    out << ' ' << static_cast<int>(value);
  } else {
    out << ' ' << value;
  }
}

template <typename T>
constexpr int64_t largest() {
  if constexpr (std::is_same_v<T, Pass>) return static_cast<int64_t>(gemm::last_pass);
  if constexpr (std::is_same_v<T, Activation>) return std::size(activations) - 1;
  if constexpr (std::is_same_v<T, Type>) return static_cast<int64_t>(Type::bf16);
  if constexpr (std::is_same_v<T, Math>) return static_cast<int64_t>(Math::tf32);
  if constexpr (std::is_same_v<T, SplitK>) return static_cast<int64_t>(SplitK::forbidden);
  if constexpr (std::is_same_v<T, Keeps>) return static_cast<int64_t>(Keeps::bits);
  return 1;  // a flag
}

template <typename T>
bool parse(const std::string& word, T& value) {
  const auto* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, value);
  return error == std::errc() && stop == end && value >= T{0};
}

template <typename T>
bool read(std::istream& in, T& value) {
  std::string word;
  if (!(in >> word)) return false;
  if constexpr (std::is_enum_v<T> || sizeof(T) == 1) {
    int64_t number = 0;
    if (!parse(word, number) || number > largest<T>()) return false;
    value = static_cast<T>(number);
    return true;
  } else {
    return parse(word, value);
  }
}

}  // namespace

std::string to_text(const PassProblem& problem, const Decision& decision) {
  std::ostringstream line;
  line.imbue(std::locale::classic());
  line << decision.strategy->name;
  each_field(problem, decision, [&](const auto& value) { write(line, value); });
  return line.str();
}

std::optional<std::pair<PassProblem, Decision>> from_text(const std::string& text) {
  std::istringstream line(text);
  std::string strategy;
  PassProblem problem;
  Decision decision;
  decision.origin = Decision::Origin::file;
  bool good = static_cast<bool>(line >> strategy);
  each_field(problem, decision, [&](auto& value) { good = good && read(line, value); });
  std::string more;
  if (!good || line >> more) return std::nullopt;
  decision.strategy = gemm::find_strategy(problem.pass, strategy);
  if (decision.strategy == nullptr) return std::nullopt;
  const bool by_library = decision.strategy->provider == Provider::cublaslt;
  if (by_library && !gemm::epilogue_of(problem, *decision.strategy)) return std::nullopt;
  return std::pair(problem, decision);
}

std::string summary(const PassProblem& p, const Decision& d) {
  constexpr const char* origins[] = {"by rule", "measured", "from a file", "its neighbour's"};
  const auto& g = p.matmul;
  std::ostringstream text;
  text << gemm::name(p.pass);
  if (p.activation != Activation::none) text << ' ' << fused::name(p.activation);
  if (p.bias) text << " bias";
  constexpr const char* kept[] = {"", " pre-activation", " mask", " bits"};
  if (p.pass == Pass::fprop) text << kept[static_cast<int>(p.keeps)];
  if (p.library_only) text << " cublaslt";
  // Rows, inner extent and columns, as torch writes the product.
  text << ' ' << gemm::name(g.type) << (g.math == Math::tf32 ? "/tf32" : "");
  text << (g.to_f32 ? " to f32" : "") << (g.adds ? " added " : " ") << g.n << 'x' << g.k << 'x'
       << g.m;
  for (const auto features : p.further) {
    if (features > 0) text << 'x' << features;
  }
  text << ": " << d.strategy->name;
  if (d.strategy->provider == Provider::cublaslt) {
    text << ' ' << gemm::name(gemm::matmul_of(p, *d.strategy).epilogue);
  }
  if (d.microseconds > 0) {
    text << std::fixed << std::setprecision(1) << ", " << d.microseconds << " us";
    if (d.eager_microseconds > 0) text << " (eager " << d.eager_microseconds << " us)";
  }
  text << ", " << origins[static_cast<int>(d.origin)];
  return text.str();
}

}  // namespace fused::plans
