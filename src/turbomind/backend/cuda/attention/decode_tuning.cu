#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <random>
#include <utility>

#include "turbomind/backend/cuda/attention/attention_ops.h"
#include "turbomind/backend/cuda/attention/decode_tuning.h"
#include "turbomind/backend/cuda/decode/decode_variants.h"
#include "turbomind/backend/cuda/large_head/large_head_ops.h"
#include "turbomind/backend/cuda/runtime/step_graphs.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// The numbers of sequences that are measured. Each also decides for those up to the next one.
constexpr int kSeqs[] = {1, 8, 64};
// Positions of all sequences together, for each SM and each of kSeqs.
constexpr int kPositionsPerSm[] = {256, 512, 1024};
constexpr int kWaves[] = {1, 3};
// The rows of a call are read again after so many bytes for each SM, together more than an L2 cache
// holds, or after kMaxCalls calls.
constexpr int64_t kRotatedBytesPerSm = int64_t{1} << 20;
constexpr int64_t kMaxCalls = 4;
// A row's difference relative to its norm. Schedules add the same numbers in another order, and
// weights of a BF16 cache are rounded to 4e-3.
constexpr double kMaxDifference = 2e-2;
// Scores have a deviation of a few units. Then some positions have most of the weight, but not one,
// and a part that is lost or added twice shows. Random int8 and int4 rows have large values.
constexpr float kScoreScale = 4.f;
constexpr float kIntegerScoreScale = 0.04f;

struct Question {
  const AttentionToTune* attention;
  size_t size;  // index in kSeqs

  int num_seqs() const { return kSeqs[size]; }
  DecodeUse use() const {
    const LayerGroup& layers = attention->layers;
    return {LayerRule::Of(layers.window, layers.rule), attention->q_heads,
            layers.layout.config().kv_heads, num_seqs()};
  }
  KvLayerView View(std::byte* data, std::byte* scales) const {
    return attention->layers.layout.LayerView(0, data, scales);
  }
  std::string name() const {
    const block::Config& config = attention->layers.layout.config();
    const LayerGroup& layers = attention->layers;
    std::string text = "decode attention, K ";
    text += ToString(config.layers[0].k) + std::string(" V ") + ToString(config.layers[0].v) + " " +
            ToString(config.dtype) + ", head_dim " + std::to_string(config.head_dim) + ", " +
            std::to_string(attention->q_heads) + " heads over " + std::to_string(config.kv_heads) +
            ", blocks of " + std::to_string(config.block_seq_len);
    text += layers.window != 0 ? ", window " + std::to_string(layers.window) : "";
    text += layers.rule.enabled()
                ? ", 16-bit window of " + std::to_string(layers.rule.sink_blocks) + " and " +
                      std::to_string(layers.rule.recent_blocks) + " blocks"
                : "";
    return text + ", from " + std::to_string(num_seqs()) +
           (num_seqs() == 1 ? " sequence" : " sequences");
  }
};

// Return the questions, one for each DecodeUse.
std::vector<Question> QuestionsFor(const std::vector<AttentionToTune>& all) {
  std::vector<Question> questions;
  for (const AttentionToTune& attention : all) {
    if (attention.layers.layout.config().rotary_dim > 0) {
      continue;  // latents have kernels of their own
    }
    for (size_t size = 0; size < std::size(kSeqs); ++size) {
      const Question question = {&attention, size};
      if (kSeqs[size] > attention.max_seqs) {
        break;
      }
      const bool is_known = std::ranges::any_of(
          questions, [&](const Question& other) { return other.use() == question.use(); });
      if (!is_known) {
        questions.push_back(question);
      }
    }
  }
  return questions;
}

// Return the blocks that an SM runs at once. As in a plan, a block of one head tile counts.
int ResidentHeadTiles(const Context& ctx, const Question& question) {
  const KvLayerView view = question.View(nullptr, nullptr);
  const int group = question.attention->q_heads / view.kv_heads;
  if (HasLargeHeads(view)) {
    return LargeHeadResidentTiles(ctx, view, group);
  }
  const DecodeVariant variant = FindDecodeVariant(view, group, ctx.gpu);
  const int resident = BlocksPerSm(reinterpret_cast<const void*>(variant.kernel), variant.threads,
                                   variant.shared_bytes);
  return resident * std::max(variant.heads / kHeadTile, 1);
}

