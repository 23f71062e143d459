#pragma once

#include <cstddef>
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
  // `field` of a request or a configuration is wrong. The text is the field, a space and `reason`.
  InvalidArgument(const std::string& field, const std::string& reason)
      : std::invalid_argument(field + " " + reason), field_size_(field.size()) {}

  // Returns the field, or an empty string if the error names none.
  std::string field() const { return {what(), field_size_}; }

 private:
  size_t field_size_ = 0;  // of the text: copying an exception must not throw
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
