#pragma once

#include <new>
#include <source_location>
#include <stdexcept>
#include <string>

namespace turbomind {

// The caller's mistake. The text says what is wrong with which value, and what to change.
// ValueError in Python.
class InvalidArgument : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A bug in this project: a broken invariant. RuntimeError in Python.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Memory is short. The text says what needs how much, and which option to change. MemoryError in
// Python.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& what) : text_(what) {}
  const char* what() const noexcept override { return text_.what(); }

 private:
  std::runtime_error text_;  // copying it does not throw
};

// Throws InternalError with the source location.
[[noreturn]] void FailCheck(const char* what, const std::source_location& where);

// Throws InternalError unless `ok`. `what` states the requirement.
inline void Check(bool ok, const char* what,
                  const std::source_location& where = std::source_location::current()) {
  if (!ok) {
    FailCheck(what, where);
  }
}

}  // namespace turbomind
