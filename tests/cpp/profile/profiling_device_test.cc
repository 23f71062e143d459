#include "turbomind/profile/profiling_device.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "engine/null_device.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

class FakeMatrix : public PackedMatrix {
 public:
  FakeMatrix(int64_t r, int64_t c) {
    rows = r;
    cols = c;
    format = MatrixFormat::kQ8_0;
  }
  int64_t num_bytes() const override { return rows * cols; }
};

void Sleep(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// Computes nothing. Linear sleeps for `linear_us`.
class SlowLinear : public NullDevice {
 public:
  int linear_us = 0;
  void Embed(const EmbedParams&) override {}
  void Linear(const LinearParams&) override { Sleep(linear_us); }
  void Synchronize() override {}
  void PrefillAttention(const AttentionParams&) override {}
  void DecodeAttention(const AttentionParams&) override {}
  void ShortConvolution(const ShortConvolutionParams&) override {}
  void GatedDelta(const GatedDeltaParams&) override {}
  void SelectiveScan(const SelectiveScanParams&) override {}
  void GatedNorm(const GatedNormParams&) override {}
  void SigmoidGate(const SigmoidGateParams&) override {}
  void SaveCheckpoints(const StateCopyParams&) override {}
  void RestoreCheckpoints(const StateCopyParams&) override {}
};

struct Fixture {
  Fixture() : inner(std::make_shared<SlowLinear>()), device(inner) {}

  void Embed(int num_tokens) { device.Embed({.table = &table, .num_tokens = num_tokens}); }
  void Linear(const FakeMatrix& weight) {
    const LinearPart part = {&weight};
    device.Linear({.parts = &part, .num_parts = 1, .num_rows = 1});
  }
  // Runs the ops of one step. The attention ops determine its phase.
  void Step(bool prefills, bool decodes, KvCacheMode v_format = KvCacheMode::kNone) {
    Embed(2);
    if (decodes) {
      AttentionParams params;
      params.kv.format[1] = v_format;
      device.DecodeAttention(params);
    }
    if (prefills) {
      device.PrefillAttention({});
    }
    Linear(small);
    Linear(large);
    Linear(small);
  }

  std::shared_ptr<SlowLinear> inner;
  ProfilingDevice device;
  FakeMatrix table{100, 8}, small{4, 8}, large{16, 8};
};

using Profile = std::vector<PhaseProfile>;

const OpRecord& Find(const PhaseProfile& phase, const OpKey& key) {
  for (const OpRecord& record : phase.records) {
    if (record.key == key) {
      return record;
    }
  }
  FAIL("the profile has no such record");
  return phase.records.front();
}

OpKey LinearKey(const FakeMatrix& weight) {
  return {.kind = OpKind::kLinear,
          .format = MatrixFormat::kQ8_0,
          .rows = weight.rows,
          .cols = weight.cols};
}

}  // namespace

TEST_CASE("a profile sums ops by kind, matrix and phase") {
  Fixture f;
  f.Step(true, false);
  f.Step(false, true);
  f.Step(false, true, KvCacheMode::kInt8);
  f.Step(true, true);
  const Profile profile = f.device.profile();
  REQUIRE(profile.size() == 3);
  const PhaseProfile& decode = profile[1];
  CHECK(decode.phase == StepPhase::kDecode);
  CHECK(decode.num_steps == 2);
  CHECK(decode.num_tokens == 4);
  CHECK(Find(decode, LinearKey(f.small)).calls == 4);
  CHECK(Find(decode, LinearKey(f.large)).calls == 2);
  CHECK(Find(decode, LinearKey(f.large)).cost.weight_bytes == 2 * 16 * 8);
  CHECK(Find(decode, {.kind = OpKind::kDecodeAttention}).calls == 1);
  CHECK(Find(decode, {.kind = OpKind::kDecodeAttention, .v_format = KvCacheMode::kInt8}).calls ==
        1);
  CHECK(Find(decode, {.kind = OpKind::kBetweenSteps}).calls == 2);
  CHECK((profile[0].phase == StepPhase::kPrefill && profile[0].num_steps == 1));
  CHECK((profile[2].phase == StepPhase::kMixed && profile[2].num_steps == 1));
  f.device.Clear();
  CHECK(f.device.profile().empty());
}

TEST_CASE("ops of recurrent layers have records, or those of similar ops") {
  Fixture f;
  f.Embed(1);
  f.device.ShortConvolution({});
  f.device.GatedDelta({});
  f.device.GatedDelta({});
  f.device.SelectiveScan({});
  f.device.GatedNorm({.num_rows = 1, .dim = 16, .group = 16});
  f.device.SigmoidGate({.count = 8});
  const Profile profile = f.device.profile();
  REQUIRE(profile.size() == 1);
  CHECK(Find(profile[0], {.kind = OpKind::kShortConvolution}).calls == 1);
  CHECK(Find(profile[0], {.kind = OpKind::kGatedDelta}).calls == 2);
  CHECK(Find(profile[0], {.kind = OpKind::kSelectiveScan}).calls == 1);
  CHECK(Find(profile[0], {.kind = OpKind::kNorm}).cost.activation_bytes == 4 * 3 * 16);
  CHECK(Find(profile[0], {.kind = OpKind::kActivation}).cost.activation_bytes == 4 * 3 * 8);
}

TEST_CASE("the rest of a cleared step is not counted") {
  Fixture f;
  f.Embed(1);
  f.device.Clear();
  f.device.PrefillAttention({});
  f.Linear(f.small);
  CHECK(f.device.profile().empty());
  f.Step(false, true);
  const Profile profile = f.device.profile();
  REQUIRE(profile.size() == 1);
  CHECK(profile[0].phase == StepPhase::kDecode);
  CHECK(profile[0].num_steps == 1);
  CHECK(profile[0].num_tokens == 2);
}

TEST_CASE("time between ops is recorded as engine time") {
  Fixture f;
  f.inner->linear_us = 2000;
  f.Embed(1);
  f.device.DecodeAttention({});
  Sleep(3000);
  f.Linear(f.small);
  Sleep(5000);
  f.Step(false, true);
  const Profile profile = f.device.profile();
  REQUIRE(profile.size() == 1);
  const PhaseProfile& decode = profile[0];
  CHECK(Find(decode, LinearKey(f.small)).nanoseconds >= 3 * 2'000'000);
  CHECK(Find(decode, {.kind = OpKind::kEngine}).nanoseconds >= 3'000'000);
  CHECK(Find(decode, {.kind = OpKind::kBetweenSteps}).nanoseconds >= 5'000'000);
  int64_t sum = -Find(decode, {.kind = OpKind::kBetweenSteps}).nanoseconds;
  for (const OpRecord& record : decode.records) {
    sum += record.nanoseconds;
  }
  CHECK(sum == decode.nanoseconds);
}
