#pragma once

// The plans of the process as users see them: what has been decided, how long measuring may take,
// files.

#include "plans/plan_file.h"

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fused::plans {

// Measured, or read from a file; by bucket (gemm::bucket_of).
Decisions& measured();
// By rule, for the very problem; so that all threads, and captures, do the same.
Decisions& ruled();

// Taken over, by bucket, from a token count nearby: until the bucket is measured itself.
Decisions& borrowed();
// What has been measured for the nearest bucket with up to four times, or a quarter of, the tokens,
// by a strategy that serves.
std::optional<Decision> neighbours_of(const PassProblem& bucket,
                                      const std::function<bool(const gemm::Strategy&)>& serves);

// How many calls a bucket goes by its neighbour's decision before it is measured.
int64_t patience();
void set_patience(int64_t calls);

// Calls that are left until a bucket is to be measured, shared by all plans of it.
using CallsLeft = std::shared_ptr<std::atomic<int64_t>>;
// Nothing: it is to be measured now.
CallsLeft calls_left(const PassProblem& bucket, bool has_neighbour);
// It could not be measured now (too little memory): to be tried again, ever later.
CallsLeft postpone(const PassProblem& bucket);
// Calls until what has failed so many times is tried again.
int64_t calls_until_retry(int failures);

// Milliseconds of measuring per problem; 0: nothing is measured. TORCH_FUSED_LINEAR_BUDGET_MS.
// This setting and the next throw (ValueError) where the variable has no such value.
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
// Who tells it, in a build with CUDA.
void set_machine_source(std::optional<Machine> (*source)(int device));

// Counts up when what has been decided may be decided otherwise: plans made ready before are then
// to be made anew.
uint64_t generation();

void save(const std::string& path);
// How many were read. Throws (ValueError) and uses nothing where the file is damaged, or made for
// another GPU, cuBLASLt or driver.
int64_t load(const std::string& path);
void clear();
std::vector<std::string> show();

// Reads the file that TORCH_FUSED_LINEAR_PLANS names, once, and has it written when the process
// ends. A file that cannot be read is a warning, and left alone. Needs no GPU: what is for a device
// is taken over when that is first used (adopt), which checks the other settings, too.
void from_environment();
void adopt(const Machine& machine);

}  // namespace fused::plans
