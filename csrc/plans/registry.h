#pragma once

#include "plans/plan_file.h"
#include "plans/select.h"
#include "plans/store.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fused::plans {

// A bucket (gemm::bucket_of) holds the decision that was measured or read from a file, and until
// then its neighbour's. A problem holds the decision by rule.
using KnownPass = Known<Decision, std::pair<const Strategy*, decltype(Algorithm::bytes)>, Verdict>;
using Passes = Store<PassProblem, KnownPass, gemm::PassProblemHash>;
Passes& passes();

std::optional<Decision> measured(const PassProblem& bucket);
void borrow(const PassProblem& bucket, const Decision& decision);
// Finds the decision of the nearest bucket within a quarter and four times the tokens whose
// strategy `serves`.
std::optional<Decision> neighbours_of(const PassProblem& bucket,
                                      const std::function<bool(const Strategy&)>& serves);

int64_t patience();
void set_patience(int64_t calls);
// Returns the number of calls until the bucket is measured; null means in this call.
CallsLeft calls_left(const PassProblem& bucket, bool has_neighbour);
// Returns the number of calls until a bucket that could not be measured now, as memory was short,
// is tried again.
CallsLeft decide_later(const PassProblem& bucket);

// Milliseconds that measuring one problem may take (TORCH_FUSED_LINEAR_BUDGET_MS). Reading it
// throws (ValueError) if the environment variable holds no such value; so does verbosity().
double budget();
void set_budget(double milliseconds);

// Printed on standard error (TORCH_FUSED_LINEAR_VERBOSE): 1, a line for each decision; 2, each
// candidate's times as well.
int64_t verbosity();
void set_verbosity(int64_t level);
void log(const std::string& line);
// Returns the message on one line, without the stack frames that c10::Error::what adds.
std::string message_of(const std::exception& error);

struct Machine {
  MadeFor made_for;            // its plans are valid for this
  int first_equal_device = 0;  // devices of one model share their plans
};
// Describes a device, or the current one for -1; nullopt without a GPU.
std::optional<Machine> machine(int device = -1);
void set_machine_source(std::optional<Machine> (*source)(int device));

// Counts up when threads must discard the plans that they have made ready.
uint64_t generation();

void save(const std::string& path);
// Returns how many plans were read. Throws (ValueError) and uses none if the file is damaged or
// made for another GPU, cuBLASLt or driver.
int64_t load(const std::string& path);
void clear();
std::vector<std::string> show();

// Reads the file that TORCH_FUSED_LINEAR_PLANS names, once, and writes it when the process ends. A
// file that cannot be read gives a warning and stays as it is. A device takes its plans at its
// first use (adopt), which checks the other settings, too.
void from_environment();
void adopt(const Machine& machine);

}  // namespace fused::plans
