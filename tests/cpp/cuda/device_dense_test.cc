// Tests the ops outside attention through the Device interface that the engine uses. Compares the
// GPU's results with the CPU's.

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cuda/both_devices.h"
#include "turbomind/ops/rope.h"

namespace turbomind::testing {
namespace {

// A few FP32 roundings and approximate exp, sin and division.
constexpr double kFloatError = 1e-5;
// Activations are rounded to BF16 (at most 2^-9 each), weights are exact, and sums are in FP32.
constexpr double kProductError = 4e-3;

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kF32,  MatrixFormat::kBF16,  MatrixFormat::kQ4_0,      MatrixFormat::kQ4_1,
    MatrixFormat::kQ8_0, MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split};

struct BothMatrices {
  BothMatrices(Devices& devices, const Matrix& matrix) {
    for (const int side : {kCpu, kGpu}) {
      of[side] = devices.of[side]->PackMatrix(matrix.source(), side == kCpu);
    }
  }
  std::unique_ptr<PackedMatrix> of[2];
};

// A step of one sequence with these tokens at these positions.
struct Prompt {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;
  std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
  std::vector<int32_t> context_lens = {positions.back() + 1};
  std::vector<int32_t> table = std::vector<int32_t>(static_cast<size_t>(positions.back() / 64 + 1));

  std::vector<int32_t> rope_sets = std::vector<int32_t>(tokens.size(), 1);

  template <class F>
  void Run(Device& device, F ops) const {
    const StepGroup group = {.batch = {.num_seqs = 1,
                                       .num_decode = tokens.size() == 1 ? 1 : 0,
                                       .num_tokens = static_cast<int>(tokens.size()),
                                       .cu_seqlens = cu_seqlens.data(),
                                       .context_lens = context_lens.data(),
                                       .positions = positions.data(),
                                       .block_tables = table.data(),
                                       .block_table_stride = static_cast<int64_t>(table.size()),
                                       .rope_sets = rope_sets.data()},
                             .kv_heads = 1};
    device.RunStep({.tokens = tokens.data(), .groups = &group, .num_groups = 1, .q_heads = 1}, ops);
  }
};

TEST_CASE("embedding matches the CPU") {
  Devices devices;
  const Prompt prompt = {{3, 0, 6, 3}, {0, 1, 2, 3}};
  for (const MatrixFormat format : kFormats) {
    CAPTURE(static_cast<int>(format));
    const BothMatrices table(devices, RandomMatrix(format, 7, 64, 1));
    const Both<float> out(devices, Unwritten(prompt.tokens.size() * 64));
    for (const int side : {kCpu, kGpu}) {
      prompt.Run(*devices.of[side], [&] {
        devices.of[side]->Embed({.table = table.of[side].get(),
                                 .ids = prompt.tokens.data(),
                                 .out = out[side],
                                 .num_tokens = static_cast<int>(prompt.tokens.size())});
      });
    }
    CHECK(RelativeError(out) < kFloatError);
  }
}

TEST_CASE("a recorded step is dropped when its memory is released") {
  Devices devices;
  const Prompt prompt = {{3}, {0}};
  const BothMatrices table(devices, RandomMatrix(MatrixFormat::kBF16, 7, 64, 1));
  for (int engine = 0; engine < 2; ++engine) {
    std::vector<std::unique_ptr<Both<float>>> elsewhere;  // moves the next array
    for (int i = 0; i < engine; ++i) {
      elsewhere.push_back(std::make_unique<Both<float>>(devices, Unwritten(64)));
    }
    Both<float> out(devices, Unwritten(64));
    for (int step = 0; step < 4; ++step) {
      out.Write(Unwritten(64));
      for (const int side : {kCpu, kGpu}) {
        prompt.Run(*devices.of[side], [&] {
          devices.of[side]->Embed({.table = table.of[side].get(),
                                   .ids = prompt.tokens.data(),
                                   .out = out[side],
                                   .num_tokens = 1});
        });
      }
      CHECK(RelativeError(out) < kFloatError);
    }
  }
}

TEST_CASE("RoPE tables match the CPU for every kind of scaling") {
  Devices devices;
  const Prompt prompt = {{0, 0, 0}, {5000, 5001, 5002}};
  for (const RopeKind kind : {RopeKind::kDefault, RopeKind::kLinear, RopeKind::kDynamic,
                              RopeKind::kLlama3, RopeKind::kYarn, RopeKind::kLongRope}) {
    CAPTURE(static_cast<int>(kind));
    const std::vector<float> factors(kind == RopeKind::kLongRope ? 32 : 0, 3.f);
    const RopeTable table({.kind = kind,
                           .dim = 64,
                           .factor = 2.f,
                           .original_max_position = 4096,
                           .attention_factor = kind == RopeKind::kLongRope ? 1.2f : 0.f,
                           .freq_factors = std::vector<float>(factors.size(), 1.5f),
                           .long_factors = factors});
    const Both<float> inv_freq(devices, table.inv_freq());
    const Both<float> cos(devices, Unwritten(3 * 32));
    const Both<float> sin(devices, Unwritten(3 * 32));
    for (const int side : {kCpu, kGpu}) {
      prompt.Run(*devices.of[side], [&] {
        devices.of[side]->FillRope(
            {.table = &table,
             .inv_freq = inv_freq[side],
             .positions = prompt.positions.data(),
             .cos = cos[side],
             .sin = sin[side],
             .num_tokens = 3,
             .sets = table.num_sets() > 1 ? prompt.rope_sets.data() : nullptr});
      });
    }
    CHECK(RelativeError(cos) < kFloatError);
    CHECK(RelativeError(sin) < kFloatError);
  }
}

TEST_CASE("norms and activations match the CPU") {
  Devices devices;
  const Both<float> x(devices, Normal(5 * 192, 1));
  const Both<float> weight(devices, Normal(192, 2));
  const Both<float> out(devices, Unwritten(5 * 192));
  for (const int side : {kCpu, kGpu}) {
    devices.of[side]->Norm(
        {.x = x[side], .weight = weight[side], .out = out[side], .num_rows = 5, .dim = 192});
  }
  CHECK(RelativeError(out) < kFloatError);
  for (const Activation activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kClampedSwiglu}) {
    for (const bool interleaved : {false, true}) {
      CAPTURE(static_cast<int>(activation));
      CAPTURE(interleaved);
      const Both<float> act(devices, Unwritten(5 * 96));
      for (const int side : {kCpu, kGpu}) {
        devices.of[side]->GatedActivation({.gate_up = x[side],
                                           .out = act[side],
                                           .num_rows = 5,
                                           .dim = 96,
                                           .activation = activation,
                                           .interleaved = interleaved,
                                           .limit = 1.f});
      }
      CHECK(RelativeError(act) < kFloatError);
    }
  }
}

