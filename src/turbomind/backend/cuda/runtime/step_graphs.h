#pragma once

// Recorded steps: the ops of a decode step are launched once by one, then recorded, then replayed.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/core/function_ref.h"

namespace turbomind::cuda {

// Invariant: a graph is replayed only while every address that it holds is valid: `generations`
// (of the step's arrays, the workspace and whatever else ops keep) are those of its record.
class StepGraphs {
 public:
  // Whose records are kept: the one that no step had for longest makes room for another.
  static constexpr size_t kMaxGraphs = 128;

  explicit StepGraphs(Stream stream) : stream_(stream) {}
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Runs `ops`, or what they did for the same shape. The first step of a shape runs them, so that
  // they allocate what they need; the second records them. What ops throw goes through, also where
  // it has spoilt a record. Where there is no memory for another record, ops are run, all records
  // are dropped, and until addresses change half as many shapes are kept as had one.
  void Run(const StepShape& shape, const FunctionRef<int64_t()>& generations,
           FunctionRef<void()> ops);

  size_t num_shapes() const { return entries_.size(); }
  int num_recorded() const { return num_recorded_; }
  int num_replayed() const { return num_replayed_; }

 private:
  struct Destroy {
    void operator()(Graph graph) const noexcept { DestroyGraph(graph); }
  };
  struct Entry {
    StepShape shape;
    std::unique_ptr<CUgraphExec_st, Destroy> graph = {};  // null: seen once
    int64_t last_step = 0;
  };

  void Add(const StepShape& shape);
  Graph Capture(FunctionRef<void()> ops);
  void DropRecords();

  Stream stream_;
  size_t max_graphs_ = kMaxGraphs;
  std::vector<Entry> entries_;
  int64_t generations_ = -1;
  int64_t num_steps_ = 0;
  int num_recorded_ = 0;
  int num_replayed_ = 0;
};

}  // namespace turbomind::cuda
