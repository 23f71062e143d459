#pragma once

#include <source_location>
#include <stdexcept>
#include <string>

namespace turbomind {

// The caller's mistake: the text says what, got, wanted, and the option to change. ValueError in
// Python.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Our own bug: a broken invariant. RuntimeError in Python.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Throws InternalError naming the place unless `ok`.
inline void Check(bool ok, const char* what,
                  std::source_location where = std::source_location::current()) {
  if (!ok) {
    throw InternalError(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                        ": check failed: " + what);
  }
}

}  // namespace turbomind
