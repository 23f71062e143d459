// Compares the small ops of backend/cuda with those of the CPU backend, and argmax with the
// sampler.

#include "turbomind/backend/cuda/dense/dense_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/gpu_array.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/ops/rope.h"
#include "turbomind/ops/sampling.h"

namespace turbomind::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// Relative to a value: FP32 sums in another order, exp of two libraries (2 ulp on a GPU), and a few
// roundings.
constexpr float kRelative = 2e-6f;
// Absolute, for cos and sin: libraries differ by 2 ulp of 1.
constexpr float kAngleError = 3e-7f;
// The CPU clips exp(88) while the GPU's sigmoid becomes 0. This is the difference times values
// below 1e3.
constexpr float kTiny = 1e-34f;

class Fixture {
 public:
  Fixture() : stream(CreateStream()), workspace(stream), cpu(MakeCpuDevice(1)) {
    ctx = {.stream = stream, .gpu = PropertiesOf(0), .workspace = &workspace};
  }
  ~Fixture() { DestroyStream(stream); }

  template <class T>
  GpuArray<T> Put(const std::vector<T>& values, size_t offset = 0) const {
    return GpuArray<T>(stream, values, offset);
  }

  Stream stream;
  Workspace workspace;
  std::unique_ptr<Device> cpu;
  Context ctx;
};

std::vector<float> Random(uint32_t seed, int64_t size, float deviation = 1.f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.f, deviation);
  std::vector<float> values(static_cast<size_t>(size));
  std::ranges::generate(values, [&] { return normal(random); });
  return values;
}

