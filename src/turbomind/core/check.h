#pragma once

#include <source_location>
#include <stdexcept>

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

// Throws InternalError naming the place.
[[noreturn]] void FailCheck(const char* what, const std::source_location& where);

// FailCheck unless `ok`.
inline void Check(bool ok, const char* what,
                  const std::source_location& where = std::source_location::current()) {
  if (!ok) {
    FailCheck(what, where);
  }
}

}  // namespace turbomind
