#pragma once

// Shared by the C++ tests: EXPECT, TEST, and a main that runs and names the test that it is given,
// or "all", and exits with 1 where one fails.

#include <cstdio>
#include <functional>
#include <map>
#include <string>

inline int failures = 0;

#define EXPECT(condition)                                                   \
  do {                                                                      \
    if (!(condition)) {                                                     \
      ++failures;                                                           \
      std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                       \
  } while (false)

using Tests = std::map<std::string, std::function<void()>>;

inline Tests& tests() {
  static Tests all;
  return all;
}

// Defines a test, which is run by its name.
#define TEST(name)                                                  \
  void name();                                                      \
  const bool name##_is_there = tests().emplace(#name, name).second; \
  void name()

int main(int, char** arguments) {
  const std::string wanted = arguments[1];
  for (const auto& [name, test] : tests()) {
    if (wanted != name && wanted != "all") continue;
    std::puts(name.c_str());
    std::fflush(stdout);
    test();
  }
  return failures != 0;
}
