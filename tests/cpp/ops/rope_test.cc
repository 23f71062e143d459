#include "turbomind/ops/rope.h"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "turbomind/core/check.h"

using namespace turbomind;

namespace {

// Both sides round the frequency to FP32. For the largest angles, up to 2500, this is an error of
// 2 ulp.
constexpr double kTolerance = 4e-4;
constexpr double kSmallAngleTolerance = 2e-6;  // positions up to 5

struct Expected {
  int index;
  float cos, sin;
};

void CheckPosition(const RopeConfig& config, int32_t position, const std::vector<Expected>& want) {
  const RopeTable table(config);
  const auto half = static_cast<size_t>(config.dim / 2);
  std::vector<float> cos(half), sin(half);
  table.Fill(&position, nullptr, 1, cos.data(), sin.data());
  const double tolerance = position <= 5 ? kSmallAngleTolerance : kTolerance;
  for (const Expected& e : want) {
    CAPTURE(e.index);
    CHECK(std::abs(cos[static_cast<size_t>(e.index)] - e.cos) <= tolerance);
    CHECK(std::abs(sin[static_cast<size_t>(e.index)] - e.sin) <= tolerance);
  }
}

RopeConfig Config(RopeKind kind, float theta) {
  RopeConfig config;
  config.kind = kind;
  config.theta = theta;
  config.dim = 64;
  return config;
}

}  // namespace

// The expected values are those of LlamaRotaryEmbedding of transformers 5, with head_dim 64 and
// max_position 2048. Each position is the last one of its sequence.

TEST_CASE("default RoPE matches transformers") {
  const RopeConfig config = Config(RopeKind::kDefault, 10000.f);
  CheckPosition(config, 5,
                {{0, 0.2836622f, -0.95892429f},
                 {1, -0.82086164f, -0.57112712f},
                 {7, 0.78582907f, 0.61844373f},
                 {15, 0.99777794f, 0.066626683f},
                 {16, 0.99875027f, 0.049979165f},
                 {31, 0.99999976f, 0.00066676066f}});
  CheckPosition(config, 1000,
                {{0, 0.56237906f, 0.82687956f},
                 {1, -0.58459288f, 0.8113268f},
                 {7, 0.16479035f, 0.9863286f},
                 {16, -0.83907151f, -0.54402113f},
                 {31, 0.99112177f, 0.13295726f}});
}

TEST_CASE("linear RoPE matches transformers") {
  RopeConfig config = Config(RopeKind::kLinear, 10000.f);
  config.factor = 4.f;
  CheckPosition(config, 5,
                {{0, 0.31532237f, 0.94898462f},
                 {1, 0.59191167f, 0.8060028f},
                 {7, 0.98613936f, 0.16591932f},
                 {31, 1.f, 0.00016669018f}});
  CheckPosition(config, 1000,
                {{0, 0.2409883f, -0.97052801f},
                 {1, 0.52165842f, -0.85315448f},
                 {15, -0.98158425f, -0.19102964f},
                 {31, 0.99944437f, 0.03333186f}});
}

