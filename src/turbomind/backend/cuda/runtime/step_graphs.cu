#include <algorithm>

#include "turbomind/backend/cuda/runtime/step_graphs.h"

namespace turbomind::cuda {

OwnGraph RecordGraph(Stream stream, FunctionRef<void()> ops) {
  BeginCapture(stream);
  try {
    ops();
  } catch (...) {
    try {
      DestroyGraph(EndCapture(stream));
    } catch (...) {  // the original exception is thrown below
    }
    throw;
  }
  return OwnGraph(EndCapture(stream));
}

// Add an entry for a shape that is seen for the first time. If the table is full, drop the entry
// that was unused for longest.
void StepGraphs::Add(const StepShape& shape) {
  if (entries_.size() == max_graphs_) {
    const auto oldest =
        std::min_element(entries_.begin(), entries_.end(),
                         [](const Entry& a, const Entry& b) { return a.last_step < b.last_step; });
    Synchronize(stream_);  // its graph may still run
    *oldest = std::move(entries_.back());
    entries_.pop_back();
  }
  entries_.push_back({.shape = shape, .last_step = num_steps_});
}

void StepGraphs::DropRecords() {
  const auto num_graphs = std::count_if(entries_.begin(), entries_.end(),
                                        [](const Entry& entry) { return entry.graph != nullptr; });
  max_graphs_ = std::max<size_t>(1, static_cast<size_t>(num_graphs) / 2);
  Synchronize(stream_);  // the graphs may still run
  entries_.clear();
}

void StepGraphs::Run(const StepShape& shape, const FunctionRef<int64_t()>& generations,
                     FunctionRef<void()> ops) {
  if (generations() != generations_) {
    Synchronize(stream_);
    entries_.clear();
    max_graphs_ = kMaxGraphs;
    generations_ = generations();
  }
  ++num_steps_;
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.shape == shape; });
  if (found == entries_.end()) {
    ops();
    Add(shape);
    return;
  }
  found->last_step = num_steps_;
  if (found->graph == nullptr) {
    try {
      found->graph = RecordGraph(stream_, ops);
      LaunchGraph(found->graph.get(), stream_);
      ++num_recorded_;
    } catch (const OutOfMemory&) {
      DropRecords();
      ops();
    }
    return;
  }
  LaunchGraph(found->graph.get(), stream_);
  ++num_replayed_;
}

}  // namespace turbomind::cuda
