// Decisions and files of them, without a GPU.

#include "expect.h"
#include "problems.h"

#include "plans/registry.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <locale>
#include <sstream>
#include <thread>

namespace {

// ---- the store ---------------------------------------------------------------------------------

using Numbers = plans::Store<int, plans::Known<int, int, Verdict>, std::hash<int>>;

std::optional<int> decided(Numbers& store, int key) {
  return store.read(key, [](const auto& known) { return known.decision; });
}

void decide(Numbers& store, int key, int decision) {
  store.change(key, [=](auto& known) { known.decide(decision); });
}

TEST(what_was_decided_stays) {
  Numbers store(3);
  EXPECT(!decided(store, 1));
  decide(store, 1, 10);
  store.change(2, [](auto& known) { known.by_rule = 20; });
  store.change(3, [](auto& known) { known.verdicts[0] = Verdict::sound; });
  EXPECT(!store.is_full_for(1) && decided(store, 1) == 10);
  // Entries without a decision make room.
  decide(store, 4, 40), decide(store, 5, 50);
  EXPECT(store.read(2, [](const auto& known) { return !known.by_rule; }));
  EXPECT(decided(store, 1) == 10 && decided(store, 4) == 40 && decided(store, 5) == 50);
  // Where all was, another is lost; what is there may change.
  EXPECT(store.is_full_for(6) && !store.is_full_for(5));
  decide(store, 6, 60), decide(store, 5, 51);
  EXPECT(!decided(store, 6) && decided(store, 5) == 51 && decided(store, 1) == 10);
  int count = 0;
  store.each([&](int, auto& known) {
    known.verdicts[7] = Verdict::inexact, known.forget();
    ++count;
  });
  EXPECT(count == 3 && !decided(store, 1));
  // A verdict stays until its room is needed.
  EXPECT(store.read(1, [](const auto& known) { return known.verdicts.at(7); }) == Verdict::inexact);
  EXPECT(!store.is_full_for(6) && store.read(1, [](const auto& k) { return k.verdicts.empty(); }));
}

TEST(a_full_store_is_looked_through_seldom) {
  Numbers store(3);
  for (const int key : {1, 2, 3}) decide(store, key, key);
  EXPECT(store.is_full_for(4));
  store.change(3, [](auto& known) { known.forget(); });
  EXPECT(store.is_full_for(4) && store.is_full_for(4) && !store.is_full_for(4));
}

TEST(what_failed_is_due_ever_later) {
  plans::Known<int, int, Verdict> known;
  EXPECT(!known.is_due());
  int64_t calls_before = 0;
  for (int failures = 0; failures < 5; ++failures) {
    known.decide_later(1);
    int64_t calls = 0;
    while (!known.is_due()) ++calls;
    EXPECT(calls > calls_before && known.decision == 1);
    EXPECT(known.is_due());  // until it has been tried, so that captures can let it pass
    calls_before = calls;
  }
  known.decide(2);
  for (int i = 0; i < 5000; ++i) EXPECT(!known.is_due());
  EXPECT(known.decision == 2 && known.failures == 0);
}

TEST(threads_share_a_store) {
  Numbers store(4096);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 3000; ++i) {
        const int key = 4 * i + t;
        if (i % 2 == 0) decide(store, key, i);
        store.change(key, [](auto& known) { known.verdicts[0] = Verdict::sound; });
        const auto found = decided(store, key);
        EXPECT(!found || *found == i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  int kept = 0;
  for (int key = 0; key < 12000; ++key) kept += decided(store, key).has_value();
  EXPECT(kept == 4096);
}

// The counts of a bucket that waits for its measurement, by its neighbour's decision and without.
TEST(a_bucket_waits_with_its_neighbour) {
  auto bucket = problem_of(Pass::fprop, Activation::relu);
  auto neighbour = bucket, far = bucket;
  neighbour.matmul.n = 2 * bucket.matmul.n, far.matmul.n = 8 * bucket.matmul.n;
  const auto all = [](const Strategy&) { return true; };
  const auto theirs = decision(bucket, "epilogue");
  plans::passes().change(far, [&](auto& known) { known.decide(theirs); });
  EXPECT(!plans::neighbours_of(bucket, all) && !plans::calls_left(bucket, false));
  plans::passes().change(neighbour, [&](auto& known) { known.decide(theirs); });
  EXPECT(plans::neighbours_of(bucket, all) == theirs);
  EXPECT(!plans::neighbours_of(bucket, [](const Strategy&) { return false; }));
  plans::set_patience(3);
  const auto left = plans::calls_left(bucket, true);
  EXPECT(left && left == plans::calls_left(bucket, true) && *left == 1);
  plans::borrow(bucket, theirs);
  EXPECT(!plans::measured(bucket) && plans::show().size() == 3);
  EXPECT(plans::calls_left(bucket, true) && !plans::calls_left(bucket, true));  // now
  plans::passes().change(bucket, [&](auto& known) { known.decide(theirs); });
  plans::borrow(bucket, decision(bucket, "aten"));  // too late
  EXPECT(plans::measured(bucket) == theirs);
  EXPECT(*plans::decide_later(bucket) > 3);
  plans::clear();
  EXPECT(!plans::measured(bucket) && !plans::neighbours_of(bucket, all) && plans::show().empty());
}

TEST(what_threads_remember_ends_with_the_settings) {
  const auto ends = [](auto change) {
    const auto before = plans::generation();
    change();
    return plans::generation() != before;
  };
  EXPECT(ends([] { plans::set_budget(7); }) && !ends([] { plans::set_budget(7); }));
  EXPECT(ends([] { plans::set_patience(9); }) && !ends([] { plans::set_patience(9); }));
  EXPECT(ends(plans::clear));
}

// ---- text --------------------------------------------------------------------------------------

TEST(text_comes_back) {
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
  // The defaults of all of these.
  auto p = problem_of(Pass::fprop, Activation::relu);
  auto& g = p.matmul;
  g.math = Math::tf32, g.split_k = SplitK::forbidden;
  g.aligned_a = g.aligned_b = g.aligned_d = g.aligned_bias = g.aligned_aux = false;
  EXPECT(from_text(to_text(p, decision(p, "epilogue")))->first == p);
}

TEST(text_that_is_no_decision) {
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

void write_plans(const char* path, const Entries& entries, bool merge = false,
                 const MadeFor& made_for = here) {
  write_plan_file(path, made_for, entries, merge);
}

Entries read_plans(const char* path, const MadeFor& made_for = here) {
  return entries_for(read_plan_file(path), made_for);
}

std::string content(const char* path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void put(const char* path, const std::string& text) { std::ofstream(path) << text; }

TEST(a_file_is_whole_or_refused) {
  write_plans("plans", entries_of(3));
  const auto there = read_plan_file("plans");
  EXPECT(there.size() == 3 && there.front().made_for == here);
  EXPECT(there.front().version == own_version);
  EXPECT(read_plans("plans") == entries_of(3));
  EXPECT(!std::filesystem::exists("plans.tmp"));

  const auto text = content("plans");
  const auto refused = [&](const std::string& damaged) {
    put("damaged", damaged);
    const auto error = error_of([] { read_plan_file("damaged"); });
    EXPECT(!contains(error, "\n"));
    return contains(error, "nothing of it is used");
  };
  EXPECT(!refused(text));
  for (size_t i = 0; i < text.size(); ++i) {
    EXPECT(refused(text.substr(0, i)));
    auto flipped = text;
    flipped[i] ^= 1;
    EXPECT(refused(flipped));
  }
  EXPECT(refused(text + "epilogue\n") && refused("hello\n"));
  for (const char* path : {"missing", "."}) {
    EXPECT(contains(error_of([=] { read_plan_file(path); }), "cannot read " + std::string(path)));
  }
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

TEST(another_versions_lines_stay) {
  const auto p = problem_of(Pass::fprop, Activation::gelu_erf);
  const auto known = entries_of(1);
  const auto library_plan = to_text(known[0].first, known[0].second);
  const auto own_plan = to_text(p, decision(p, "hopper"));
  const std::string unknown = "some_new_strategy 1 2 3";
  const auto file = [&](const std::string& version) {
    std::string text = "torch_fused_linear plans 5\n";
    for (const auto& line : {library_plan, own_plan, unknown}) {
      text += "GPU A\t130100\t580.65\t" + version + '\t' + line + '\n';
    }
    put("other", with_checksum(text));
    return read_plans("other");
  };
  EXPECT(file(own_version).size() == 2);
  EXPECT(file("9.9.9") == known);  // our own kernels are those of a version

  // Neither a merge nor a save loses what this version does not understand; what it does is
  // replaced by what it brings.
  for (const bool merge : {true, false}) {
    for (const auto* version : {own_version, "9.9.9"}) {
      file(version);
      write_plans("other", entries_of(1), merge);
      const auto text = content("other");
      const bool own = version == std::string(own_version);
      EXPECT(contains(text, unknown) && contains(text, version));
      EXPECT(contains(text, own_plan) == (merge || !own));
      EXPECT(text.find(library_plan) == text.rfind(library_plan));
      EXPECT(read_plans("other").size() == (own && merge ? 2 : 1));
    }
  }
}

TEST(the_locale_does_not_matter) {
  write_plans("plain", entries_of(3));
  const auto before = std::locale::global(std::locale(std::locale(), new Grouping));
  write_plans("grouped", entries_of(3));
  EXPECT(read_plans("plain") == entries_of(3));
  std::locale::global(before);
  EXPECT(content("plain") == content("grouped"));
}

TEST(other_machines_plans_do_not_apply_and_stay) {
  const auto with = [](auto change) {
    auto other = here;
    change(other);
    return other;
  };
  const auto gpu = with([](MadeFor& m) { m.gpu = "GPU B"; });
  const auto newer = with([](MadeFor& m) { m.library_version = 140000; });
  const auto driver = with([](MadeFor& m) { m.driver = "590.1"; });
  write_plans("file", entries_of(2));
  const auto file = read_plan_file("file");
  EXPECT(mismatch(file, here).empty());
  EXPECT(mismatch({}, here).empty());
  EXPECT(mismatch(file, gpu) == "made for GPU A, this is GPU B");
  EXPECT(mismatch(file, newer) == "made with cuBLASLt 130100, this is 140000");
  EXPECT(mismatch(file, driver) == "made with driver 580.65, this is 590.1");
  for (const auto& other : {gpu, newer, driver}) {
    EXPECT(entries_for(file, other).empty());
    write_plans("file", entries_of(3), /*merge=*/other == gpu, other);
    EXPECT(read_plans("file", other) == entries_of(3) && read_plans("file") == entries_of(2));
  }
  EXPECT(read_plan_file("file").size() == 2 + 3 * 3);

  // A file of an older version is refused.
  put("old", with_checksum("torch_fused_linear plans 3\ngpu GPU A\ncublaslt 130100\n"));
  for (const char* path : {"old", "/dev/zero"}) {
    EXPECT(contains(error_of([=] { read_plan_file(path); }), "no file of plans that this version"));
  }
}

TEST(processes_share_a_file) {
  // Each brings its own; none loses another's.
  std::vector<std::thread> writers;
  for (int i = 0; i < 8; ++i) {
    writers.emplace_back([i] { write_plans("shared", entries_of(2, 1 + 2 * i), true); });
  }
  for (auto& writer : writers) writer.join();
  EXPECT(read_plans("shared").size() == 16 && read_plan_file("shared").size() == 16);

  // One's own plans are the newer.
  auto mine = entries_of(1);
  mine[0].second.algorithm.workspace = 1;
  write_plans("shared", mine, true);
  const auto all = read_plans("shared");
  EXPECT(all.size() == 16 && std::ranges::count(all, mine[0]) == 1);
  write_plans("shared", mine);
  EXPECT(read_plans("shared") == mine);

  // A damaged file stays as it is, and is not overwritten unasked.
  put("shared", "damaged");
  EXPECT(!error_of([&] { write_plans("shared", mine, true); }).empty());
  EXPECT(content("shared") == "damaged");
  write_plans("shared", mine);
  EXPECT(read_plans("shared") == mine);
  EXPECT(contains(error_of([&] { write_plans("no/folder", mine); }), "no/folder"));
}

}  // namespace