TEST_CASE("dynamic RoPE uses the base of the longest sequence at all positions") {
  RopeConfig config = Config(RopeKind::kDynamic, 10000.f);
  config.factor = 2.f;
  config.original_max_position = 2048;
  for (const int session_len : {1, 2047, 2048}) {
    const RopeConfig resolved = ResolveRope(config, session_len);
    CHECK(resolved.kind == RopeKind::kDefault);
    CHECK(resolved.theta == 10000.f);
    CheckPosition(resolved, 3,
                  {{0, -0.9899925f, 0.14112f},
                   {1, -0.62792671f, 0.77827251f},
                   {16, 0.99955004f, 0.029995499f}});
  }
  const RopeConfig stretched = ResolveRope(config, 2501);
  CheckPosition(stretched, 2500,
                {{0, 0.75982511f, -0.65012753f},
                 {1, 0.67806f, -0.73500657f},
                 {7, 0.57291704f, -0.81961334f},
                 {15, -0.93899137f, 0.34394068f},
                 {16, -0.26976249f, 0.96292692f},
                 {31, 0.9734078f, 0.22907925f}});
  // Keys and queries use the same frequencies at all positions.
  const RopeTable table(stretched);
  const int32_t positions[] = {1, 2047, 2048, 2499};
  std::vector<float> cos(4 * 32), sin(4 * 32);
  table.Fill(positions, nullptr, 4, cos.data(), sin.data());
  for (size_t t = 0; t < 4; ++t) {
    for (size_t i = 0; i < 32; ++i) {
      CHECK(cos[t * 32 + i] == std::cos(static_cast<float>(positions[t]) * table.inv_freq()[i]));
      CHECK(sin[t * 32 + i] == std::sin(static_cast<float>(positions[t]) * table.inv_freq()[i]));
    }
  }
}

TEST_CASE("only dynamic RoPE depends on session_len") {
  for (const RopeKind kind : {RopeKind::kNone, RopeKind::kDefault, RopeKind::kLinear,
                              RopeKind::kLlama3, RopeKind::kYarn}) {
    RopeConfig config = Config(kind, 10000.f);
    config.factor = 2.f;
    config.original_max_position = 100;
    const RopeConfig resolved = ResolveRope(config, 1000);
    CHECK(resolved.kind == kind);
    CHECK(RopeTable(resolved).inv_freq() == RopeTable(config).inv_freq());
  }
}

TEST_CASE("llama3 RoPE matches transformers") {
  RopeConfig config = Config(RopeKind::kLlama3, 500000.f);
  config.factor = 32.f;
  config.original_max_position = 8192;
  CheckPosition(config, 5,
                {{1, -0.98447937f, -0.17550023f},
                 {7, 0.96012479f, 0.2795718f},
                 {15, 0.9999792f, 0.0064526955f},
                 {16, 0.99999768f, 0.0021477819f},
                 {31, 1.f, 4.7091532e-07f}});
  CheckPosition(config, 1000,
                {{1, -0.74836189f, -0.66329068f},
                 {7, 0.99269414f, 0.12065805f},
                 {15, 0.27659434f, 0.96098679f},
                 {16, 0.90915048f, 0.41646782f}});
}

TEST_CASE("yarn multiplies cos and sin by the attention factor") {
  RopeConfig config = Config(RopeKind::kYarn, 1000000.f);
  config.factor = 4.f;
  config.original_max_position = 4096;
  CheckPosition(config, 5,
                {{0, 0.32298613f, -1.0918595f},
                 {1, -1.1323208f, -0.11969382f},
                 {7, 1.1098727f, 0.25428239f},
                 {15, 1.1386259f, 0.0028492815f},
                 {31, 1.1386294f, 2.1917572e-06f}});
  CheckPosition(config, 1000,
                {{0, 0.64034134f, 0.94150943f},
                 {7, 0.55446005f, 0.99451041f},
                 {15, 0.99898124f, 0.54636377f},
                 {16, 1.1032323f, 0.28170145f}});
  config.attention_factor = 1.f;
  CheckPosition(config, 5, {{1, -0.99446f, -0.105121f}});
}

TEST_CASE("yarn without a truncated correction range matches transformers") {
  RopeConfig config = Config(RopeKind::kYarn, 150000.f);
  config.factor = 32.f;
  config.original_max_position = 4096;
  config.truncate = false;
  CheckPosition(config, 5,
                {{0, 0.38197201f, -1.2912621f},
                 {7, 1.2560682f, 0.48533797f},
                 {15, 1.346555f, 0.0070869988f},
                 {16, 1.34657f, 0.0030734432f}});
  CheckPosition(config, 1000,
                {{7, -0.11144877f, -1.3419536f},
                 {15, 0.66697431f, 1.1697887f},
                 {16, 1.2086952f, 0.5935626f}});
}

