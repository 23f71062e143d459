#pragma once

// The properties of the ops of recurrent layers, for the devices of a backend (device_suite.h).

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/device_suite.h"
#include "ops/recurrent_fixture.h"
#include "ops/recurrent_vectors.h"
#include "ops/state_heads.h"

namespace turbomind::testing {

// A product adds up to 256 terms of about 1 / 16, and errors of the state decay slowly.
inline constexpr double kDeltaError = 4e-6;
// As the delta rule, but states and outputs are about four times as large. Measured: 5e-6.
inline constexpr double kScanError = 1e-5;
// A sum of up to nine terms of about 1, and exp of the sum.
inline constexpr double kConvolutionError = 3e-6;

// Prompts of several lengths, some of which end in this step; then decode and prompts together.
inline const std::vector<Parts> kMixedSteps = {
    {{.seq = 0}, {.seq = 1, .num_tokens = 19}, {.seq = 2, .num_tokens = 33}},
    {{.seq = 2}, {.seq = 0}, {.seq = 3, .num_tokens = 2}, {.seq = 1, .num_tokens = 5}},
    {{.seq = 0}, {.seq = 1}, {.seq = 2}, {.seq = 3}}};
inline const std::vector<int> kMixedLengths = {3, 25, 35, 3};

template <class Op>
void CheckMixedSteps(const DeviceSuite& suite, const Op& op) {
  const Sequences<Op> sequences(op, kMixedLengths, 1);
  const auto got = suite.OnAll([&](Device& device) { return sequences.Run(device, kMixedSteps); });
  const auto want = sequences.InDouble();
  for (size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CheckNear(got.out[i], want[i]);
  }
}

template <class Op>
void CheckHeadShapes(const DeviceSuite& suite, double error) {
  constexpr int kHeads[][2] = {{1, 1}, {2, 2}, {2, 4}, {1, 3}};
  constexpr int kDims[][2] = {{16, 16}, {48, 80}, {128, 128}, {256, 32}, {16, 256}, {80, 144}};
  for (const auto& [key_heads, value_heads] : kHeads) {
    for (const auto& [key_dim, value_dim] : kDims) {
      if (value_heads < 3 || key_dim * value_dim < 5000) {
        CAPTURE(value_heads);
        CAPTURE(key_dim);
        CAPTURE(value_dim);
        CheckMixedSteps(suite, Op{key_heads, value_heads, key_dim, value_dim, error});
      }
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "the gated delta rule for any numbers of heads and sizes") {
  CheckHeadShapes<DeltaOp>(*this, kDeltaError);
}

TEST_CASE_FIXTURE(DeviceSuite, "the selective scan for any numbers of heads and sizes") {
  CheckHeadShapes<ScanOp>(*this, kScanError);
}

TEST_CASE_FIXTURE(DeviceSuite, "value heads that are not beside each other read their key head") {
  CheckMixedSteps(*this, DeltaOp{2, 6, 32, 48, kDeltaError, true});
  CheckMixedSteps(*this, ScanOp{2, 6, 32, 48, kScanError, true});
}

TEST_CASE_FIXTURE(DeviceSuite, "short convolutions of every kernel, with and without a bias") {
  for (int kernel = 2; kernel <= kMaxConvolutionKernel; ++kernel) {
    for (const int channels : {16, 272, 1040}) {
      for (const bool has_bias : {false, true}) {
        CAPTURE(kernel);
        CAPTURE(channels);
        CheckMixedSteps(*this, ConvolutionOp{channels, kernel, has_bias, has_bias != (kernel == 4),
                                             kConvolutionError});
      }
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "short convolutions with gates of the input and the output") {
  for (int kernel = 2; kernel <= kMaxConvolutionKernel; ++kernel) {
    for (const int gates : {1, 2, 3}) {
      CAPTURE(kernel);
      CAPTURE(gates);
      CheckMixedSteps(*this, ConvolutionOp{272, kernel, gates == 1, kernel == 3, kConvolutionError,
                                           gates != 2, gates != 1});
    }
  }
}

// A head count and sizes with odd numbers of column blocks.
inline constexpr DeltaOp kSmallDelta = {1, 2, 32, 48};
inline constexpr ScanOp kSmallScan = {1, 2, 32, 48};
inline constexpr ConvolutionOp kSmallConvolution = {48, 4, true};

// Calls check(op) for a small op of each kind.
template <class F>
void ForOps(const F& check) {
  check(kSmallDelta);
  check(kSmallScan);
  check(kSmallConvolution);
  check(ConvolutionOp{16, 8});
  check(ConvolutionOp{
      .channels = 32, .kernel = 3, .silu = false, .gates_in = true, .gates_out = true});
}

TEST_CASE_FIXTURE(DeviceSuite, "every cut of a prompt into steps gives the same bits") {
  constexpr int kLength = 70;
  ForOps([&](const auto& op) {
    const Sequences sequences(op, {kLength}, 2);
    ForAll([&](Device& device) {
      const auto whole = sequences.Run(device, {{{0, kLength}}});
      for (int cut = 1; cut < kLength; ++cut) {
        CAPTURE(cut);
        REQUIRE(Same(sequences.Run(device, {{{0, cut}}, {{0, kLength - cut}}}), whole));
      }
      CHECK(Same(sequences.Run(device, std::vector<Parts>(kLength, {{0, 1}})), whole));
    });
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "decode steps of one shape read their own slots and lengths" *
                                   doctest::test_suite("small")) {
  ForOps([&](const auto& op) {
    const Sequences sequences(op, {9, 9, 9}, 6);
    std::vector<Parts> steps = {{{0}, {1}, {2, 2}}, {{2}, {0}}, {{1}}};
    for (int i = 0; i < 4; ++i) {
      steps.push_back({{i % 3}, {(i + 1) % 3}, {(i + 2) % 3}});
    }
    steps.push_back({{2, 1, {{1, 1}}}, {1, 1, {{1, 0}}}, {0}});
    const auto got = OnAll([&](Device& device) { return sequences.Run(device, steps); });
    const auto alone = OnAll([&](Device& device) {
      return sequences.Run(device, {{{0, 7}}, {{1, 7}}, {{2, 8}}});
    });
    CHECK(Same(got.out, alone.out));
    CHECK(Same(got.states, alone.states));
    CHECK(Same(got.checkpoints, {alone.states[1], alone.states[2]}));
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "a saved state is that of a run which ends there") {
  constexpr int kLength = 40;
  ForOps([&](const auto& op) {
    const Sequences sequences(op, {1, kLength, kLength}, 3);
    const auto prefix = [&](Device& device, int num_tokens) {
      return sequences.Run(device, {{{2, num_tokens}}}).states[2];
    };
    ForAll([&](Device& device) {
      // The first sequence has one token. The saves of the last one are in two steps.
      const auto got = sequences.Run(
          device, {{{0, 1, {{1, 5}}}, {1, kLength}, {2, 20, {{1, 3}, {2, 0}, {16, 7}, {20, 2}}}},
                   {{2, 20, {{3, 4}, {19, 1}}}}});
      const auto plain =
          sequences.Run(device, {{{0}, {1, kLength}, {2, 20}}, {{.seq = 2, .num_tokens = 20}}});
      CHECK(Same(got.out, plain.out));
      CHECK(Same(got.states, plain.states));
      REQUIRE(got.checkpoints.size() == 7);  // 0, 1, 2, 3, 4, 5, 7
      constexpr std::array<int, 7> kTokens = {2, 39, 20, 1, 23, 0, 16};
      for (size_t i = 0; i < kTokens.size(); ++i) {
        CAPTURE(i);
        CHECK(
            Same(got.checkpoints[i], kTokens[i] == 0 ? got.states[0] : prefix(device, kTokens[i])));
      }
    });
  });
}

TEST_CASE_FIXTURE(DeviceSuite,
                  "the state before the first position is zero, whatever a slot holds") {
  ForOps([&](const auto& op) {
    const Sequences sequences(op, kMixedLengths, 4);
    const auto clean =
        OnAll([&](Device& device) { return sequences.Run(device, kMixedSteps, 0.f); });
    ForAll([&](Device& device) {
      CHECK(Same(sequences.Run(device, kMixedSteps, kNan), clean));
      CHECK(Same(sequences.Run(device, kMixedSteps, kInf), clean));
    });
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "NaN stays in its sequence, and after its token") {
  ForOps([&](const auto& op) {
    const Sequences clean(op, kMixedLengths, 5);
    const auto want = OnAll([&](Device& device) { return clean.Run(device, kMixedSteps); });
    constexpr int kToken = 20;
    const int64_t size = op.row_size();
    for (const int64_t i :
         {int64_t{0}, size / 3, size / 2, size - 4, size - 3, size - 2, size - 1}) {
      Sequences dirty = clean;
      dirty.rows[1][static_cast<size_t>(kToken * size + i)] = kNan;
      CAPTURE(i);
      const auto got = OnAll([&](Device& device) { return dirty.Run(device, kMixedSteps); });
      for (const size_t seq : {0, 2, 3}) {
        CHECK(Same(got.out[seq], want.out[seq]));
        CHECK(Same(got.states[seq], want.states[seq]));
      }
      const auto first = got.out[1].begin();
      const int64_t before = kToken * op.out_size();
      CHECK(std::equal(first, first + before, want.out[1].begin()));
      const auto is_nan = [](float value) { return std::isnan(value); };
      CHECK(std::any_of(first + before, first + before + op.out_size(), is_nan));
    }
  });
}

// Runs one sequence of rows that are a pattern.
template <class Op, size_t kSize>
void CheckVectors(const DeviceSuite& suite, const Op& op, const double (&want)[kSize]) {
  const auto num_tokens = static_cast<int>(int64_t{kSize} / op.out_size());
  Sequences<Op> sequences(op, {num_tokens}, 0);
  sequences.rows[0] = Pattern(num_tokens * op.row_size(), 5);
  std::vector<Exact> exact;
  for (const double value : want) {
    exact.push_back({value, op.error * (1 + std::abs(value))});
  }
  const auto got = suite.OnAll([&](Device& device) {
    return sequences.Run(device, {{{0, num_tokens}}});
  });
  CheckNear(got.out[0], exact);
}

TEST_CASE_FIXTURE(DeviceSuite, "recurrent layers as NumPy defines them") {
  CheckVectors(*this, DeltaOp{1, 2, 16, 16, kDeltaError}, kDeltaVectors);
  CheckVectors(*this, ScanOp{1, 2, 16, 16, kScanError}, kScanVectors);
  CheckVectors(*this, ConvolutionOp{16, 4, true, true, kConvolutionError}, kConvolutionVectors);
  CheckVectors(*this, ConvolutionOp{16, 3, false, false, kConvolutionError, true, true},
               kGatedConvolutionVectors);
}

// Computes a gated norm in double precision, with an error of `relative`.
inline std::vector<Exact> GatedNormInDouble(const GatedNormParams& p, const Floats& x,
                                            const Floats& z, const Floats& weight,
                                            double relative) {
  std::vector<Exact> want;
  for (int64_t i = 0; i < std::ssize(x); ++i) {
    const auto gate = [&](int64_t at) {
      const double value = z[static_cast<size_t>(at / p.dim * p.z_stride + at % p.dim)];
      return value * Sigmoid(value);
    };
    const auto input = [&](int64_t at) {
      return x[static_cast<size_t>(at)] * (p.gate_first ? gate(at) : 1);
    };
    double value = input(i) * (p.gate_first ? 1 : gate(i));
    if (!weight.empty()) {
      double squares = 0;
      for (int64_t k = i / p.group * p.group; k < (i / p.group + 1) * p.group; ++k) {
        squares += input(k) * input(k);
      }
      value *=
          weight[static_cast<size_t>(i % p.dim)] / std::sqrt(squares / p.group + double{p.eps});
    }
    want.push_back({value, relative * std::abs(value) + kTiny});
  }
  return want;
}

TEST_CASE_FIXTURE(DeviceSuite, "gated norms of runs of a row" * doctest::test_suite("small")) {
  constexpr int kShapes[][3] = {{1, 128, 128}, {41, 256, 128}, {3, 60, 20},
                                {7, 17, 17},   {5, 8, 1},      {3, 1200, 600}};
  for (const auto& [num_rows, dim, group] : kShapes) {
    for (const int form : {0, 1, 2, 3}) {
      GatedNormParams p = {.z_stride = dim + 3,
                           .num_rows = num_rows,
                           .dim = dim,
                           .group = group,
                           .gate_first = form % 2 == 1};
      const Floats x = Normal(int64_t{num_rows} * dim, 1, 3.f);
      const Floats z = Normal(num_rows * p.z_stride, 2, 4.f);
      const Floats weight = form < 2 ? RandomVector(dim, 3) : Floats();
      const auto want = GatedNormInDouble(p, x, z, weight, 2 * relative());
      CAPTURE(dim);
      CAPTURE(form);
      for (const bool in_place : {false, true}) {
        const auto got = OnAll([&](Device& device) {
          const DeviceArray<float> from(device, x);
          const DeviceArray<float> gates(device, z);
          const DeviceArray<float> by(device, weight);
          const DeviceArray<float> to(device, Floats(x.size(), kNan));
          p.x = from.data();
          p.z = gates.data();
          p.weight = by.data();
          p.out = in_place ? from.data() : to.data();
          device.GatedNorm(p);
          return (in_place ? from : to).Read();
        });
        CheckNear(got, want);
      }
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "sigmoid gates") {
  for (const int64_t count : {1, 30, 64, 30007}) {
    const Floats x = RandomVector(count, 1);
    Floats gate = Normal(count, 2, 8.f);
    gate[0] = kNan;
    std::vector<Exact> want;
    for (size_t i = 0; i < x.size(); ++i) {
      const double value = x[i] * Sigmoid(gate[i]);
      want.push_back({value, relative() * std::abs(value) + kTiny});
    }
    CheckNear(OnAll([&](Device& device) {
                const DeviceArray<float> values(device, x);
                const DeviceArray<float> by(device, gate);
                device.SigmoidGate({values.data(), by.data(), count});
                return values.Read();
              }),
              want);
  }
}

}  // namespace turbomind::testing
