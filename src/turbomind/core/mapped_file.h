#pragma once

#include <cstddef>
#include <string>

namespace turbomind {

// Protects the readers of a mapped file. If a page cannot be read, because the file was truncated
// or its disk fails, the system sends SIGBUS, which ends the process. While a MappedFile exists,
// readers get zeros instead, from that page to the end of the mapping, and the file is lost.
//
// A check of the file's size before a step could not replace the handler: a step takes seconds, and
// the file may become shorter while it runs.
//
// The constructor installs the handler. It forwards every other SIGBUS to the handler before it.
// Any thread may use this class and the functions below.
class MappedFile {
 public:
  // `name` is for messages. REQUIRES: the bytes stay mapped while this object exists. Throws
  // InvalidArgument if too many files are mapped.
  MappedFile(const void* data, size_t num_bytes, std::string name);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

 private:
  size_t slot_;
};

// Returns the name of the mapped file that contains `data` if it is lost, otherwise "".
std::string LostFile(const void* data);
// Throws std::runtime_error that names the file if `data` is in a file that is lost.
void CheckMappedFile(const void* data);

}  // namespace turbomind
