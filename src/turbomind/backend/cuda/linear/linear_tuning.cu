#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "turbomind/backend/cuda/linear/linear_tuning.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// A graph has so many calls that they read more weights than an L2 cache holds, as a step does.
constexpr int64_t kRotatedBytes = int64_t{128} << 20;
constexpr int64_t kMinCalls = 3;
constexpr int64_t kMaxCalls = 12;

// Results of a kernel are compared in this many rows at the start, in the middle and at the end,
// and for each of these numbers of outputs. Roundings of x and of weights to BF16 change them by
// 4e-3 of their norm, and 8-bit activations by 3e-2.
constexpr int64_t kComparedRows = 4;
constexpr size_t kComparedOutputs = 64;
constexpr double kMaxDifference = 0.1;

// Return whether results differ from others by at most kMaxDifference of their norm. REQUIRES:
// there are as many.
bool AreClose(std::span<const float> got, std::span<const float> want) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double distance = double{got[i]} - want[i];
    difference += distance * distance;
    norm += double{want[i]} * want[i];
  }
  return std::isfinite(norm) && difference <= kMaxDifference * kMaxDifference * norm;
}

// Return whether rows of `outputs` values are close in all their parts.
bool AreCloseEverywhere(std::span<const float> got, std::span<const float> want, size_t outputs) {
  for (size_t row = 0; row < want.size(); row += outputs) {
    for (size_t first = 0; first < outputs; first += kComparedOutputs) {
      const size_t count = std::min(kComparedOutputs, outputs - first);
      if (!AreClose(got.subspan(row + first, count), want.subspan(row + first, count))) {
        return false;
      }
    }
  }
  return true;
}

// The layers with one stack.
struct Layers {
  std::vector<std::span<const LinearPart>> parts;
  int max_rows = 0;
};
using LayersOfStack = std::map<LinearStack, Layers>;

LayersOfStack FindStacks(const std::vector<LayerToTune>& layers) {
  LayersOfStack found;
  for (const LayerToTune& layer : layers) {
    const auto add = [&](const LinearStack& stack, std::span<const LinearPart> parts) {
      Layers& same = found[stack];
      same.parts.push_back(parts);
      same.max_rows = std::max(same.max_rows, layer.max_rows);
    };
    std::span<const LinearPart> rest = layer.parts;
    if (layer.grouped) {
      LinearStack stack = StackOfExperts(rest);
      stack.gated = layer.gated;
      add(stack, rest);
      continue;
    }
    if (const auto whole = StackOfCall(rest, layer.normed, layer.gated); whole.has_value()) {
      add(*whole, rest);
      continue;
    }
    while (!rest.empty()) {
      const auto parts = rest.first(CountStacked(rest));
      rest = rest.subspan(parts.size());
      add(StackOf(parts), parts);
    }
  }
  return found;
}

struct Question {
  const LayersOfStack::value_type* layers = nullptr;
  int bucket = 0;
  std::vector<LinearKernel> kernels;  // the table's first

  const LinearStack& stack() const { return layers->first; }
  int num_rows() const { return kRowBuckets[static_cast<size_t>(bucket)]; }
  TunerQuestion names() const {
    TunerQuestion names = {
        stack().name() + ", " + std::to_string(num_rows()) + (bucket == 0 ? " row" : " rows"), {}};
    for (const LinearKernel kernel : kernels) {
      names.kernels.emplace_back(NameOf(kernel));
    }
    return names;
  }
};

// Return the questions in the order in which their answers gain the most: few rows, which every
// step of a single user has, and then the bytes of the weights.
std::vector<Question> FindQuestions(const LayersOfStack& layers, const LinearMachine& machine) {
  std::vector<Question> questions;
  for (const auto& same : layers) {
    const int last = RowBucketOf(same.first, same.second.max_rows);
    const int end = last == kNoBucket ? NumRowBuckets(same.first) : last + 1;
    for (int bucket = 0; bucket < end; ++bucket) {
      Question question = {&same, bucket, CandidatesOf(same.first, bucket, machine)};
      if (question.kernels.size() > 1) {
        questions.push_back(std::move(question));
      }
    }
  }
  const auto bytes = [](const Question& question) {
    return question.stack().num_bytes() *
           static_cast<int64_t>(question.layers->second.parts.size());
  };
  std::stable_sort(questions.begin(), questions.end(), [&](const Question& a, const Question& b) {
    return a.bucket != b.bucket ? a.bucket < b.bucket : bytes(a) > bytes(b);
  });
  return questions;
}

