#include <algorithm>

#include "turbomind/backend/cuda/step_graphs.h"

namespace turbomind::cuda {
namespace {

constexpr size_t kMostGraphs = 256;

}  // namespace

void StepGraphs::Clear() {
  for (const Entry& entry : entries_) {
    if (entry.graph != nullptr) {
      DestroyGraph(entry.graph);
    }
  }
  entries_.clear();
}

Graph StepGraphs::Capture(FunctionRef<void()> ops) {
  BeginCapture(stream_);
  try {
    ops();
  } catch (...) {
    DestroyGraph(EndCapture(stream_));
    throw;
  }
  return EndCapture(stream_);
}

void StepGraphs::Run(const StepShape& shape, const FunctionRef<int64_t()>& generations,
                     FunctionRef<void()> ops) {
  if (generations() != generations_ || entries_.size() >= kMostGraphs) {
    Synchronize(stream_);
    Clear();
    generations_ = generations();
  }
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.shape == shape; });
  if (found == entries_.end()) {
    ops();
    entries_.push_back({shape});
    return;
  }
  if (found->graph == nullptr) {
    found->graph = Capture(ops);
    ++num_recorded_;
  } else {
    ++num_replayed_;
  }
  LaunchGraph(found->graph, stream_);
}

}  // namespace turbomind::cuda
