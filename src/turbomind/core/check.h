#pragma once

#include <new>
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

// Memory is short: the text says whose, how much was wanted, and the option to change. MemoryError
// in Python.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& what) : text_(what) {}
  const char* what() const noexcept override { return text_.what(); }

 private:
  std::runtime_error text_;  // copies of it do not throw
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