// Runs the kernels of one question after another. Call EndQuestion after the last one.
class Runner {
 public:
  Runner(const Context& ctx, CudaLinear& linear, Tuner& tuner)
      : workspace_(ctx.stream),
        x_(ctx.stream),
        y_(ctx.stream),
        normed_(ctx.stream),
        activated_(ctx.stream),
        offsets_(ctx.stream),
        ctx_(ctx),
        linear_(linear),
        tuner_(tuner) {
    ctx_.workspace = &workspace_;
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  // Throws OutOfMemory.
  std::optional<TunerAnswer> Measure(const Question& question) {
    question_ = &question;
    Begin();
    const TunerQuestion names = question.names();
    return ChooseByTime(right_, [&](size_t kernel) -> std::optional<double> {
      const Graph graph = graphs_.at(kernel).get();
      LaunchGraph(graph, ctx_.stream);  // while it runs, the host queues the one that is timed
      return tuner_.Time(names, kernel, [&] { LaunchGraph(graph, ctx_.stream); }) / num_calls();
    });
  }

  // Free the graphs of the last question, and give it the table's kernel again.
  void EndQuestion() {
    Synchronize(ctx_.stream);
    graphs_.clear();
    if (question_ != nullptr) {
      linear_.choices().Clear(stack(), question_->bucket);
    }
    question_ = nullptr;
  }

 private:
  int num_calls() const {
    const int64_t num_experts = std::max(stack().num_experts, 1);
    const int64_t used_experts = std::min<int64_t>(num_experts, question_->num_rows());
    const int64_t bytes = stack().num_bytes() / num_experts * used_experts;
    return static_cast<int>(std::clamp(CeilDiv(kRotatedBytes, bytes), kMinCalls, kMaxCalls));
  }
  size_t num_layers() const {
    return std::min(question_->layers->second.parts.size(), static_cast<size_t>(num_calls()));
  }
  const LinearStack& stack() const { return question_->stack(); }

  // Record a graph of each kernel.
  void Begin() {
    const int64_t num_rows = question_->num_rows();
    FillX(num_rows * stack().cols);
    y_.Get(static_cast<size_t>(num_rows * stack().total_outputs()) * sizeof(float));
    if (stack().normed) {
      normed_.Get(static_cast<size_t>(num_rows * stack().cols) * sizeof(float));
    }
    if (stack().gated) {
      activated_.Get(static_cast<size_t>(num_rows * num_results()) * sizeof(float));
    }
    UploadOffsets();
    // The first calls allocate memory, load kernels, and upload the tables of experts. A recording
    // must not do that.
    for (size_t layer = 0; layer < num_layers(); ++layer) {
      Call(layer);
    }
    FindRightKernels();
    for (const size_t kernel : right_) {
      Choose(question_->kernels[kernel]);
      graphs_[kernel] = RecordGraph(ctx_.stream, [&] {
        for (int i = 0; i < num_calls(); ++i) {
          Call(static_cast<size_t>(i) % num_layers());
        }
      });
    }
  }

  // Keep the table's kernel and those with close results. A kernel may come into use on a kind of
  // GPU that has never run it, so each GPU checks it. The second call shows what the first one
  // leaves behind.
  void FindRightKernels() {
    right_.clear();
    std::vector<float> want;
    for (size_t kernel = 0; kernel < question_->kernels.size(); ++kernel) {
      Choose(question_->kernels[kernel]);
      Call(0);
      SpoilResults();
      Call(0);
      const std::vector<float> got = ReadResults();
      if (right_.empty()) {
        want = got;
      } else if (!AreCloseEverywhere(got, want, static_cast<size_t>(num_results()))) {
        tuner_.AddWrong(question_->names(), kernel);
        continue;
      }
      right_.push_back(kernel);
    }
  }

  // The values per row of a call's results, which are y or its activation.
  int64_t num_results() const { return stack().total_outputs() / (stack().gated ? 2 : 1); }
  float* Results() { return static_cast<float*>((stack().gated ? activated_ : y_).Get(0)); }

  // Call fn(first, count) for ranges of rows at the start, in the middle and at the end of them.
  template <class Fn>
  void ForComparedRows(Fn fn) const {
    const int64_t num_rows = question_->num_rows();
    const int64_t count = std::min(num_rows, kComparedRows);
    for (const int64_t first : {int64_t{0}, (num_rows - count) / 2, num_rows - count}) {
      fn(first, count);
    }
  }

  // Overwrite the compared rows with NaN.
  void SpoilResults() {
    const int64_t outputs = num_results();
    const std::vector<float> nans(static_cast<size_t>(kComparedRows * outputs), NAN);
    float* y = Results();
    ForComparedRows([&](int64_t first, int64_t count) {
      CopyBytes(y + first * outputs, nans.data(),
                static_cast<size_t>(count * outputs) * sizeof(float), ctx_.stream);
    });
    Synchronize(ctx_.stream);  // before `nans` is destroyed
  }

  // Return the compared rows.
  std::vector<float> ReadResults() {
    const int64_t outputs = num_results();
    std::vector<std::vector<float>> parts;
    const float* y = Results();
    ForComparedRows([&](int64_t first, int64_t count) {
      parts.emplace_back(static_cast<size_t>(count * outputs));
      CopyBytes(parts.back().data(), y + first * outputs, parts.back().size() * sizeof(float),
                ctx_.stream);
    });
    Synchronize(ctx_.stream);
    std::vector<float> rows;
    for (const std::vector<float>& part : parts) {
      rows.insert(rows.end(), part.begin(), part.end());
    }
    return rows;
  }

  void Choose(LinearKernel kernel) { linear_.choices().Set(stack(), question_->bucket, kernel); }

  // Make `count` values of x readable. They are random: the power of the tensor cores, and with it
  // their clock, depends on the values.
  void FillX(int64_t count) {
    if (count <= num_x_) {
      return;
    }
    std::vector<float> pattern(static_cast<size_t>(std::min(count, kPatternValues)));
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::generate(pattern.begin(), pattern.end(), [&] { return uniform(random); });
    num_x_ = 0;
    auto* x = static_cast<float*>(x_.Get(static_cast<size_t>(count) * sizeof(float)));
    for (int64_t at = 0; at < count; at += kPatternValues) {
      const int64_t values = std::min(count - at, kPatternValues);
      CopyBytes(x + at, pattern.data(), static_cast<size_t>(values) * sizeof(float), ctx_.stream);
    }
    Synchronize(ctx_.stream);  // before `pattern` is destroyed
    num_x_ = count;
  }

  // Spread the rows evenly over the experts.
  void UploadOffsets() {
    const int num_experts = stack().num_experts;
    std::vector<int32_t> offsets(static_cast<size_t>(num_experts) + 1);
    for (int e = 0; e <= num_experts && num_experts > 0; ++e) {
      offsets[static_cast<size_t>(e)] =
          static_cast<int32_t>(int64_t{question_->num_rows()} * e / num_experts);
    }
    const size_t num_bytes = offsets.size() * sizeof(int32_t);
    CopyBytes(offsets_.Get(num_bytes), offsets.data(), num_bytes, ctx_.stream);
    Synchronize(ctx_.stream);
  }

  void Call(size_t layer) {
    const std::span<const LinearPart> parts = question_->layers->second.parts[layer];
    const int num_parts = static_cast<int>(parts.size());
    const int num_rows = question_->num_rows();
    const auto* x = static_cast<const float*>(x_.Get(0));
    auto* y = static_cast<float*>(y_.Get(0));
    const GatedActivationParams gate = {.gate_up = y,
                                        .out = stack().gated ? Results() : nullptr,
                                        .num_rows = num_rows,
                                        .dim = static_cast<int>(num_results()),
                                        .interleaved = stack().num_experts > 0};
    if (stack().num_experts == 0) {
      auto* normed = static_cast<float*>(normed_.Get(0));
      NormParams norm;
      if (stack().normed) {  // x serves as its own weights
        const auto cols = static_cast<int>(stack().cols);
        norm = {.x = x, .weight = x, .out = normed, .num_rows = num_rows, .dim = cols};
      }
      linear_.Project(ctx_, {.norm = norm,
                             .linear = {.x = stack().normed ? normed : x,
                                        .x_stride = stack().cols,
                                        .parts = parts.data(),
                                        .num_parts = num_parts,
                                        .y = y,
                                        .y_stride = stack().total_outputs(),
                                        .num_rows = num_rows},
                             .gate = gate});
      return;
    }
    const GroupedLinearParams linear = {.x = x,
                                        .x_stride = stack().cols,
                                        .y = y,
                                        .y_stride = stack().total_outputs(),
                                        .experts = parts.data(),
                                        .num_experts = num_parts,
                                        .offsets = static_cast<const int32_t*>(offsets_.Get(0)),
                                        .num_rows = num_rows};
    if (stack().gated) {
      linear_.GroupedGate(ctx_, {linear, gate});
    } else {
      linear_.GroupedLinear(ctx_, linear);
    }
  }

  // Odd, so that no two rows have the same values.
  static constexpr int64_t kPatternValues = (int64_t{1} << 18) - 5;

  Workspace workspace_;
  Workspace x_;
  Workspace y_;
  Workspace normed_;
  Workspace activated_;
  Workspace offsets_;
  Context ctx_;
  CudaLinear& linear_;
  Tuner& tuner_;
  const Question* question_ = nullptr;
  std::vector<size_t> right_;  // kernels of the question, the table's first
  std::map<size_t, OwnGraph> graphs_;
  int64_t num_x_ = 0;  // values of x_ that are filled
};

}  // namespace

void TuneLinear(const Context& ctx, CudaLinear& linear, const std::vector<LayerToTune>& layers,
                Tuner& tuner) {
  Check(!ctx.deterministic, "a deterministic device must not be tuned");
  const LayersOfStack stacks = FindStacks(layers);
  Runner runner(ctx, linear, tuner);
  for (const Question& question : FindQuestions(stacks, linear.machine(ctx))) {
    const std::optional<size_t> kernel =
        tuner.Answer(question.names(), [&] { return runner.Measure(question); });
    runner.EndQuestion();
    if (kernel.has_value()) {
      linear.choices().Set(question.stack(), question.bucket, question.kernels[*kernel]);
    }
  }
  for (const LayerToTune& layer : layers) {
    linear.ForgetExperts(layer.parts.data());
  }
}

}  // namespace turbomind::cuda
