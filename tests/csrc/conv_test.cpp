// Which way a convolution goes, and for how long that is remembered, without a GPU. `conv_test
// NAME` runs one test and exits with 1 where it fails.

#include "expect.h"

#include "cuda/conv_choice.h"
#include "plans/remembered.h"

#include <string_view>
#include <thread>
#include <vector>

namespace {

using namespace fused;
using namespace fused::cuda;
using plans::Verdict;

constexpr Judgement sound{Verdict::sound, nullptr}, inexact{Verdict::inexact, "inexact"},
    failing{Verdict::failed, "fails"};

void only_sound_ways_are_taken() {
  // cuDNN's is the quickest, then ours.
  for (const auto& times : {std::optional(ConvTimes{1, 2, 3}), std::optional<ConvTimes>()}) {
    EXPECT(choose({sound, sound}, times).way == ConvWay::cudnn);
    EXPECT(choose({sound, inexact}, times).way == ConvWay::cudnn);
    for (const auto& refused : {inexact, failing}) {
      EXPECT(choose({refused, sound}, times).way == ConvWay::own);
      EXPECT(choose({refused, inexact}, times).way == ConvWay::aten);
      EXPECT(choose({refused, failing}, times).way == ConvWay::aten);
      EXPECT(choose({refused, sound}, times).objection == refused.objection);
    }
  }
}

void the_quickest_of_them_is() {
  EXPECT(choose({sound, sound}, ConvTimes{3, 2, 1}).way == ConvWay::aten);
  EXPECT(choose({sound, sound}, ConvTimes{3, 1, 2}).way == ConvWay::own);
  EXPECT(choose({sound, inexact}, ConvTimes{3, 1, 2}).way == ConvWay::aten);
  EXPECT(choose({sound, inexact}, ConvTimes{2, 1, 3}).way == ConvWay::cudnn);
  EXPECT(choose({inexact, sound}, ConvTimes{1, 3, 2}).way == ConvWay::aten);
  const std::string_view reason = choose({sound, sound}, ConvTimes{3, 2, 1}).objection;
  EXPECT(reason == "(not cuDNN's fused form: slower)");
  EXPECT(choose({sound, sound}, ConvTimes{1, 2, 3}).objection == nullptr);
}

void what_is_wrong_is_final_and_what_fails_is_not() {
  EXPECT((Judgements{sound, inexact}.are_final()) && (Judgements{inexact, sound}.are_final()));
  EXPECT((!Judgements{failing, sound}.are_final()) && (!Judgements{sound, failing}.are_final()));
  EXPECT(!Judgements{}.are_final());
}

void what_is_not_final_is_due_ever_later() {
  plans::Remembered<int, int> memory;
  const auto generation = plans::generation();
  EXPECT(!memory.find(7));
  memory.add(7, 1, /*is_final=*/true, generation);
  memory.add(8, 2, /*is_final=*/false, generation);
  int calls_before = 0;
  for (int failures = 1; failures < 5; ++failures) {
    int calls = 0;
    while (!memory.find(8)->due) ++calls;
    EXPECT(calls == plans::calls_until_retry(failures) && calls > calls_before);
    EXPECT(memory.find(8)->due);  // until it has been tried, so that captures can let it pass
    calls_before = calls;
    memory.add(8, 2, /*is_final=*/false, generation);
  }
  memory.add(8, 3, /*is_final=*/true, generation);
  for (int i = 0; i < 5000; ++i) EXPECT(!memory.find(7)->due && !memory.find(8)->due);
  EXPECT(memory.find(7)->value == 1 && memory.find(8)->value == 3);
}

void all_is_forgotten_with_the_plans() {
  plans::Remembered<int, int> memory;
  const auto before = plans::generation();
  memory.add(1, 1, true, before);
  plans::clear();
  EXPECT(!memory.find(1));
  memory.add(1, 1, true, before);  // begun before that
  EXPECT(!memory.find(1));
  memory.add(1, 1, true, plans::generation());
  EXPECT(memory.find(1));
}

void threads_share_a_memory_that_is_bounded() {
  plans::Remembered<int, int> memory;
  const auto generation = plans::generation();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 3000; ++i) {
        memory.add(4 * i + t, i, i % 2 == 0, generation);
        const auto found = memory.find(4 * i + t);
        EXPECT(!found || found->value == i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  int kept = 0;
  for (int key = 0; key < 12000; ++key) kept += memory.find(key).has_value();
  EXPECT(kept > 0 && kept <= 4096);
}

const Tests tests{
    {"only_sound_ways_are_taken", only_sound_ways_are_taken},
    {"the_quickest_of_them_is", the_quickest_of_them_is},
    {"what_is_wrong_is_final", what_is_wrong_is_final_and_what_fails_is_not},
    {"due_ever_later", what_is_not_final_is_due_ever_later},
    {"all_is_forgotten", all_is_forgotten_with_the_plans},
    {"threads_share", threads_share_a_memory_that_is_bounded},
};

}  // namespace

int main(int, char** argv) { return run_one(tests, argv); }