TEST_CASE("linear layers match the CPU in every format and with parts of two formats") {
  Devices devices;
  constexpr int kCols = 128;
  for (const MatrixFormat format : kFormats) {
    const BothMatrices first(devices, RandomMatrix(format, 96, kCols, 3));
    const BothMatrices second(devices, RandomMatrix(MatrixFormat::kBF16, 40, kCols, 4));
    for (const int rows : {1, 5, 33}) {
      for (const bool accumulate : {false, true}) {
        CAPTURE(static_cast<int>(format));
        CAPTURE(rows);
        CAPTURE(accumulate);
        const auto size = static_cast<size_t>(rows);
        const Both<float> x(devices, Normal(size * kCols, 5));
        const Both<float> bias(devices, Normal(96, 6));
        const Both<float> y(devices, accumulate ? Normal(size * 136, 7) : Unwritten(size * 136));
        for (const int side : {kCpu, kGpu}) {
          const LinearPart parts[] = {{first.of[side].get(), bias[side]}, {second.of[side].get()}};
          devices.of[side]->Linear({.x = x[side],
                                    .x_stride = kCols,
                                    .parts = parts,
                                    .num_parts = 2,
                                    .y = y[side],
                                    .y_stride = 136,
                                    .num_rows = rows,
                                    .accumulate = accumulate});
          devices.of[side]->Synchronize();
        }
        CHECK(RelativeError(y) < kProductError);
      }
    }
  }
}

