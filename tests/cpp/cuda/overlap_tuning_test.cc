// Chooses between ordered and overlapping launches with injected times.

#include "turbomind/backend/cuda/tuner/overlap_tuning.h"

#include <doctest/doctest.h>

#include <string>
#include <string_view>
#include <vector>

#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {
namespace {

struct Tuned {
  explicit Tuned(std::string_view favorite, const std::vector<TunedChoice>& saved = {}) {
    const Stream stream = CreateStream();
    {
      Workspace workspace(stream);
      Context ctx;
      ctx.stream = stream;
      ctx.gpu = PropertiesOf(0);
      ctx.workspace = &workspace;
      const auto time = [&](const std::string&, const std::string& kernel,
                            FunctionRef<void()> work) {
        work();
        ++num_timed;
        return kernel == favorite ? 1. : 2.;
      };
      const TunerClock clock = {time, [] { return 0.; }, 1};
      Tuner tuner(saved, clock, &result);
      TuneOverlap(ctx, tuner);
      overlaps = LaunchesOverlap(stream);
    }
    DestroyStream(stream);
  }
  TuningResult result;
  bool overlaps = false;
  int num_timed = 0;
};

TEST_CASE("launches overlap where that is faster") {
  const Tuned faster(kOverlapped);
  CHECK(faster.overlaps);
  CHECK(faster.result.wrong.empty());
  CHECK(faster.result.num_measured == 1);
  REQUIRE(faster.result.choices.size() == 1);
  CHECK(faster.result.choices[0].kernel == kOverlapped);
  CHECK(faster.result.choices[0].table_us == 2);
  const Tuned slower(kOrdered);
  CHECK_FALSE(slower.overlaps);
  CHECK(slower.result.choices[0].kernel == kOrdered);
}

TEST_CASE("a saved answer is used without timing, unless it is unknown") {
  const Tuned saved(kOrdered, {{kOverlapQuestion, kOverlapped, kOrdered, 1, 2}});
  CHECK(saved.overlaps);
  CHECK(saved.num_timed == 0);
  CHECK(saved.result.choices.size() == 1);
  const Tuned unknown(kOrdered, {{kOverlapQuestion, "sideways", kOrdered, 1, 2}});
  CHECK_FALSE(unknown.overlaps);
  CHECK(unknown.num_timed > 0);
}

}  // namespace
}  // namespace turbomind::cuda
