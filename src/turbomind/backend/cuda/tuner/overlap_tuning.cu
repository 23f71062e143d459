#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/dense/dense_ops.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/backend/cuda/tuner/overlap_tuning.h"
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
    graph_ = RecordGraph(ctx_.stream, [&] {
      for (int i = 0; i < kRounds; ++i) {
        CudaNorm(ctx_, {.x = x(), .weight = weight(), .out = x(), .num_rows = 1, .dim = 2 * kDim});
        CudaGatedActivation(ctx_, {.gate_up = x(), .out = y(), .num_rows = 1, .dim = kDim});
        CudaAdd(ctx_, {.x = y(), .out = x(), .count = kDim, .scale = 0.5f});
      }
    });
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

  const Context& ctx_;
  std::unique_ptr<void, void (*)(void*)> memory_;
  OwnGraph graph_;
};

// Return nothing if the results are wrong.
std::optional<TunerAnswer> Measure(const Context& ctx, const TunerQuestion& question,
                                   Tuner& tuner) {
  Chain ordered(ctx);
  Chain overlapped(ctx);
  ordered.Record(false);
  overlapped.Record(true);
  if (ordered.Result() != overlapped.Result()) {
    tuner.AddWrong(question, 1);
    return std::nullopt;
  }
  return ChooseByTime({0, 1}, [&](size_t kernel) -> std::optional<double> {
    Chain& chain = kernel == 0 ? ordered : overlapped;
    chain.Run();  // while it runs, the host queues the one that is timed
    return tuner.Time(question, kernel, [&] { chain.Run(); });
  });
}

}  // namespace

void TuneOverlap(const Context& ctx, Tuner& tuner) {
  Check(!ctx.deterministic, "a deterministic device must not be tuned");
  const TunerQuestion question = {kOverlapQuestion, {kOrdered, kOverlapped}};
  const std::optional<size_t> kernel =
      tuner.Answer(question, [&] { return Measure(ctx, question, tuner); });
  OverlapLaunches(ctx.stream, kernel == 1);
}

}  // namespace turbomind::cuda
