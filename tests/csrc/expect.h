#pragma once

// What the C++ tests share: EXPECT, and a main that runs one test by its name.

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

inline int run_one(const Tests& tests, char** argv) {
  tests.at(argv[1])();
  return failures != 0;
}