// Return the schedules for a layer, the table's first.
std::vector<DecodeSchedule> SchedulesFor(const Context& ctx, const Question& question) {
  const int slots = ResidentHeadTiles(ctx, question);
  std::vector<DecodeSchedule> schedules = {{}};
  for (const int slots_per_sm : {schedules[0].slots_per_sm, slots}) {
    for (const int waves : kWaves) {
      for (const bool last_merges : {false, true}) {
        const DecodeSchedule schedule = {slots_per_sm, waves, last_merges};
        if (std::ranges::find(schedules, schedule) == schedules.end()) {
          schedules.push_back(schedule);
        }
      }
    }
  }
  return schedules;
}

TunerQuestion NamesOf(const Question& question, const std::vector<DecodeSchedule>& schedules) {
  TunerQuestion names = {question.name(), {}};
  for (const DecodeSchedule& schedule : schedules) {
    names.kernels.push_back(NameOf(schedule));
  }
  return names;
}

struct GpuMemoryDeleter {
  void operator()(void* memory) const noexcept { FreeGpu(memory); }
};
using GpuBytes = std::unique_ptr<std::byte, GpuMemoryDeleter>;

// Copy a pattern to new memory of the GPU again and again. Returns null for no bytes.
GpuBytes Fill(Stream stream, size_t num_bytes, const std::vector<std::byte>& pattern) {
  if (num_bytes == 0) {
    return nullptr;
  }
  GpuBytes memory(static_cast<std::byte*>(AllocateGpu(num_bytes)));
  for (size_t at = 0; at < num_bytes; at += pattern.size()) {
    CopyBytes(memory.get() + at, pattern.data(), std::min(pattern.size(), num_bytes - at), stream);
  }
  Synchronize(stream);  // before the pattern is destroyed
  return memory;
}

template <class T>
GpuBytes Upload(Stream stream, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
  return Fill(stream, values.size() * sizeof(T), {bytes, bytes + values.size() * sizeof(T)});
}

// Return random bytes that are finite numbers of both signs in every format.
std::vector<std::byte> PoolPattern() {
  std::vector<std::byte> pattern(size_t{1} << 20);
  std::mt19937 random(1);
  std::generate(pattern.begin(), pattern.end(),
                [&] { return static_cast<std::byte>(0x30 + random() % 16 + random() % 2 * 0x80); });
  return pattern;
}

// Return scales of FP4 values: E8M0 ones of a quarter and a half, or E4M3 ones of 0.5 to 1.9. If
// one side has E8M0, both get those, which are large but finite as E4M3.
std::vector<std::byte> ScalePattern(const block::Config::LayerFormats& formats) {
  const bool e8m0 = formats.k == KvCacheMode::kFp4Mx || formats.v == KvCacheMode::kFp4Mx;
  std::vector<std::byte> pattern(size_t{1} << 16);
  std::mt19937 random(3);
  std::generate(pattern.begin(), pattern.end(), [&] {
    return static_cast<std::byte>(e8m0 ? 0x7d + random() % 2 : 0x30 + random() % 16);
  });
  return pattern;
}

// The memory of a pool of one layer, as often as calls rotate.
struct Pool {
  Pool(const Context& ctx, const block::Layout& of, int64_t wanted_blocks)
      : layout(OneLayer(of)),
        rotated_bytes(kRotatedBytesPerSm * ctx.gpu.num_sms),
        num_blocks(std::clamp(rotated_bytes / layout.block_bytes(), int64_t{1}, wanted_blocks)),
        num_calls(std::clamp(CeilDiv(rotated_bytes, num_blocks * layout.block_bytes()), int64_t{1},
                             kMaxCalls)),
        data(Fill(ctx.stream, Bytes(layout.block_bytes()), PoolPattern())),
        scales(Fill(ctx.stream, Bytes(layout.scale_block_bytes()),
                    ScalePattern(layout.config().layers[0]))) {}

