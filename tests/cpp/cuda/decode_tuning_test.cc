// Chooses schedules of decode attention with injected times.

#include "turbomind/backend/cuda/attention/decode_tuning.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "turbomind/kv/kv_cache.h"

namespace turbomind::cuda {
namespace {

constexpr char kTable[] = "4 per SM, 1 wave";
constexpr char kFavorite[] = "4 per SM, 3 waves, last block merges";

std::vector<AttentionToTune> MakeAttention(KvCacheMode format, int max_seqs = 8,
                                           PrecisionWindowTokens window16 = {}) {
  const int block_seq_len = window16.sink_tokens > 0 ? 64 : 16;
  KvCacheConfig config =
      MakeKvCacheConfig({0, 20}, format, 1, 64, block_seq_len, DataType::kBFloat16);
  config.window16 = window16;
  std::vector<AttentionToTune> attention;
  for (LayerGroup& layers : MakeLayerGroups(config)) {
    attention.push_back({std::move(layers), 10, max_seqs});
  }
  return attention;
}

struct Tuned {
  explicit Tuned(const TuningParams& params, double deadline = 1e9, int num_sms = 1) {
    const Stream stream = CreateStream();
    {
      Workspace workspace(stream);
      Context ctx;
      ctx.stream = stream;
      ctx.gpu = PropertiesOf(0);
      ctx.gpu.num_sms = num_sms;
      ctx.workspace = &workspace;
      DecodePlanner planner(ctx);
      const auto time = [&](const std::string&, const std::string& schedule,
                            FunctionRef<void()> work) {
        work();
        ++num_timed;
        return schedule == kFavorite ? 1. : 2.;
      };
      const auto seconds = [&] { return static_cast<double>(num_timed); };
      const TunerClock clock = {time, seconds, deadline};
      Tuner tuner(params.saved, clock, &result);
      TuneDecode(ctx, planner, params.attention, tuner);
    }
    DestroyStream(stream);
  }
  TuningResult result;
  int num_timed = 0;
};

TEST_CASE("each number of sequences gets the fastest schedule") {
  for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    const std::vector<AttentionToTune> attention = MakeAttention(format);
    REQUIRE(attention.size() == 2);
    const Tuned tuned({.layers = {}, .attention = attention, .saved = {}});
    CHECK(tuned.result.wrong.empty());
    CHECK(tuned.result.num_measured == 4);
    REQUIRE(tuned.result.choices.size() == 4);
    for (const TunedChoice& choice : tuned.result.choices) {
      CHECK(choice.kernel == kFavorite);
      CHECK(choice.table_kernel == kTable);
      CHECK(choice.table_us == 2 * choice.us);
    }
  }
}

TEST_CASE("layers with 16-bit windows are tuned with both pools, in many items") {
  const Tuned tuned(
      {.layers = {}, .attention = MakeAttention(KvCacheMode::kFp4Nv, 1, {64, 64}), .saved = {}},
      1e9, 6);
  CHECK(tuned.result.wrong.empty());
  CHECK(tuned.result.num_measured == 2);
  CHECK(tuned.result.choices[0].question.find("16-bit window of 1 and ") != std::string::npos);
}

TEST_CASE("saved schedules are used without timing, unless they are unknown") {
  TuningParams params = {
      .layers = {}, .attention = MakeAttention(KvCacheMode::kFp8E4m3, 64), .saved = {}};
  params.attention.pop_back();
  params.saved = Tuned(params).result.choices;
  const Tuned again(params);
  CHECK(again.num_timed == 0);
  REQUIRE(again.result.choices.size() == 3);
  CHECK(again.result.choices[2].question.ends_with("from 64 sequences"));
  params.saved[1].kernel = "9 per SM, 1 wave";
  params.saved[2].table_kernel = "9 per SM, 1 wave";
  CHECK(Tuned(params).result.num_measured == 2);
}

TEST_CASE("questions after the deadline keep the table's schedule") {
  const Tuned tuned({.layers = {}, .attention = MakeAttention(KvCacheMode::kInt8), .saved = {}}, 1);
  CHECK(tuned.result.num_measured == 1);
  CHECK(tuned.result.num_left == 3);
}

}  // namespace
}  // namespace turbomind::cuda
