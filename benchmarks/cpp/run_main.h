#pragma once

// What the main functions of benchmark programs share.

#include <cstdio>
#include <exception>

namespace turbomind::bench {

// The exit status of Main(argc, argv); 2 and one line on stderr for whatever it throws.
inline int RunMain(const char* program, int (*main)(int, char**), int argc, char** argv) {
  try {
    return main(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 2;
  }
}

}  // namespace turbomind::bench
