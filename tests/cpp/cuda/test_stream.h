#pragma once

#include "turbomind/backend/cuda/runtime/runtime.h"

namespace turbomind::cuda {

// A stream of a test.
class TestStream {
 public:
  TestStream() : stream_(CreateStream()) {}
  ~TestStream() { DestroyStream(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  operator Stream() const { return stream_; }

 private:
  Stream stream_;
};

}  // namespace turbomind::cuda
