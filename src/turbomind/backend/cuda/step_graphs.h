#pragma once

// Recorded steps: the ops of a decode step are launched once by one, then recorded, then replayed.

#include <cstdint>
#include <vector>

#include "turbomind/backend/cuda/runtime.h"
#include "turbomind/backend/cuda/step_arrays.h"
#include "turbomind/core/function_ref.h"

namespace turbomind::cuda {

// Invariant: a graph is replayed only while every address that it holds is valid: `generations`
// (of the step's arrays, the workspace and whatever else ops keep) are those of its record.
class StepGraphs {
 public:
  explicit StepGraphs(Stream stream) : stream_(stream) {}
  ~StepGraphs() { Clear(); }
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Runs `ops`, or what they did for the same shape. The first step of a shape runs them, so that
  // they allocate what they need; the second records them. What ops throw goes through.
  void Run(const StepShape& shape, const FunctionRef<int64_t()>& generations,
           FunctionRef<void()> ops);

  int num_recorded() const { return num_recorded_; }
  int num_replayed() const { return num_replayed_; }

 private:
  struct Entry {
    StepShape shape;
    Graph graph = nullptr;  // null: seen once
  };

  void Clear();
  Graph Capture(FunctionRef<void()> ops);

  Stream stream_;
  std::vector<Entry> entries_;
  int64_t generations_ = -1;
  int num_recorded_ = 0;
  int num_replayed_ = 0;
};

}  // namespace turbomind::cuda