  size_t Bytes(int64_t block_bytes) const {
    return static_cast<size_t>(num_calls * num_blocks * block_bytes);
  }
  static block::Layout OneLayer(const block::Layout& of) {
    block::Config config = of.config();
    config.layers.resize(1);
    return block::Layout(config);
  }
  KvLayerView View(int64_t call) const {
    const int64_t first = call % num_calls * num_blocks;
    return layout.LayerView(
        0, data.get() + first * layout.block_bytes(),
        scales == nullptr ? nullptr : scales.get() + first * layout.scale_block_bytes());
  }
  // Return tables of `count` blocks in no order.
  std::vector<int32_t> Table(int64_t count) const {
    std::vector<int32_t> table;
    for (int64_t i = 0; i < count; ++i) {
      table.push_back(static_cast<int32_t>(i % num_blocks));
    }
    std::shuffle(table.begin(), table.end(), std::mt19937(1));
    return table;
  }

  block::Layout layout;
  int64_t rotated_bytes;
  int64_t num_blocks;
  int64_t num_calls;
  GpuBytes data;
  GpuBytes scales;
};

std::vector<float> RandomQueries(size_t count) {
  std::vector<float> q(count);
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(-1.f, 1.f);
  std::generate(q.begin(), q.end(), [&] { return uniform(random); });
  return q;
}

// The memory of one question, and a graph of each schedule.
class Runner {
 public:
  Runner(const Context& ctx, const Question& question)
      : question_(question),
        workspace_(ctx.stream),
        ctx_(ctx),
        length_(std::max(kPositionsPerSm[question.size] * ctx.gpu.num_sms / question.num_seqs(),
                         question.attention->layers.layout.config().block_seq_len)),
        blocks_per_seq_(CeilDiv(int64_t{length_}, int64_t{block_seq_len()})),
        planner_(ctx_),
        quantized_(ctx, question.attention->layers.layout, num_blocks()),
        table_(Upload(ctx.stream, quantized_.Table(num_blocks()))),
        lens_(static_cast<size_t>(question.num_seqs()), length_),
        q_(Upload(ctx.stream, RandomQueries(num_values()))),
        out_(Upload(ctx.stream, std::vector<float>(num_values()))) {
    ctx_.workspace = &workspace_;
    if (question.attention->layers.rule.enabled()) {
      window16_.emplace(ctx, *question.attention->layers.window16_layout, num_blocks());
      window16_table_ = Upload(ctx.stream, window16_->Table(num_blocks()));
    }
  }

  // Record calls that read different rows.
  void Record(const DecodeSchedule& schedule) {
    Plan(schedule);
    Call(0);  // allocates, which a recording must not
    graph_ = RecordGraph(ctx_.stream, [&] {
      for (int64_t call = 0; call < kMaxCalls; ++call) {
        Call(call);
      }
    });
  }
  void Run() { LaunchGraph(graph_.get(), ctx_.stream); }
  // Return the results of the last recorded call. The graph runs twice, to show what the first run
  // leaves behind, and no value that it should compute is there before the second.
  std::vector<float> Results() {
    Run();
    const std::vector<float> nans(num_values(), NAN);
    CopyBytes(out_.get(), nans.data(), nans.size() * sizeof(float), ctx_.stream);
    const std::vector<float> partials(workspace_.num_bytes() / sizeof(float), NAN);
    CopyBytes(workspace_.Get(0), partials.data(), partials.size() * sizeof(float), ctx_.stream);
    Run();
    std::vector<float> out(num_values());
    CopyBytes(out.data(), out_.get(), out.size() * sizeof(float), ctx_.stream);
    Synchronize(ctx_.stream);
    return out;
  }

 private:
  int block_seq_len() const { return question_.attention->layers.layout.config().block_seq_len; }
  int64_t num_blocks() const { return question_.num_seqs() * blocks_per_seq_; }
  size_t num_values() const {
    return static_cast<size_t>(question_.num_seqs()) *
           static_cast<size_t>(question_.attention->q_heads) *
           static_cast<size_t>(question_.attention->layers.layout.config().head_dim);
  }

  void Plan(const DecodeSchedule& schedule) {
    const LayerGroup& layers = question_.attention->layers;
    planner_.Use(question_.use(), schedule);
    StepGroup group = {.batch = {},
                       .window = layers.window,
                       .kv_heads = layers.layout.config().kv_heads,
                       .has_window16 = layers.rule.enabled(),
                       .rule = layers.rule};
    group.batch.num_seqs = group.batch.num_decode = group.batch.num_tokens = question_.num_seqs();
    group.batch.context_lens = lens_.data();
    planner_.Upload({.groups = &group, .num_groups = 1, .q_heads = question_.attention->q_heads});
  }

