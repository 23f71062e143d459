#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/dense/dense_ops.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/backend/cuda/tuner/overlap_tuning.h"
#include "turbomind/backend/cuda/tuner/tuner.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// As in a decode step of one sequence: short launches, each of which needs the one before.
constexpr int kDim = 1024;
constexpr int kRounds = 16;

// Two rows of a chain: x = norm(x), y = gate(x), x = x + y.
class Chain {
 public:
  explicit Chain(const Context& ctx) : ctx_(ctx), memory_(AllocateGpu(kBytes), FreeGpu) {}

  // Record the chain. It begins with values that no earlier run has changed.
  void Record(bool overlap) {
    Reset();
    OverlapLaunches(ctx_.stream, overlap);
    graph_.reset(RecordGraph(ctx_.stream, [&] {
      for (int i = 0; i < kRounds; ++i) {
        CudaNorm(ctx_, {.x = x(), .weight = weight(), .out = x(), .num_rows = 1, .dim = 2 * kDim});
        CudaGatedActivation(ctx_, {.gate_up = x(), .out = y(), .num_rows = 1, .dim = kDim});
        CudaAdd(ctx_, {.x = y(), .out = x(), .count = kDim, .scale = 0.5f});
      }
    }));
  }
  void Run() { LaunchGraph(graph_.get(), ctx_.stream); }

  // Return x after a number of runs that follow each other.
  std::vector<float> Result() {
    Reset();
    for (int i = 0; i < 3; ++i) {
      Run();
    }
    std::vector<float> values(2 * kDim);
    CopyBytes(values.data(), x(), values.size() * sizeof(float), ctx_.stream);
    Synchronize(ctx_.stream);
    return values;
  }

 private:
  static constexpr size_t kBytes = 5 * kDim * sizeof(float);
  float* x() { return static_cast<float*>(memory_.get()); }
  float* weight() { return x() + 2 * kDim; }
  float* y() { return x() + 4 * kDim; }

  void Reset() {
    std::vector<float> values(5 * kDim);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = std::sin(static_cast<float>(i)) + 0.1f;
    }
    CopyBytes(x(), values.data(), kBytes, ctx_.stream);
    Synchronize(ctx_.stream);
  }

  struct Destroy {
    void operator()(Graph graph) const noexcept { DestroyGraph(graph); }
  };
  const Context& ctx_;
  std::unique_ptr<void, void (*)(void*)> memory_;
  std::unique_ptr<CUgraphExec_st, Destroy> graph_;
};

std::optional<TunedChoice> FindSaved(const std::vector<TunedChoice>& saved) {
  const auto found = std::ranges::find(saved, kOverlapQuestion, &TunedChoice::question);
  const bool is_known = found != saved.end() && found->table_kernel == kOrdered &&
                        (found->kernel == kOrdered || found->kernel == kOverlapped);
  return is_known ? std::optional(*found) : std::nullopt;
}

// Return nothing if the results are wrong, so that the next start measures again.
std::optional<TunedChoice> Choose(const Context& ctx, OverlapClock time, TuningResult* result) {
  Chain ordered(ctx);
  Chain overlapped(ctx);
  ordered.Record(false);
  overlapped.Record(true);
  if (ordered.Result() != overlapped.Result()) {
    result->wrong.push_back(std::string(kOverlapped) + " for " + kOverlapQuestion);
    return std::nullopt;
  }
  const auto us = [&](size_t, int kernel) -> std::optional<double> {
    Chain& chain = kernel == 0 ? ordered : overlapped;
    chain.Run();  // while it runs, the host queues the one that is timed
    return time(kernel == 0 ? kOrdered : kOverlapped, [&] { chain.Run(); });
  };
  const auto no_clock = [] { return 0.; };
  const TunerAnswer answer = *ChooseByTime({{0, 1}}, {us, no_clock}, 1)[0];
  return TunedChoice{kOverlapQuestion, answer.kernel == 0 ? kOrdered : kOverlapped, kOrdered,
                     answer.us, answer.table_us};
}

}  // namespace

void TuneOverlap(const Context& ctx, const std::vector<TunedChoice>& saved, OverlapClock time,
                 TuningResult* result) {
  Check(!ctx.deterministic, "a deterministic device must not be tuned");
  std::optional<TunedChoice> choice = FindSaved(saved);
  if (!choice.has_value()) {
    choice = Choose(ctx, time, result);
    result->num_measured += choice.has_value() ? 1 : 0;
  }
  OverlapLaunches(ctx.stream, choice.has_value() && choice->kernel == kOverlapped);
  if (choice.has_value()) {
    result->choices.push_back(*choice);
  }
}

}  // namespace turbomind::cuda
