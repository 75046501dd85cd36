// Files of plans, while the system's calls fail: `plan_file_faults FOLDER`. Prints the number of
// calls that failed, or what went wrong, which is exit status 1.

#include "../csrc/problems.h"

#include "faults.cpp"

#include <cstdio>
#include <filesystem>
#include <iterator>
#include <string>

namespace {

long open_files() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return std::distance(begin(all), end(all));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const auto path = std::string(arguments[1]) + "/plans";
  const auto old = entries_of(3), next = entries_of(40);
  const auto write_next = [&] { write_plan_file(path, here, next, false); };
  long failures = 0, wrongs = 0;
  for (const char* name : {"open", "flock", "fopen", "fwrite", "fflush", "fsync", "rename"}) {
    for (long nth = 1;; ++nth) {
      write_plan_file(path, here, old, false);
      const long before = open_files();
      faults_arm(name, nth);
      const auto error = error_of(write_next);
      if (faults_disarm() < nth) {
        if (nth > 1) break;
        std::printf("%s is never called\n", name);
        return 1;
      }
      ++failures;
      const auto wrong = [&](const char* what) {
        std::printf("%s %ld: %s (%s)\n", name, nth, what, error.c_str());
        ++wrongs;
      };
      if (!error.empty() && error.find(path) == std::string::npos) wrong("names no file");
      const auto there = [&] { return entries_for(read_plan_file(path), here); };
      if (there() != (error.empty() ? next : old)) wrong("the file is another one");
      if (open_files() != before) wrong("a file is left open");
      if (!error_of(write_next).empty()) wrong("the next call fails");
      if (there() != next) wrong("the next call is wrong");
    }
  }
  if (wrongs == 0) std::printf("%ld\n", failures);
  return wrongs == 0 ? 0 : 1;
}
