#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "turbomind/backend/cuda/prefill/prefill_launch.h"
#include "turbomind/backend/cuda/prefill/prefill_tuning.h"
#include "turbomind/core/check.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda {
namespace {

// A chunk continues a context. Both grow with the GPU, so that it is as busy as with a long prompt.
constexpr int kKvHeads = 2;
constexpr int kGroup = 4;
constexpr int kTokensPerSm = 64;     // 4 blocks of 128 rows
constexpr int kFewTokensPerSm = 12;  // blocks for three SMs of four
constexpr int kContextPerSm = 64;
constexpr int kOffset = 13;  // so that tiles do not begin where the chunk begins

// Scores have a deviation of about 2.7. A few positions then have most of the weight, so that one
// that is wrongly seen or hidden shows.
constexpr float kScoreScale = 8.f;
// A row's difference relative to its norm. Rounding the weights to BF16 takes 4e-3.
constexpr double kMaxDifference = 0.05;

// Odd, so that no two rows have the same values.
constexpr int64_t kPatternValues = (int64_t{1} << 16) - 5;

// GPU memory that a pattern of random values in [-1, 1] fills.
template <class T>
class RandomArray {
 public:
  template <class Convert>
  RandomArray(const Context& ctx, int64_t count, uint32_t seed, Convert convert)
      : array_(ctx.stream) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> uniform(-1.f, 1.f);
    std::vector<T> pattern(static_cast<size_t>(std::min(count, kPatternValues)));
    std::generate(pattern.begin(), pattern.end(), [&] { return convert(uniform(random)); });
    data_ = static_cast<T*>(array_.Get(static_cast<size_t>(count) * sizeof(T)));
    for (int64_t at = 0; at < count; at += kPatternValues) {
      const int64_t values = std::min(count - at, kPatternValues);
      CopyBytes(data_ + at, pattern.data(), static_cast<size_t>(values) * sizeof(T), ctx.stream);
    }
    Synchronize(ctx.stream);  // before `pattern` is destroyed
  }
  T* data() { return data_; }

 private:
  Workspace array_;
  T* data_ = nullptr;
};

int NumTokens(const Context& ctx, const PrefillQuestion& question) {
  return ctx.gpu.num_sms * (question.fills_gpu ? kTokensPerSm : kFewTokensPerSm);
}
int NumPositions(const Context& ctx, const PrefillQuestion& question) {
  return ctx.gpu.num_sms * kContextPerSm + kOffset + NumTokens(ctx, question);
}

// Return the launch of a question, without memory.
PrefillParams LaunchOf(const Context& ctx, const PrefillQuestion& question) {
  PrefillParams params;
  params.q_stride = int64_t{kKvHeads} * kGroup * question.head_dim;
  params.q_heads = kKvHeads * kGroup;
  params.group = kGroup;
  params.num_heads = kKvHeads;
  params.softmax_scale = kScoreScale / std::sqrt(static_cast<float>(question.head_dim));
  params.num_sequences = 1;
  params.sequences[0].num_tokens = NumTokens(ctx, question);
  params.sequences[0].position = NumPositions(ctx, question) - NumTokens(ctx, question);
  params.sequences[0].ranges[0] = {0, NumPositions(ctx, question), 0};
  return params;
}

// Return whether the question is about its launch. A small GPU has no launch with few rows.
bool HasLaunch(const Context& ctx, const PrefillQuestion& question) {
  const PrefillUse use =
      FindPrefillUse(ctx, question.type, question.head_dim, LaunchOf(ctx, question));
  return use.has_choice && use.question == question;
}

// The launch of a question, and its memory.
class Trial {
 public:
  Trial(const Context& ctx, const PrefillQuestion& question)
      : ctx_(ctx),
        question_(question),
        q_(ctx, num_values(), 1, [](float x) { return x; }),
        k_(ctx, num_cached(), 2, [&](float x) { return Round(x); }),
        v_(ctx, num_cached(), 3, [&](float x) { return Round(x); }),
        out_(ctx.stream),
        params_(LaunchOf(ctx, question)) {
    params_.q = q_.data();
    params_.out = static_cast<float*>(out_.Get(static_cast<size_t>(num_values()) * sizeof(float)));
    params_.views[0] = {k_.data(), v_.data(), NumPositions(ctx, question)};
  }

