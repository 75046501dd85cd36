#pragma once

#include "plans/plan_file.h"
#include "plans/select.h"
#include "plans/store.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fused::plans {

// A bucket (gemm::bucket_of) has what was measured, or read from a file, until then its neighbour's
// decision; a problem what goes by rule.
using KnownPass = Known<Decision, std::pair<const Strategy*, decltype(Algorithm::bytes)>, Verdict>;
using Passes = Store<PassProblem, KnownPass, gemm::PassProblemHash>;
Passes& passes();

std::optional<Decision> measured(const PassProblem& bucket);
void borrow(const PassProblem& bucket, const Decision& decision);
// Finds what was measured for the nearest bucket within four times the tokens, by a strategy that
// serves.
std::optional<Decision> neighbours_of(const PassProblem& bucket,
                                      const std::function<bool(const Strategy&)>& serves);

int64_t patience();
void set_patience(int64_t calls);
// Until the bucket is to be measured; null: that is in this call.
CallsLeft calls_left(const PassProblem& bucket, bool has_neighbour);
// It could not be measured now (too little memory): until it is tried again.
CallsLeft decide_later(const PassProblem& bucket);

// Milliseconds of measuring per problem, TORCH_FUSED_LINEAR_BUDGET_MS. This setting and the next
// throw (ValueError) where the variable has no such value.
double budget();
void set_budget(double milliseconds);

// On standard error: 1, a line for every decision; 2, every candidate's times as well.
// TORCH_FUSED_LINEAR_VERBOSE.
int64_t verbosity();
void set_verbosity(int64_t level);
void log(const std::string& line);
// In one line: without the frames that c10::Error::what has.
std::string message_of(const std::exception& error);

struct Machine {
  MadeFor made_for;            // what its plans are valid for
  int first_equal_device = 0;  // devices of one model share their plans
};
// Of a device, -1: the current one. Nothing without a GPU.
std::optional<Machine> machine(int device = -1);
void set_machine_source(std::optional<Machine> (*source)(int device));

// Counts up when plans made ready before are to be made anew.
uint64_t generation();

void save(const std::string& path);
// How many were read. Throws (ValueError) and uses nothing where the file is damaged, or made for
// another GPU, cuBLASLt or driver.
int64_t load(const std::string& path);
void clear();
std::vector<std::string> show();

// Reads the file that TORCH_FUSED_LINEAR_PLANS names, once, and has it written at the end. One that
// cannot be read is a warning, and left alone. A device's plans are taken over at its first use
// (adopt), which checks the other settings, too.
void from_environment();
void adopt(const Machine& machine);

}  // namespace fused::plans