// Values that are not finite must be of the same kind.
void CheckNear(const std::vector<float>& got, const std::vector<float>& want, float relative,
               float absolute = 0.f) {
  REQUIRE(got.size() == want.size());
  size_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const bool near = std::isfinite(want[i])
                          ? std::fabs(got[i] - want[i]) <= relative * std::fabs(want[i]) + absolute
                          : (std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i]);
    if (!near && wrong++ == 0) {
      CAPTURE(i);
      CHECK(got[i] == want[i]);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE_FIXTURE(Fixture, "RoPE tables match the CPU") {
  std::vector<RopeConfig> configs(7);
  for (RopeConfig& config : configs) {
    config.dim = 64;
    config.factor = 4.f;
    config.original_max_position = 4096;
  }
  configs[1].kind = RopeKind::kDynamic;
  configs[2].kind = RopeKind::kYarn;
  configs[3].kind = RopeKind::kLlama3;
  configs[4].kind = RopeKind::kNone;
  configs[5].kind = RopeKind::kDynamic;
  configs[5].dim = 6;  // rows of three
  configs[5].theta = 1e6f;
  configs[6].kind = RopeKind::kLongRope;
  configs[6].attention_factor = 1.2f;
  configs[6].freq_factors.assign(32, 1.5f);
  configs[6].long_factors.assign(32, 7.f);
  const std::vector<int32_t> positions = {0, 1, 4095, 4096, 4097, 50000, 131071, 1 << 20, 7};
  const auto tokens = static_cast<int>(positions.size());
  const auto gpu_positions = Put(positions);
  for (const RopeConfig& config : configs) {
    const RopeTable table(config);
    const auto inv_freq = Put(table.inv_freq());
    std::vector<float> cos(static_cast<size_t>(tokens * config.dim / 2), kNaN);
    std::vector<float> sin = cos;
    const auto gpu_cos = Put(cos);
    const auto gpu_sin = Put(sin);
    CudaFillRope(ctx, {&table, inv_freq.data(), gpu_positions.data(), gpu_cos.data(),
                       gpu_sin.data(), tokens});
    cpu->FillRope(
        {&table, table.inv_freq().data(), positions.data(), cos.data(), sin.data(), tokens});
    CAPTURE(static_cast<int>(config.kind));
    CheckNear(gpu_cos.Read(), cos, 0.f, kAngleError * table.attention_factor());
    CheckNear(gpu_sin.Read(), sin, 0.f, kAngleError * table.attention_factor());
    constexpr int kBlockTokens = 16;  // the angles of the middle of each token's block
    CudaFillRope(ctx, {&table, inv_freq.data(), gpu_positions.data(), gpu_cos.data(),
                       gpu_sin.data(), tokens, kBlockTokens});
    cpu->FillRope({&table, table.inv_freq().data(), positions.data(), cos.data(), sin.data(),
                   tokens, kBlockTokens});
    CheckNear(gpu_cos.Read(), cos, 0.f, kAngleError * table.attention_factor());
    if (table.num_sets() > 1) {
      const std::vector<int32_t> sets = {0, 1, 0, 1, 1, 0, 1, 0, 1};
      CudaFillRope(ctx, {&table, inv_freq.data(), gpu_positions.data(), gpu_cos.data(),
                         gpu_sin.data(), tokens, 0, Put(sets).data()});
      cpu->FillRope({&table, table.inv_freq().data(), positions.data(), cos.data(), sin.data(),
                     tokens, 0, sets.data()});
      CheckNear(gpu_cos.Read(), cos, 0.f, kAngleError * table.attention_factor());
      CheckNear(gpu_sin.Read(), sin, 0.f, kAngleError * table.attention_factor());
    }
  }
}

// Run the norm of all rows, optionally in place and with unaligned rows.
std::vector<float> Norm(Fixture& f, const std::vector<float>& x, const std::vector<float>& weight,
                        bool in_place = false, size_t offset = 0) {
  const auto dim = static_cast<int>(weight.size());
  const auto gpu_x = f.Put(x, offset);
  const auto gpu_weight = f.Put(weight, offset);
  const auto out = f.Put(std::vector<float>(x.size(), kNaN), offset);
  float* to = in_place ? gpu_x.data() : out.data();
  CudaNorm(f.ctx, {gpu_x.data(), gpu_weight.data(), to, static_cast<int>(x.size()) / dim, dim});
  return in_place ? gpu_x.Read() : out.Read();
}

TEST_CASE_FIXTURE(Fixture, "RMS norm matches the CPU for odd, split and unaligned rows" *
                               doctest::test_suite("small")) {
  for (const int dim : {1, 3, 4, 127, 128, 512, 516, 2880, 4097}) {
    CAPTURE(dim);
    constexpr int kRows = 3;
    const std::vector<float> x = Random(static_cast<uint32_t>(dim), kRows * int64_t{dim});
    const std::vector<float> weight = Random(1, dim);
    std::vector<float> want(x.size());
    cpu->Norm({x.data(), weight.data(), want.data(), kRows, dim});
    const std::vector<float> got = Norm(*this, x, weight);
    CheckNear(got, want, kRelative);
    CHECK(Norm(*this, x, weight, true) == got);
    CheckNear(Norm(*this, x, weight, false, 1), want, kRelative);
    const std::vector<float> last(x.end() - dim, x.end());
    CHECK(Norm(*this, last, weight) == std::vector<float>(got.end() - dim, got.end()));
  }
}

TEST_CASE_FIXTURE(Fixture, "RMS norm handles rows longer than a block's registers") {
  const int dim = 4 * 4 * 1024 + 4;
  const std::vector<float> x = Random(5, dim);
  const std::vector<float> weight = Random(6, dim);
  std::vector<float> want(x.size());
  cpu->Norm({x.data(), weight.data(), want.data(), 1, dim});
  CheckNear(Norm(*this, x, weight), want, kRelative);
  CheckNear(Norm(*this, x, weight, true, 1), want, kRelative);
}

TEST_CASE_FIXTURE(Fixture, "LayerNorm with a bias at a stride matches the CPU") {
  for (const int dim : {1, 127, 516, 4 * 4 * 1024 + 4}) {
    constexpr int kRows = 2;
    const int64_t stride = dim + 4;
    const std::vector<float> x = Random(static_cast<uint32_t>(dim), kRows * stride);
    const std::vector<float> weight = Random(1, dim);
    const std::vector<float> bias = Random(2, dim);
    std::vector<float> want = x;
    NormParams params = {.x = x.data(),
                         .weight = weight.data(),
                         .out = want.data(),
                         .num_rows = kRows,
                         .dim = dim,
                         .stride = stride,
                         .bias = bias.data(),
                         .centered = true};
    cpu->Norm(params);
    const auto gpu_x = Put(x);
    const auto gpu_weight = Put(weight);
    const auto gpu_bias = Put(bias);
    params.x = gpu_x.data();
    params.out = gpu_x.data();
    params.weight = gpu_weight.data();
    params.bias = gpu_bias.data();
    CudaNorm(ctx, params);
    CAPTURE(dim);
    CheckNear(gpu_x.Read(), want, kRelative, kRelative);
  }
}

TEST_CASE_FIXTURE(Fixture, "soft caps and scaled additions match the CPU") {
  constexpr int64_t kCount = 1030;
  const std::vector<float> x = Random(1, kCount, 40.f);
  for (const float cap : {0.f, 30.f}) {
    std::vector<float> want = x;
    cpu->SoftCap({want.data(), kCount, 0.5f, cap});
    const auto got = Put(x);
    CudaSoftCap(ctx, {got.data(), kCount, 0.5f, cap});
    CheckNear(got.Read(), want, kRelative, 1e-5f);
  }
  std::vector<float> want(x.size(), 1.f);
  const auto gpu_x = Put(x);
  const auto got = Put(want);
  cpu->Add({x.data(), want.data(), kCount, 0.25f});
  CudaAdd(ctx, {gpu_x.data(), got.data(), kCount, 0.25f});
  CHECK(got.Read() == want);
}

TEST_CASE_FIXTURE(Fixture, "feed-forwards without a gate match the CPU") {
  using enum Activation;
  constexpr int kRows = 3;
  for (const int dim : {7, 1028}) {
    const std::vector<float> in = Random(static_cast<uint32_t>(dim), kRows * int64_t{dim}, 5.f);
    const auto gpu_in = Put(in);
    for (const Activation activation : {kSilu, kGeluTanh, kGelu, kRelu2}) {
      std::vector<float> want(in.size());
      const auto out = Put(std::vector<float>(in.size(), 7.f));
      GatedActivationParams params = {.gate_up = in.data(),
                                      .out = want.data(),
                                      .num_rows = kRows,
                                      .dim = dim,
                                      .activation = activation,
                                      .gated = false};
      cpu->GatedActivation(params);
      params.gate_up = gpu_in.data();
      params.out = out.data();
      CudaGatedActivation(ctx, params);
      CAPTURE(static_cast<int>(activation));
      // The CPU's erf has an absolute error of 2e-7, times values below 20.
      CheckNear(out.Read(), want, kRelative, activation == kGelu ? 2e-6f : kTiny);
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "gated activations match the CPU" * doctest::test_suite("small")) {
  using enum Activation;
  constexpr int kRows = 3;
  for (const int dim : {1, 7, 64, 1028, 1030}) {
    std::vector<float> gate_up = Random(static_cast<uint32_t>(dim), kRows * 2 * int64_t{dim}, 5.f);
    gate_up[0] = 300.f;
    gate_up[1] = -300.f;
    gate_up.back() = kNaN;
    for (const size_t offset : {0, 1}) {
      const auto gpu_gate_up = Put(gate_up, offset);
      const std::vector<float> scales = {0.3f, 1.f, 0.8f};
      const auto gpu_scales = Put(scales);
      for (const Activation activation : {kSilu, kGeluTanh, kClampedSwiglu}) {
        for (const bool interleaved : {false, true}) {
          CAPTURE(dim);
          CAPTURE(static_cast<int>(activation));
          CAPTURE(interleaved);
          std::vector<float> want(static_cast<size_t>(kRows * dim));
          const auto out = Put(std::vector<float>(want.size(), 7.f), offset);
          GatedActivationParams params = {gate_up.data(), want.data(), kRows, dim,
                                          activation,     interleaved, 7.f};
          params.row_scales = dim % 2 == 0 ? scales.data() : nullptr;
          cpu->GatedActivation(params);
          params.row_scales = dim % 2 == 0 ? gpu_scales.data() : nullptr;
          params.gate_up = gpu_gate_up.data();
          params.out = out.data();
          CudaGatedActivation(ctx, params);
          CheckNear(out.Read(), want, kRelative, kTiny);
        }
      }
    }
  }
}

struct Routes {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routes Route(Fixture& f, const std::vector<float>& logits, RouteExpertsParams params) {
  const auto count = static_cast<size_t>(params.num_tokens * params.top_k);
  const auto gpu_logits = f.Put(logits);
  const auto ids = f.Put(std::vector<int32_t>(count, -1));
  const auto weights = f.Put(std::vector<float>(count, 7.f));
  params.logits = gpu_logits.data();
  params.ids = ids.data();
  params.weights = weights.data();
  CudaRouteExperts(f.ctx, params);
  return {ids.Read(), weights.Read()};
}

Routes RouteOnCpu(Fixture& f, const std::vector<float>& logits, RouteExpertsParams params) {
  const auto count = static_cast<size_t>(params.num_tokens * params.top_k);
  Routes routes = {std::vector<int32_t>(count), std::vector<float>(count)};
  params.logits = logits.data();
  params.ids = routes.ids.data();
  params.weights = routes.weights.data();
  f.cpu->RouteExperts(params);
  return routes;
}

TEST_CASE_FIXTURE(Fixture,
                  "routing matches the CPU for any number of experts, ties, NaN and infinities") {
  constexpr int kTokens = 9;
  const float odd_values[] = {0.f, -0.f, kNaN, -kInf, 1.f, 1.f, -1.f, -kNaN};
  for (const int experts : {1, 2, 31, 32, 33, 128, 200}) {
    std::vector<float> logits = Random(static_cast<uint32_t>(experts), kTokens * experts);
    std::mt19937 random(static_cast<uint32_t>(experts));
    for (int i = 0; i < 4 * experts; ++i) {  // tokens 0 to 3
      logits[static_cast<size_t>(i)] = odd_values[random() % std::size(odd_values)];
    }
    std::fill_n(logits.begin(), experts, kNaN);
    for (const int top_k : {1, 4, 8, 32, 33, experts}) {
      if (top_k > experts) {
        continue;
      }
      for (const bool normalize : {false, true}) {
        CAPTURE(experts);
        CAPTURE(top_k);
        RouteExpertsParams params;
        params.num_tokens = kTokens;
        params.num_experts = experts;
        params.top_k = top_k;
        params.normalize = normalize;
        const auto got = Route(*this, logits, params);
        const auto want = RouteOnCpu(*this, logits, params);
        CHECK(got.ids == want.ids);
        CheckNear(got.weights, want.weights, kRelative);
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "routing by sigmoids and with a bias matches the CPU") {
  constexpr int kTokens = 9;
  for (const int experts : {4, 33, 200}) {
    const std::vector<float> logits = Random(static_cast<uint32_t>(experts), kTokens * experts);
    const std::vector<float> bias = Random(7, experts);
    const auto gpu_bias = Put(bias);
    for (const bool sigmoid : {false, true}) {
      for (const bool normalize : {false, true}) {
        RouteExpertsParams params;
        params.num_tokens = kTokens;
        params.num_experts = experts;
        params.top_k = 4;
        params.normalize = normalize;
        params.sigmoid = sigmoid;
        params.bias = bias.data();
        const Routes want = RouteOnCpu(*this, logits, params);
        params.bias = gpu_bias.data();
        const Routes got = Route(*this, logits, params);
        CHECK(got.ids == want.ids);
        CheckNear(got.weights, want.weights, kRelative);
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "routing from the best groups matches the CPU") {
  struct Shape {
    int experts, groups, top_groups;
  };
  constexpr int kTokens = 9;
  for (const Shape& s : {Shape{8, 4, 2}, Shape{96, 32, 3}, Shape{256, 8, 4}, Shape{12, 3, 3}}) {
    std::vector<float> logits = Random(static_cast<uint32_t>(s.experts), kTokens * s.experts);
    logits[1] = kNaN;
    std::fill_n(logits.begin() + s.experts, s.experts, 0.5f);  // ties of experts and of groups
    const std::vector<float> bias = Random(7, s.experts);
    const auto gpu_bias = Put(bias);
    for (const bool sigmoid : {false, true}) {
      for (const bool has_bias : {false, true}) {
        CAPTURE(s.experts);
        CAPTURE(sigmoid);
        RouteExpertsParams params;
        params.num_tokens = kTokens;
        params.num_experts = s.experts;
        params.top_k = 4;
        params.normalize = !has_bias;
        params.sigmoid = sigmoid;
        params.num_groups = s.groups;
        params.top_groups = s.top_groups;
        params.bias = has_bias ? bias.data() : nullptr;
        const Routes want = RouteOnCpu(*this, logits, params);
        params.bias = has_bias ? gpu_bias.data() : nullptr;
        const Routes got = Route(*this, logits, params);
        CHECK(got.ids == want.ids);
        CheckNear(got.weights, want.weights, kRelative);
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "token-expert pairs are grouped as on the CPU") {
  struct Shape {
    int tokens, experts, top_k;
  };
  for (const Shape& s : {Shape{1, 1, 1}, Shape{1, 32, 4}, Shape{5, 3, 3}, Shape{130, 8, 2},
                         Shape{4100, 7, 3}, Shape{64, 40, 1}}) {
    const std::vector<float> logits = Random(3, int64_t{s.tokens} * s.experts);
    RouteExpertsParams route;
    route.num_tokens = s.tokens;
    route.num_experts = s.experts;
    route.top_k = s.top_k;
    const std::vector<int32_t> ids = RouteOnCpu(*this, logits, route).ids;
    std::vector<int32_t> slots(ids.size());
    std::vector<int32_t> x_rows(ids.size());
    std::vector<int32_t> offsets(static_cast<size_t>(s.experts) + 1);
    const std::vector<float> weights = Random(4, static_cast<int64_t>(ids.size()));
    std::vector<float> slot_weights(ids.size());
    const auto gpu_weights = Put(weights);
    const auto gpu_slot_weights = Put(std::vector<float>(ids.size(), -1.f));
    const auto gpu_ids = Put(ids);
    const auto gpu_slots = Put(std::vector<int32_t>(ids.size(), -1));
    const auto gpu_x_rows = Put(std::vector<int32_t>(ids.size(), -1));
    const auto gpu_offsets = Put(std::vector<int32_t>(offsets.size(), -1));
    cpu->GroupRows({ids.data(), slots.data(), x_rows.data(), offsets.data(), s.tokens, s.experts,
                    s.top_k, weights.data(), slot_weights.data()});
    CudaGroupRows(ctx, {gpu_ids.data(), gpu_slots.data(), gpu_x_rows.data(), gpu_offsets.data(),
                        s.tokens, s.experts, s.top_k, gpu_weights.data(), gpu_slot_weights.data()});
    CAPTURE(s.tokens);
    CHECK(gpu_slots.Read() == slots);
    CHECK(gpu_x_rows.Read() == x_rows);
    CHECK(gpu_offsets.Read() == offsets);
    CHECK(gpu_slot_weights.Read() == slot_weights);
  }
}

TEST_CASE_FIXTURE(Fixture,
                  "the experts' rows are combined as on the CPU" * doctest::test_suite("small")) {
  constexpr int kTokens = 5;
  for (const int dim : {1, 64, 515, 1028}) {
    for (const int top_k : {1, 3, 8}) {
      const int pairs = kTokens * top_k;
      std::vector<int32_t> slots(static_cast<size_t>(pairs));
      std::iota(slots.begin(), slots.end(), 0);
      std::shuffle(slots.begin(), slots.end(), std::mt19937(1));
      const std::vector<float> y = Random(1, int64_t{pairs} * dim);
      const std::vector<float> weights = Random(2, pairs);
      const std::vector<float> before = Random(3, kTokens * int64_t{dim});
      const auto gpu_slots = Put(slots);
      const auto gpu_y = Put(y);
      const auto gpu_weights = Put(weights);
      for (const bool shared : {false, true}) {  // shared: sigmoids and no slots
        CAPTURE(dim);
        CAPTURE(shared);
        std::vector<float> want = before;
        const auto out = Put(before);
        cpu->CombineExperts({y.data(), shared ? nullptr : slots.data(), weights.data(), shared,
                             want.data(), kTokens, top_k, dim});
        CudaCombineExperts(ctx, {gpu_y.data(), shared ? nullptr : gpu_slots.data(),
                                 gpu_weights.data(), shared, out.data(), kTokens, top_k, dim});
        // Sums of up to nine terms of about 1, which may cancel.
        CheckNear(out.Read(), want, kRelative, kRelative);
      }
    }
  }
}

// Return the sampler's tokens for greedy requests.
std::vector<int32_t> SampleRows(std::vector<float> logits, int vocab_size) {
  std::vector<int32_t> ids;
  const SamplingRequest request;
  Sampler sampler(vocab_size);
  for (size_t first = 0; first < logits.size(); first += static_cast<size_t>(vocab_size)) {
    SampleInput input;
    input.logits = logits.data() + first;
    input.request = &request;
    ids.push_back(sampler.Sample(input).token);
  }
  return ids;
}

TEST_CASE_FIXTURE(Fixture, "the argmax of each row equals the sampler's greedy token") {
  for (const int vocab : {1, 5, 32, 1000, 8195, 20000}) {
    constexpr int kRows = 9;
    std::vector<float> logits = Random(static_cast<uint32_t>(vocab), kRows * int64_t{vocab});
    const auto row = [&](int i) { return logits.begin() + i * vocab; };
    std::fill_n(row(0), vocab, -kInf);
    std::fill_n(row(1), vocab, kNaN);
    *(row(2) + vocab / 2) = kNaN;
    *(row(3) + vocab - 1) = kInf;
    *(row(4) + vocab - 1) = *(row(4) + vocab / 2) = 50.f;
    std::fill_n(row(5), vocab, -0.f);
    *(row(5) + vocab - 1) = 0.f;  // a tie goes to the lowest id
    std::fill_n(row(6), vocab, -kInf);
    *(row(6) + vocab - 1) = -3e38f;
    const auto gpu_logits = Put(logits);
    for (const int num_sms : {1, 132}) {
      for (const int num_rows : {1, kRows}) {
        const auto ids = Put(std::vector<int32_t>(static_cast<size_t>(num_rows), -7));
        ctx.gpu.num_sms = num_sms;
        const int first = kRows - num_rows;
        CudaArgMaxRows(ctx,
                       {gpu_logits.data() + int64_t{first} * vocab, ids.data(), num_rows, vocab});
        CAPTURE(vocab);
        CAPTURE(num_sms);
        const std::vector<int32_t> want = SampleRows({row(first), logits.end()}, vocab);
        CHECK(ids.Read() == want);
      }
    }
  }
}

TEST_CASE_FIXTURE(Fixture, "ops without rows do nothing") {
  CudaNorm(ctx, {.dim = 4});
  CudaGatedActivation(ctx, {.dim = 4});
  CudaRouteExperts(ctx, {.num_experts = 4, .top_k = 2});
  CudaCombineExperts(ctx, {.top_k = 2, .dim = 4});
  CudaArgMaxRows(ctx, {.vocab_size = 4});
  RopeConfig config;
  config.dim = 8;
  const RopeTable table(config);
  CudaFillRope(ctx, {.table = &table});
  CHECK(workspace.generation() == 0);
}

}  // namespace
}  // namespace turbomind::cuda
