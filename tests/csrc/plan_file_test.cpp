// Decisions and files of them, without a GPU. `plan_file_test NAME` runs one test, in a folder of
// its own, and exits with 1 where it fails.

#include "expect.h"
#include "problems.h"

#include "plans/plan_file.h"

#include <filesystem>
#include <fstream>
#include <locale>
#include <sstream>
#include <thread>

namespace {

// ---- decisions ---------------------------------------------------------------------------------

Decision decision(const PassProblem& p, const char* strategy, uint64_t mark = 7) {
  Decision d;
  d.origin = Decision::Origin::measured;
  d.strategy = find_strategy(p.pass, strategy);
  for (size_t i = 0; i < d.algorithm.bytes.size(); ++i) d.algorithm.bytes[i] = mark << (8 * i);
  d.algorithm.workspace = 4096, d.microseconds = 12.5, d.eager_microseconds = 20;
  return d;
}

void the_first_decision_stays() {
  Decisions known(3);
  const auto p = problem_of(Pass::fprop, Activation::relu);
  EXPECT(!known.find(p));
  EXPECT(known.add(p, decision(p, "epilogue")).strategy->name == std::string("epilogue"));
  EXPECT(known.add(p, decision(p, "aten")).strategy->name == std::string("epilogue"));
  known.replace(p, decision(p, "aten"));
  EXPECT(known.find(p)->strategy->name == std::string("aten"));
  for (int64_t n = 1; n <= 10; ++n) {
    auto other = p;
    other.matmul.n = n;
    EXPECT(known.add(other, decision(p, "epilogue")).algorithm.workspace == 4096);
  }
  EXPECT(known.is_full() && known.all().size() == 3 && known.find(p));
  known.clear();
  EXPECT(!known.find(p) && !known.is_full());

  // Whoever comes first: all threads end with the same.
  Decisions shared(10);
  std::vector<Decision> seen(8);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < seen.size(); ++i) {
    threads.emplace_back([&, i] { seen[i] = shared.add(p, decision(p, "epilogue", i + 1)); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& d : seen) EXPECT(d == *shared.find(p));
}

void text_comes_back() {
  for (const auto& p : every_problem()) {
    for (const auto& s : strategies) {
      if (!applies(p, s)) continue;
      auto d = decision(p, s.name, 255);
      const auto back = from_text(to_text(p, d));
      EXPECT(back && back->first == p);
      d.origin = Decision::Origin::file;
      EXPECT(back && back->second == d);
      EXPECT(summary(p, d).find(s.name) != std::string::npos);
    }
  }
}

void text_that_is_no_decision() {
  const auto p = problem_of(Pass::fprop, Activation::relu);
  const auto line = to_text(p, decision(p, "epilogue"));
  std::vector<std::string> words;
  std::istringstream in(line);
  for (std::string word; in >> word;) words.push_back(word);
  const auto joined = [&] {
    std::string text;
    for (const auto& word : words) text += word + ' ';
    return text;
  };
  EXPECT(from_text(joined()));
  for (size_t i = 0; i < words.size(); ++i) {
    const auto word = words[i];
    for (const char* other : {"", "x", "-1", "99999999999999999999999"}) {
      words[i] = other;
      const bool time = i + 2 >= words.size();  // no time is too long
      EXPECT(!from_text(joined()) || (time && *other == '9'));
    }
    words[i] = word;
  }
  EXPECT(!from_text(line + " 1") && !from_text("") && !from_text("epilogue"));
  words[0] = "bgradb";  // of another pass
  EXPECT(!from_text(joined()));
}

// ---- files -------------------------------------------------------------------------------------

PlanFile file_of(int count, int64_t first = 1) {
  PlanFile file{"GPU A", library, {}};
  for (int64_t i = first; i < first + count; ++i) {
    auto p = problem_of(Pass::fprop, Activation::relu);
    p.matmul.m = 8 * i;
    auto d = decision(p, "epilogue", i);
    d.origin = Decision::Origin::file;
    file.decisions.emplace_back(p, d);
  }
  return file;
}

std::string content(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void put(const char* path, const std::string& text) { std::ofstream(path) << text; }

// The message of the error, or nothing.
template <typename Fn>
std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

void a_file_is_whole_or_refused() {
  write_plan_file("plans", file_of(3), false);
  const auto there = read_plan_file("plans");
  EXPECT(there.gpu == "GPU A" && there.library_version == library);
  EXPECT(there.decisions == file_of(3).decisions);
  EXPECT(!std::filesystem::exists("plans.tmp"));

  const auto text = content("plans");
  const auto refused = [&](const std::string& damaged) {
    put("damaged", damaged);
    return error_of([] { read_plan_file("damaged"); }).find("nothing of it is used") !=
           std::string::npos;
  };
  EXPECT(!refused(text));
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT(refused(text.substr(0, i)));
    auto flipped = text;
    flipped[i] ^= 1;
    EXPECT(refused(flipped));
  }
  EXPECT(refused(text + "epilogue\n") && refused("hello\n"));
  EXPECT(error_of([] { read_plan_file("missing"); }).find("cannot read missing") !=
         std::string::npos);
}

struct Grouping : std::numpunct<char> {
  char do_thousands_sep() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
  char do_decimal_point() const override { return ','; }
};

std::string with_checksum(const std::string& body) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const unsigned char c : body) hash = (hash ^ c) * 0x100000001b3;
  std::ostringstream text;
  text << body << "checksum " << std::hex << hash << '\n';
  return text.str();
}

