#include "turbomind/core/check.h"

#include <string>

namespace turbomind {

void FailCheck(const char* what, const std::source_location& where) {
  throw InternalError(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
                      ": check failed: " + what);
}

}  // namespace turbomind
