#pragma once

// Measures the time of work on a stream.

#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/core/function_ref.h"

namespace turbomind::cuda {

class EventTimer {
 public:
  explicit EventTimer(Stream stream)
      : stream_(stream), begin_(CreateTimedEvent()), end_(CreateTimedEvent()) {}
  ~EventTimer() {
    DestroyEvent(begin_);
    DestroyEvent(end_);
  }
  EventTimer(const EventTimer&) = delete;
  EventTimer& operator=(const EventTimer&) = delete;

  // Return the microseconds that the GPU takes for the work that `queue` queues. Waits for it.
  double Time(FunctionRef<void()> queue) {
    Record(begin_, stream_);
    queue();
    Record(end_, stream_);
    WaitFor(end_);
    return MicrosecondsBetween(begin_, end_);
  }

 private:
  Stream stream_;
  Event begin_;
  Event end_;
};

}  // namespace turbomind::cuda