TEST_CASE("freq_factors divide the frequencies") {
  RopeConfig config = Config(RopeKind::kDefault, 10000.f);
  config.freq_factors.assign(32, 4.f);
  CheckPosition(config, 5, {{0, 0.31532237f, 0.94898462f}, {7, 0.98613936f, 0.16591932f}});
}

TEST_CASE("an invalid RoPE config is rejected with the field's name") {
  const auto refuse = [](RopeConfig config, const char* field) {
    CHECK_THROWS_WITH_AS(RopeTable{config}, doctest::Contains(field), InvalidArgument);
  };
  RopeConfig config = Config(RopeKind::kDefault, 10000.f);
  config.dim = 63;
  refuse(config, "rope.dim");
  config = Config(RopeKind::kDefault, NAN);
  refuse(config, "rope.theta");
  config = Config(RopeKind::kLinear, 10000.f);
  config.factor = 0.f;
  refuse(config, "rope.factor");
  config = Config(RopeKind::kYarn, 10000.f);
  refuse(config, "rope.original_max_position");
  config = Config(RopeKind::kLlama3, 10000.f);
  config.original_max_position = 8192;
  config.high_freq_factor = config.low_freq_factor;
  refuse(config, "rope.high_freq_factor");
  config = Config(RopeKind::kDefault, 10000.f);
  config.freq_factors.assign(5, 1.f);
  refuse(config, "rope.freq_factors");
  CHECK_FALSE(RopeTable(Config(RopeKind::kNone, 0.f)).enabled());
}

TEST_CASE("longrope divides by its short factors, and by the long ones for longer sessions") {
  RopeConfig config = Config(RopeKind::kLongRope, 10000.f);
  config.original_max_position = 100;
  config.attention_factor = 1.5f;
  config.freq_factors.assign(32, 2.f);
  config.long_factors.assign(32, 8.f);
  const auto check = [](const RopeConfig& resolved, double factor) {
    const RopeTable table(resolved);
    CHECK(table.attention_factor() == 1.5f);
    const std::vector<float>& inv_freq = table.inv_freq();
    for (int i = 0; i < 32; ++i) {
      const double want = std::pow(10000.0, -i / 32.0) / factor;
      CHECK(inv_freq[static_cast<size_t>(i)] == doctest::Approx(want));
    }
  };
  check(ResolveRope(config, 100), 2);
  check(ResolveRope(config, 101, false), 8);
  CHECK(RopeTable(ResolveRope(config, 101, false)).num_sets() == 1);
  config.long_factors.pop_back();
  CHECK_THROWS_AS(RopeTable{config}, InvalidArgument);
}

TEST_CASE("longrope gives each token the frequencies of its set") {
  RopeConfig config = Config(RopeKind::kLongRope, 10000.f);
  config.original_max_position = 100;
  config.attention_factor = 1.5f;
  config.freq_factors.assign(32, 2.f);
  config.long_factors.assign(32, 8.f);
  const RopeTable both(ResolveRope(config, 101));
  CHECK(both.num_sets() == 2);
  const std::vector<int32_t> positions = {7, 7, 90, 90};
  const std::vector<int32_t> sets = {0, 1, 1, 0};
  std::vector<float> cos(4 * 32);
  std::vector<float> sin = cos;
  both.Fill(positions.data(), sets.data(), 4, cos.data(), sin.data());
  for (size_t t = 0; t < 4; ++t) {
    const RopeTable one(ResolveRope(config, sets[t] == 1 ? 101 : 100, false));
    std::vector<float> want_cos(32);
    std::vector<float> want_sin(32);
    one.Fill(&positions[t], nullptr, 1, want_cos.data(), want_sin.data());
    CHECK(std::equal(want_cos.begin(), want_cos.end(), cos.data() + t * 32));
    CHECK(std::equal(want_sin.begin(), want_sin.end(), sin.data() + t * 32));
  }
}