  void Run(PrefillProducts products) {
    PrefillChoices choices;
    choices.Set(question_, products);
    LaunchPrefill(ctx_, choices, question_.type, question_.head_dim, params_);
  }
  // Return the results of a second launch. It shows what the first one leaves behind.
  std::vector<float> Results(PrefillProducts products) {
    std::vector<float> values(static_cast<size_t>(num_values()), NAN);
    Run(products);
    CopyBytes(params_.out, values.data(), values.size() * sizeof(float), ctx_.stream);
    Run(products);
    CopyBytes(values.data(), params_.out, values.size() * sizeof(float), ctx_.stream);
    Synchronize(ctx_.stream);
    return values;
  }

 private:
  uint16_t Round(float x) const {
    return question_.type == DataType::kBFloat16 ? FloatToBFloat16(x) : FloatToHalf(x);
  }
  int64_t num_values() const {
    return int64_t{NumTokens(ctx_, question_)} * kKvHeads * kGroup * question_.head_dim;
  }
  int64_t num_cached() const {
    return int64_t{NumPositions(ctx_, question_)} * kKvHeads * question_.head_dim;
  }

  const Context& ctx_;
  const PrefillQuestion question_;
  RandomArray<float> q_;
  RandomArray<uint16_t> k_;
  RandomArray<uint16_t> v_;
  Workspace out_;
  PrefillParams params_;
};

TunerQuestion NamesOf(const PrefillQuestion& question) {
  return {question.name(), {NameOf(PrefillProducts::kMma), NameOf(PrefillProducts::kWarpGroups)}};
}

// Return nothing if the results are wrong.
std::optional<TunerAnswer> Measure(const Context& ctx, const PrefillQuestion& question,
                                   Tuner& tuner) {
  const TunerQuestion names = NamesOf(question);
  Trial trial(ctx, question);
  if (!AreRowsClose(trial.Results(PrefillProducts::kWarpGroups),
                    trial.Results(PrefillProducts::kMma), question.head_dim, kMaxDifference)) {
    tuner.AddWrong(names, 1);
    return std::nullopt;
  }
  return ChooseByTime({0, 1}, [&](size_t kernel) -> std::optional<double> {
    const auto products = kernel == 0 ? PrefillProducts::kMma : PrefillProducts::kWarpGroups;
    trial.Run(products);  // while it runs, the host queues the launch that is timed
    return tuner.Time(names, kernel, [&] { trial.Run(products); });
  });
}

}  // namespace

void TunePrefill(const Context& ctx, PrefillChoices& choices,
                 const std::vector<AttentionToTune>& all, Tuner& tuner) {
  Check(!ctx.deterministic, "a deterministic device must not be tuned");
  if (!ctx.has_warp_groups) {
    return;
  }
  std::set<PrefillQuestion> questions;
  for (const AttentionToTune& attention : all) {
    const int head_dim = attention.layers.layout.config().head_dim;
    if (attention.layers.layout.config().rotary_dim > 0) {
      continue;  // latents have a kernel of their own
    }
    for (const block::Config::LayerFormats& formats : attention.layers.layout.config().layers) {
      const DataType type =
          PrefillType(formats.k, formats.v, attention.layers.layout.config().dtype);
      questions.insert({type, head_dim, false});
      questions.insert({type, head_dim, true});
    }
  }
  for (const PrefillQuestion& question : questions) {
    if (!HasLaunch(ctx, question)) {
      continue;
    }
    const std::optional<size_t> kernel =
        tuner.Answer(NamesOf(question), [&] { return Measure(ctx, question, tuner); });
    choices.Set(question, kernel == 1 ? PrefillProducts::kWarpGroups : PrefillProducts::kMma);
  }
}

}  // namespace turbomind::cuda
