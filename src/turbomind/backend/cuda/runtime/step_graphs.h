#pragma once

// Graphs of decode steps. The first step of a shape launches its ops one by one, the second records
// them, and later steps replay the graph.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "turbomind/backend/cuda/runtime/runtime.h"
#include "turbomind/backend/cuda/runtime/step_arrays.h"
#include "turbomind/core/function_ref.h"

namespace turbomind::cuda {

struct GraphDeleter {
  void operator()(Graph graph) const noexcept { DestroyGraph(graph); }
};
using OwnGraph = std::unique_ptr<CUgraphExec_st, GraphDeleter>;

// Record the work that `ops` queues on the stream. If `ops` throws, the stream records no longer.
OwnGraph RecordGraph(Stream stream, FunctionRef<void()> ops);

// Invariant: a graph is replayed only while every address in it is valid. That holds while
// `generations` (of the step's arrays, the workspace and everything else that ops keep) equals the
// value at its recording.
class StepGraphs {
 public:
  // Maximum number of shapes kept. A new shape replaces the one that was unused for longest.
  static constexpr size_t kMaxGraphs = 128;

  explicit StepGraphs(Stream stream) : stream_(stream) {}
  StepGraphs(const StepGraphs&) = delete;
  StepGraphs& operator=(const StepGraphs&) = delete;

  // Run `ops`, or replay the graph recorded for the same shape. The first step of a shape runs the
  // ops, so that they allocate what they need; the second records them. Exceptions from ops
  // propagate, even if they ended a recording early.
  //
  // If there is no memory for another graph, the ops are run and all graphs are dropped. Until
  // addresses change, the limit on shapes is then half the number that had a graph.
  void Run(const StepShape& shape, const FunctionRef<int64_t()>& generations,
           FunctionRef<void()> ops);

  size_t num_shapes() const { return entries_.size(); }
  int num_recorded() const { return num_recorded_; }
  int num_replayed() const { return num_replayed_; }

 private:
  struct Entry {
    StepShape shape;
    OwnGraph graph = {};  // null: seen once
    int64_t last_step = 0;
  };

  void Add(const StepShape& shape);
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