TEST_CASE("an expert layer matches the CPU from router logits to the sum") {
  Devices devices;
  constexpr int kTokens = 9, kExperts = 6, kTopK = 2, kCols = 64, kRows = 96;
  constexpr size_t kPairs = kTokens * kTopK;
  const Both<float> logits(devices, Normal(kTokens * kExperts, 8));
  const Both<float> x(devices, Normal(kTokens * kCols, 9));
  for (const MatrixFormat format : {MatrixFormat::kBF16, MatrixFormat::kMxfp4Split}) {
    CAPTURE(static_cast<int>(format));
    const Both<int32_t> ids(devices, std::vector<int32_t>(kPairs, -1));
    const Both<float> weights(devices, Unwritten(kPairs));
    const Both<int32_t> slots(devices, std::vector<int32_t>(kPairs, -1));
    const Both<int32_t> x_rows(devices, std::vector<int32_t>(kPairs, -1));
    const Both<int32_t> offsets(devices, std::vector<int32_t>(kExperts + 1, -1));
    const Both<float> y(devices, Unwritten(kPairs * kRows));
    const Both<float> out(devices, Normal(kTokens * kRows, 10));
    std::vector<std::unique_ptr<BothMatrices>> experts;
    for (unsigned i = 0; i < kExperts; ++i) {
      experts.push_back(
          std::make_unique<BothMatrices>(devices, RandomMatrix(format, kRows, kCols, 11 + i)));
    }
    const Both<float> bias(devices, Normal(kRows, 30));
    for (const int side : {kCpu, kGpu}) {
      Device& device = *devices.of[side];
      std::vector<LinearPart> parts;
      for (const auto& expert : experts) {
        parts.push_back({expert->of[side].get(), bias[side]});
      }
      device.RouteExperts({.logits = logits[side],
                           .ids = ids[side],
                           .weights = weights[side],
                           .num_tokens = kTokens,
                           .num_experts = kExperts,
                           .top_k = kTopK,
                           .normalize = true});
      device.GroupRows({.ids = ids[side],
                        .slots = slots[side],
                        .x_rows = x_rows[side],
                        .offsets = offsets[side],
                        .num_tokens = kTokens,
                        .num_experts = kExperts,
                        .top_k = kTopK});
      device.GroupedLinear({.x = x[side],
                            .x_stride = kCols,
                            .x_rows = x_rows[side],
                            .y = y[side],
                            .y_stride = kRows,
                            .experts = parts.data(),
                            .num_experts = kExperts,
                            .offsets = offsets[side],
                            .num_rows = static_cast<int>(kPairs)});
      device.CombineExperts({.y = y[side],
                             .slots = slots[side],
                             .weights = weights[side],
                             .out = out[side],
                             .num_tokens = kTokens,
                             .top_k = kTopK,
                             .dim = kRows});
      device.Synchronize();
    }
    CHECK(ids.Same());
    CHECK(slots.Same());
    CHECK(x_rows.Same());
    CHECK(offsets.Same());
    CHECK(RelativeError(weights) < kFloatError);
    CHECK(RelativeError(y) < kProductError);
    CHECK(RelativeError(out) < kProductError);
  }
}

TEST_CASE("argmax gives the lowest id among equal logits and rejects NaN and infinity") {
  Devices devices;
  constexpr int kVocab = 1000;
  std::vector<float> logits = Normal(5 * kVocab, 13);
  logits[3] = logits[900] = 9.f;                         // the lower id wins a tie
  logits[kVocab + kVocab - 1] = 9.f;                     // the last id
  logits[2 * kVocab + 7] = NAN;                          // refused
  logits[3 * kVocab + 7] = INFINITY;                     // refused
  std::fill(logits.end() - kVocab, logits.end(), -2.f);  // all equal
  const Both<float> rows(devices, logits);
  const Both<int32_t> ids(devices, std::vector<int32_t>(5, -7));
  REQUIRE(devices.of[kGpu]->ArgMaxRows(
      {.logits = rows[kGpu], .ids = ids[kGpu], .num_rows = 5, .vocab_size = kVocab}));
  CHECK(ids.Read(kGpu) == std::vector<int32_t>{3, kVocab - 1, -1, -1, 0});
}

TEST_CASE("values read back are the computed ones and may be overwritten") {
  Devices devices;
  const std::vector<float> values = Normal(1000, 12);
  const Both<float> memory(devices, values);
  for (const int side : {kCpu, kGpu}) {
    auto* found = static_cast<float*>(devices.of[side]->ReadBack(memory[side], 4000));
    CHECK(std::equal(values.begin(), values.end(), found));
    found[0] = 1.f;
  }
}

}  // namespace
}  // namespace turbomind::testing