void another_versions_file_is_used_as_far_as_it_is_understood() {
  const auto p = problem_of(Pass::fprop, Activation::gelu_erf);
  const auto library_plan =
      to_text(problem_of(Pass::fprop, Activation::relu),
              decision(problem_of(Pass::fprop, Activation::relu), "epilogue"));
  const auto own_plan = to_text(p, decision(p, "hopper"));
  const auto file = [&](const std::string& version) {
    put("other",
        with_checksum("torch_fused_linear plans 1\ngpu GPU A\ncublaslt 130100\n" + version +
                      library_plan + '\n' + own_plan + "\nsome_new_strategy 1 2 3\n"));
    return read_plan_file("other");
  };
  const auto others = file("version 9.9.9\n");
  EXPECT(others.version == "9.9.9" && others.decisions.size() == 1);
  EXPECT(others.decisions.front().second.strategy->name == std::string("epilogue"));
  for (const auto& version : {std::string(), "version " + std::string(own_version) + '\n'}) {
    EXPECT(error_of([&] { file(version); }).find("holds a line that is no plan") !=
           std::string::npos);
  }
  write_plan_file("ours", file_of(1), false);
  EXPECT(read_plan_file("ours").version == own_version);
}

void the_locale_does_not_matter() {
  write_plan_file("plain", file_of(3), false);
  const auto before = std::locale::global(std::locale(std::locale(), new Grouping));
  write_plan_file("grouped", file_of(3), false);
  EXPECT(read_plan_file("plain").decisions == file_of(3).decisions);
  std::locale::global(before);
  EXPECT(content("plain") == content("grouped"));
}

void other_machines_files_do_not_fit() {
  const auto file = file_of(1);
  EXPECT(mismatch(file, "GPU A", library).empty());
  EXPECT(mismatch(file, "GPU B", library) == "made for GPU A, this is GPU B");
  EXPECT(mismatch(file, "GPU A", 140000) == "made with cuBLASLt 130100, this is 140000");
}

void processes_share_a_file() {
  // Each brings its own; none loses another's.
  std::vector<std::thread> writers;
  for (int i = 0; i < 8; ++i) {
    writers.emplace_back([i] { write_plan_file("shared", file_of(2, 1 + 2 * i), true); });
  }
  for (auto& writer : writers) writer.join();
  EXPECT(read_plan_file("shared").decisions.size() == 16);

  // One's own plans are the newer; those of another library are not kept.
  auto mine = file_of(1);
  mine.decisions[0].second.algorithm.workspace = 1;
  write_plan_file("shared", mine, true);
  EXPECT(read_plan_file("shared").decisions.size() == 16);
  EXPECT(read_plan_file("shared").decisions[0].second.algorithm.workspace == 1);
  // A file for another library is not taken over unasked.
  mine.library_version = 140000;
  EXPECT(error_of([&] { write_plan_file("shared", mine, true); }).find("left as it is") !=
         std::string::npos);
  EXPECT(read_plan_file("shared").decisions.size() == 16);
  write_plan_file("shared", mine, false);
  EXPECT(read_plan_file("shared").decisions.size() == 1);

  // What is damaged is not written over unasked, and stays as it is.
  put("shared", "damaged");
  EXPECT(!error_of([&] { write_plan_file("shared", mine, true); }).empty());
  EXPECT(content("shared") == "damaged");
  EXPECT(error_of([&] { write_plan_file("no/folder", mine, false); }).find("no/folder") !=
         std::string::npos);
}

const Tests tests{
    {"the_first_decision_stays", the_first_decision_stays},
    {"text_comes_back", text_comes_back},
    {"text_that_is_no_decision", text_that_is_no_decision},
    {"a_file_is_whole_or_refused", a_file_is_whole_or_refused},
    {"another_versions_file", another_versions_file_is_used_as_far_as_it_is_understood},
    {"the_locale_does_not_matter", the_locale_does_not_matter},
    {"other_machines_files_do_not_fit", other_machines_files_do_not_fit},
    {"processes_share_a_file", processes_share_a_file},
};

}  // namespace

int main(int, char** argv) { return run_one(tests, argv); }
