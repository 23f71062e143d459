// Chooses between the products of prefill attention with injected times.

#include "turbomind/backend/cuda/prefill/prefill_tuning.h"

#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "turbomind/backend/cuda/linear/linear_wide.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/kv_cache.h"

namespace turbomind::cuda {
namespace {

using enum PrefillProducts;

constexpr PrefillQuestion kHalf = {DataType::kFloat16, 64, true};
constexpr PrefillQuestion kBFloat = {DataType::kBFloat16, 64, true};

struct Tuned {
  explicit Tuned(PrefillProducts favorite, const TuningParams& params, bool has_groups = true,
                 bool deterministic = false) {
    const Stream stream = CreateStream();
    {
      Workspace workspace(stream);
      Context ctx;
      ctx.stream = stream;
      ctx.gpu = PropertiesOf(0);
      ctx.gpu.num_sms = 1;
      ctx.workspace = &workspace;
      ctx.has_warp_groups = has_groups && ProbeWarpGroups(stream);
      has_products = ctx.has_warp_groups;
      ctx.deterministic = deterministic;
      const auto time = [&](const std::string&, const std::string& products,
                            FunctionRef<void()> work) {
        work();
        ++num_timed;
        return products == NameOf(favorite) ? 1. : 2.;
      };
      double now = 0;
      const auto seconds = [&] { return now++; };
      const TunerClock clock = {time, seconds, params.max_seconds};
      Tuner tuner(params.saved, clock, &result);
      TunePrefill(ctx, choices, params.attention, tuner);
    }
    DestroyStream(stream);
  }
  PrefillChoices choices;
  TuningResult result;
  int num_timed = 0;
  bool has_products = false;
};

// Attention with operands of both types for each head_dim.
TuningParams ParamsOf(const std::vector<int>& head_dims) {
  TuningParams params;
  params.max_seconds = 1e9;
  for (const int head_dim : head_dims) {
    for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
      const KvCacheConfig config =
          MakeKvCacheConfig({0}, format, 1, head_dim, 64, DataType::kBFloat16);
      for (LayerGroup& layers : MakeLayerGroups(config)) {
        params.attention.push_back({std::move(layers), 1});
      }
    }
  }
  return params;
}

TEST_CASE("warp groups come into use where they are faster and right") {
  const Tuned faster(kWarpGroups, ParamsOf({64, 64}));
  if (!faster.has_products) {
    CHECK(faster.result.choices.empty());
    return;
  }
  CHECK(faster.result.wrong.empty());
  CHECK(faster.result.num_measured == 2);  // a GPU of one SM has no launch with few rows
  REQUIRE(faster.result.choices.size() == 2);
  const TunedChoice& first = faster.result.choices[0];
  CHECK(first.question == "prefill attention, fp16, head_dim 64, many rows");
  CHECK(first.kernel == "wgmma");
  CHECK(first.table_kernel == "mma");
  CHECK(first.us == 1);
  CHECK(first.table_us == 2);
  CHECK(faster.choices.Get(kHalf) == kWarpGroups);
  CHECK(faster.choices.Get(kBFloat) == kWarpGroups);
  CHECK(faster.choices.Get({DataType::kFloat16, 64, false}) == kMma);
  CHECK(faster.choices.Get({DataType::kFloat16, 128, true}) == kMma);
  const Tuned slower(kMma, ParamsOf({64}));
  CHECK(slower.choices.Get(kHalf) == kMma);
  CHECK(slower.result.choices[0].kernel == "mma");
}

TEST_CASE("a saved choice of products is used without timing, unless it is unknown") {
  TuningParams params = ParamsOf({64});
  params.saved = {{kHalf.name(), "wgmma", "mma", 1, 2}, {kBFloat.name(), "mma", "mma", 2, 2}};
  const Tuned saved(kMma, params);
  CHECK(saved.num_timed == 0);
  if (!saved.has_products) {
    CHECK(saved.choices.Get(kHalf) == kMma);
    return;
  }
  CHECK(saved.choices.Get(kHalf) == kWarpGroups);
  CHECK(saved.choices.Get(kBFloat) == kMma);
  CHECK(saved.result.num_measured == 0);
  CHECK(saved.result.choices.size() == 2);
  params.saved[0].kernel = "abacus";
  const Tuned unknown(kMma, params);
  CHECK(unknown.num_timed > 0);
  CHECK(unknown.choices.Get(kHalf) == kMma);
}

TEST_CASE("other GPUs and head_dims have no question, and late questions are left") {
  CHECK(Tuned(kWarpGroups, ParamsOf({64}), false).result.choices.empty());
  CHECK(Tuned(kWarpGroups, ParamsOf({80})).result.choices.empty());
  CHECK(Tuned(kWarpGroups, ParamsOf({})).num_timed == 0);
  TuningParams params = ParamsOf({64});
  params.max_seconds = 0;
  const Tuned late(kWarpGroups, params);
  CHECK(late.num_timed == 0);
  CHECK(late.result.num_left == (late.has_products ? 2 : 0));
  CHECK(late.choices.Get(kHalf) == kMma);
  CHECK_THROWS_AS(Tuned(kWarpGroups, params, true, true), InternalError);
}

}  // namespace
}  // namespace turbomind::cuda