  void Call(int64_t call) {
    const LayerGroup& layers = question_.attention->layers;
    const int head_dim = layers.layout.config().head_dim;
    AttentionParams params;
    params.batch.num_seqs = params.batch.num_decode = params.batch.num_tokens =
        question_.num_seqs();
    params.batch.block_tables = reinterpret_cast<const int32_t*>(table_.get());
    params.batch.block_table_stride = blocks_per_seq_;
    params.q = reinterpret_cast<const float*>(q_.get());
    params.q_stride = int64_t{question_.attention->q_heads} * head_dim;
    params.out = reinterpret_cast<float*>(out_.get());
    params.q_heads = question_.attention->q_heads;
    const bool is_integer = IsInteger(layers.layout.config().layers[0].k);
    params.softmax_scale =
        (is_integer ? kIntegerScoreScale : kScoreScale) / std::sqrt(static_cast<float>(head_dim));
    params.window = layers.window;
    params.kv = quantized_.View(call);
    if (window16_.has_value()) {
      params.batch.window16_tables = reinterpret_cast<const int32_t*>(window16_table_.get());
      params.rule = layers.rule;
      params.window16 = window16_->View(call);
    }
    CudaDecodeAttention(ctx_, planner_, params);
  }

  const Question& question_;
  Workspace workspace_;
  Context ctx_;
  int length_;  // of each sequence
  int64_t blocks_per_seq_;
  DecodePlanner planner_;
  Pool quantized_;
  GpuBytes table_;
  std::optional<Pool> window16_;
  GpuBytes window16_table_;
  std::vector<int32_t> lens_;
  GpuBytes q_;
  GpuBytes out_;
  OwnGraph graph_;
};

// Return the schedules with close results, none if those of the table's are not finite. Each GPU
// checks them, because it may be of a kind that has never run them.
std::vector<size_t> FindRight(const TunerQuestion& names,
                              const std::vector<DecodeSchedule>& schedules, int head_dim,
                              Runner& runner, Tuner& tuner) {
  std::vector<size_t> right;
  std::vector<float> want;
  for (size_t i = 0; i < schedules.size(); ++i) {
    runner.Record(schedules[i]);
    const std::vector<float> got = runner.Results();
    want = i == 0 ? got : want;
    if (AreRowsClose(got, want, head_dim, kMaxDifference)) {
      right.push_back(i);
    } else if (i == 0) {
      return {};
    } else {
      tuner.AddWrong(names, i);
    }
  }
  return right;
}

std::optional<TunerAnswer> Measure(const Context& ctx, const Question& question,
                                   const std::vector<DecodeSchedule>& schedules, Tuner& tuner) {
  const TunerQuestion names = NamesOf(question, schedules);
  Runner runner(ctx, question);
  const int head_dim = question.attention->layers.layout.config().head_dim;
  const std::vector<size_t> right = FindRight(names, schedules, head_dim, runner, tuner);
  if (right.empty()) {
    return std::nullopt;
  }
  return ChooseByTime(right, [&](size_t i) -> std::optional<double> {
    runner.Record(schedules[i]);
    runner.Run();  // while it runs, the host queues the one that is timed
    return tuner.Time(names, i, [&] { runner.Run(); }) / static_cast<double>(kMaxCalls);
  });
}

}  // namespace

std::string NameOf(const DecodeSchedule& schedule) {
  return std::to_string(schedule.slots_per_sm) + " per SM, " + std::to_string(schedule.waves) +
         (schedule.waves == 1 ? " wave" : " waves") +
         (schedule.last_merges ? ", last block merges" : "");
}

void TuneDecode(const Context& ctx, DecodePlanner& planner, const std::vector<AttentionToTune>& all,
                Tuner& tuner) {
  Check(!ctx.deterministic, "a deterministic device must not be tuned");
  for (const Question& question : QuestionsFor(all)) {
    const std::vector<DecodeSchedule> schedules = SchedulesFor(ctx, question);
    const std::optional<size_t> schedule = tuner.Answer(
        NamesOf(question, schedules), [&] { return Measure(ctx, question, schedules, tuner); });
    planner.Use(question.use(), schedules[schedule.value_or(0)]);
  }
}

}  // namespace turbomind::cuda
