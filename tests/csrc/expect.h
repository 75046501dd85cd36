#pragma once

// What the C++ tests share: EXPECT, TEST, and a main that runs the test of a name, in a folder of
// its own, and exits with 1 where it fails.

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

inline int run_one(char** argv) {
  tests().at(argv[1])();
  return failures != 0;
}
