#pragma once

// The properties of a device outside linear layers, the cache and attention. A test lists the
// devices of its backend (cpu/device_test.cc, cuda/device_test.cc) and gets all test cases. Every
// op is compared with its definition (ops/params.h) in double precision.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "cpu/linear_fixture.h"
#include "ops/device_fixture.h"
#include "ops/routing_suite.h"
#include "turbomind/ops/rope.h"
#include "turbomind/ops/sampling.h"

namespace turbomind::testing {

// A mean of FP32 values of about 10 is off by 1e-6.
inline constexpr double kMeanError = 2e-6;
// A kernel's erf has an absolute error of 2e-7.
inline constexpr double kErfError = 3e-7;
// Kernels limit exp, so that tiny values become 0.
inline constexpr double kTiny = 1e-30;
// Capped logits are below 30, and tanh is off by a few units of 2^-24.
inline constexpr double kCapError = 1e-5;
// Libraries give cos and sin within 2 units of 2^-24.
inline constexpr double kAngleError = 3e-7;

TEST_CASE_FIXTURE(DeviceSuite, "reserved memory is zero and aligned") {
  ForAll([](Device& device) {
    constexpr size_t kBytes = 1000;
    void* memory = device.Reserve(kBytes);
    CHECK(reinterpret_cast<uintptr_t>(memory) % 64 == 0);
    std::vector<uint8_t> bytes(kBytes, 1);
    device.Copy(bytes.data(), memory, kBytes);
    device.Synchronize();
    CHECK(bytes == std::vector<uint8_t>(kBytes));
    device.Release(memory, kBytes);
    CHECK(device.Reserve(0) == nullptr);
    device.Release(nullptr, 0);
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "values read back are the computed ones and may be overwritten") {
  const std::vector<float> values = RandomVector(1000, 12);
  ForAll([&](Device& device) {
    const DeviceArray<float> memory(device, values);
    auto* found = static_cast<float*>(device.ReadBack(memory.data(), 4000));
    CHECK(std::equal(values.begin(), values.end(), found));
    found[0] = 1.f;
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "host work runs every item once, on a thread of its own") {
  ForAll([](Device& device) {
    std::vector<std::atomic<int>> runs(100);
    std::vector<std::atomic<int>> busy(static_cast<size_t>(device.num_host_threads()));
    std::atomic<int> clashes = 0;
    device.ForEachOnHost(100, [&](int64_t item, int thread) {
      clashes += busy.at(static_cast<size_t>(thread)).fetch_add(1);
      ++runs[static_cast<size_t>(item)];
      busy[static_cast<size_t>(thread)] -= 1;
    });
    CHECK(clashes == 0);
    CHECK(std::ranges::all_of(runs, [](int count) { return count == 1; }));
  });
}

TEST_CASE_FIXTURE(DeviceSuite, "embedding returns the rows of a table, times a factor") {
  using enum MatrixFormat;
  constexpr int64_t kCols = 64;
  const Step step = {{3, 0, 6, 3}, {0, 1, 2, 3}};
  for (const MatrixFormat format : {kF32, kBF16, kQ4_0, kQ4_1, kQ8_0, kMxfp4, kMxfp4Split}) {
    const Matrix table = RandomMatrix(format, 7, kCols, 1);
    for (const float scale : {1.f, 2.7f}) {
      std::vector<float> want(step.tokens.size() * kCols);
      for (size_t i = 0; i < step.tokens.size(); ++i) {
        DequantizeMatrixRow(table.source(), step.tokens[i], want.data() + i * kCols);
      }
      std::ranges::transform(want, want.begin(), [&](float v) { return v * scale; });
      CAPTURE(static_cast<int>(format));
      ForAll([&](Device& device) {
        const auto packed = device.PackMatrix(table.source(), false);
        const DeviceArray<float> out(device, std::vector<float>(want.size(), kNan));
        step.Run(device, [&] {
          device.Embed({packed.get(), step.tokens.data(), out.data(), step.size(), scale});
        });
        CHECK(out.Read() == want);
      });
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "a step reads its own tokens and memory, if it was recorded too") {
  constexpr int64_t kCols = 64;
  const Matrix table = RandomMatrix(MatrixFormat::kBF16, 7, kCols, 1);
  ForAll([&](Device& device) {
    const auto packed = device.PackMatrix(table.source(), false);
    for (int engine = 0; engine < 2; ++engine) {
      const DeviceArray<float> elsewhere(device, std::vector<float>(engine * kCols));
      const DeviceArray<float> out(device, std::vector<float>(kCols));
      for (int32_t token = 0; token < 4; ++token) {
        const Step step = {{token}, {0}};
        out.Write(std::vector<float>(kCols, kNan));
        step.Run(device, [&] { device.Embed({packed.get(), step.tokens.data(), out.data(), 1}); });
        const auto row = table.values.begin() + token * kCols;
        CHECK(std::ranges::equal(out.Read(), std::vector<double>(row, row + kCols)));
      }
    }
  });
}

// Computes cos and sin of a step in double precision, from angles that are FP32 products.
inline std::vector<Exact> ExactRope(const RopeTable& table, const Step& step,
                                    const FillRopeParams& p) {
  std::vector<Exact> waves[2];
  const int half = table.enabled() ? table.dim() / 2 : 0;
  for (int t = 0; t < step.size(); ++t) {
    const int block = std::max(p.block_seq_len, 1);
    const int32_t position = step.positions[static_cast<size_t>(t)] / block * block + block / 2;
    const int first = p.sets == nullptr ? 0 : half * p.sets[t];
    for (int i = first; i < first + half; ++i) {
      const float angle = table.inv_freq()[static_cast<size_t>(i)] * static_cast<float>(position);
      const double factor = table.attention_factor();
      waves[0].push_back({std::cos(double{angle}) * factor, kAngleError * factor});
      waves[1].push_back({std::sin(double{angle}) * factor, kAngleError * factor});
    }
  }
  waves[0].insert(waves[0].end(), waves[1].begin(), waves[1].end());
  return waves[0];
}

TEST_CASE_FIXTURE(DeviceSuite, "RoPE has the angles of every kind of scaling, block and set") {
  using enum RopeKind;
  std::vector<RopeConfig> configs(8);
  const RopeKind kinds[] = {kDefault, kLinear, kDynamic, kLlama3,
                            kYarn,    kNone,   kDynamic, kLongRope};
  for (size_t i = 0; i < configs.size(); ++i) {
    configs[i].kind = kinds[i];
    configs[i].dim = 64;
    configs[i].factor = 4.f;
    configs[i].original_max_position = 4096;
  }
  configs[6].dim = 6;  // rows of three
  configs[6].theta = 1e6f;
  configs[7].attention_factor = 1.2f;
  configs[7].freq_factors.assign(32, 1.5f);
  configs[7].long_factors.assign(32, 7.f);
  const Step step = {std::vector<int32_t>(9),
                     {0, 1, 4095, 4096, 4097, 50000, 131071, 1 << 20, 7},
                     {0, 1, 0, 1, 1, 0, 1, 0, 1}};
  for (const RopeConfig& config : configs) {
    const RopeTable table(config);
    const auto size = step.tokens.size() * (table.enabled() ? table.dim() / 2 : 0);
    for (const bool has_sets : {false, table.num_sets() > 1}) {
      for (const int block_seq_len : {0, 16}) {
        FillRopeParams p = {.table = &table,
                            .positions = step.positions.data(),
                            .num_tokens = step.size(),
                            .block_seq_len = block_seq_len,
                            .sets = has_sets ? step.rope_sets.data() : nullptr};
        const auto got = OnAll([&](Device& device) {
          const DeviceArray<float> inv_freq(device, table.inv_freq());
          const DeviceArray<float> waves(device, std::vector<float>(2 * size, kNan));
          p.inv_freq = inv_freq.data();
          p.cos = waves.data();
          p.sin = waves.data() + size;
          step.Run(device, [&] { device.FillRope(p); });
          return waves.Read();
        });
        CAPTURE(static_cast<int>(config.kind));
        CAPTURE(block_seq_len);
        CheckNear(got, ExactRope(table, step, p));
      }
    }
  }
}

// Random rows: RMSNorm without `pad`, else LayerNorm with a bias and values between the rows, which
// must not change.
struct NormRows {
  NormRows(int num_rows, int dim, int pad)
      : p{.num_rows = num_rows, .dim = dim, .eps = 1e-5f, .centered = pad > 0},
        x(Normal(int64_t{num_rows} * dim, static_cast<uint32_t>(dim), 3.f)),
        weight(RandomVector(dim, 1)),
        bias(pad > 0 ? Normal(dim, 2, 2.f) : std::vector<float>()) {
    p.stride = pad > 0 ? dim + pad : 0;
    for (float& value : x) {
      value += p.centered ? 10.f : 0.f;  // a mean far from 0
    }
  }

  int pad() const { return static_cast<int>(p.Stride()) - p.dim; }

  // Returns the norms of arrays that begin `offset` values after an aligned address.
  std::vector<float> Run(Device& device, bool in_place, size_t offset) const {
    const auto padded = Padded(x, p.dim, p.num_rows, pad(), kSentinel);
    const DeviceArray<float> from(device, padded, offset);
    const DeviceArray<float> to(device, std::vector<float>(padded.size(), kSentinel), offset);
    const DeviceArray<float> by(device, weight, offset);
    const DeviceArray<float> plus(device, bias, offset);
    NormParams params = p;
    params.x = from.data();
    params.out = in_place ? from.data() : to.data();
    params.weight = by.data();
    params.bias = plus.data();
    device.Norm(params);
    return Unpadded((in_place ? from : to).Read(), p.dim, pad());
  }

  std::vector<Exact> InDouble(double relative) const {
    std::vector<Exact> exact;
    for (auto row = x.begin(); row != x.end(); row += p.dim) {
      const double sum = std::accumulate(row, row + p.dim, 0.0);
      const double mean = p.centered ? sum / p.dim : 0;
      double squares = 0;
      for (int i = 0; i < p.dim; ++i) {
        squares += (row[i] - mean) * (row[i] - mean);
      }
      const double scale = 1 / std::sqrt(squares / p.dim + double{p.eps});
      for (size_t i = 0; i < weight.size(); ++i) {
        const double w = scale * weight[i];
        const double want =
            (row[static_cast<int64_t>(i)] - mean) * w + (p.centered ? bias[i] : 0.f);
        exact.push_back({want, p.centered ? kMeanError * (1 + std::abs(w) + std::abs(want))
                                          : relative * std::abs(want)});
      }
    }
    return exact;
  }

  NormParams p;
  std::vector<float> x, weight, bias;
};

TEST_CASE_FIXTURE(DeviceSuite,
                  "norms of odd, long, unaligned and padded rows" * doctest::test_suite("small")) {
  // The last dim exceeds the registers of a block of threads.
  for (const int dim : {1, 3, 4, 63, 64, 127, 128, 512, 516, 576, 2051, 2880, 4097, 16388}) {
    for (const int pad : {0, 4, 5}) {
      const int num_rows = dim < 1000 ? 41 : 3;
      const NormRows rows(num_rows, dim, pad);
      CAPTURE(dim);
      CAPTURE(pad);
      for (const size_t offset : {0, 1}) {
        const auto got = OnAll([&](Device& d) { return rows.Run(d, false, offset); });
        CheckNear(got, rows.InDouble(relative()));
        CHECK(SameBits(OnAll([&](Device& d) { return rows.Run(d, true, offset); }), got));
        NormRows last = rows;
        last.p.num_rows = 1;
        last.x.erase(last.x.begin(), last.x.end() - dim);
        CHECK(SameBits(OnAll([&](Device& d) { return last.Run(d, false, offset); }),
                       {got.end() - dim, got.end()}));
      }
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "soft caps and scaled additions") {
  constexpr int64_t kCount = 30007;
  const std::vector<float> x = Normal(kCount, 17, 40.f);
  std::vector<float> logits = x;
  logits[3] = kNan;
  logits[kCount - 1] = kNan;
  for (const float cap : {0.f, 30.f}) {
    std::vector<Exact> want;
    for (const float value : logits) {
      const double scaled = 0.5 * value;
      want.push_back({cap > 0 ? cap * std::tanh(scaled / cap) : scaled, kCapError});
    }
    const auto got = OnAll([&](Device& device) {
      const DeviceArray<float> values(device, logits);
      device.SoftCap({values.data(), kCount, 0.5f, cap});
      return values.Read();
    });
    CheckNear(got, want);
  }
  std::vector<float> sums;
  for (const float value : x) {
    sums.push_back(1.f + 0.25f * value);
  }
  CHECK(sums == OnAll([&](Device& device) {
          const DeviceArray<float> from(device, x);
          const DeviceArray<float> out(device, std::vector<float>(x.size(), 1.f));
          device.Add({from.data(), out.data(), kCount, 0.25f});
          return out.Read();
        }));
}

// Returns act(gate) * up.
inline Exact Activate(const GatedActivationParams& p, double gate, double up, double relative) {
  double exponent = 0;   // the result is gate / (1 + exp(-exponent)) * up
  double roundings = 2;  // of the exponent
  switch (p.activation) {
    case Activation::kGelu: {
      const double value = 0.5 * (1 + std::erf(gate / M_SQRT2)) * gate * up;
      return {value, relative * std::abs(value) + kErfError * std::abs(gate * up)};
    }
    case Activation::kRelu2:
      up *= std::max(gate, 0.0) * std::max(gate, 0.0);  // NaN stays NaN
      return {up, relative * std::abs(up)};
    case Activation::kSilu:
      exponent = gate;
      break;
    case Activation::kGeluTanh:  // 0.5 (1 + tanh u), without cancellation
      exponent = 2 * std::sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate);
      roundings = 4;
      break;
    case Activation::kClampedSwiglu:
      gate = std::min(gate, double{p.limit});
      up = std::clamp(up, double{-p.limit}, double{p.limit}) + 1;
      exponent = 1.702 * gate;
  }
  const double value = gate / (1 + std::exp(-exponent)) * up;
  // Exp turns the error of an exponent into a relative error.
  const double of_exp = roundings * 0x1p-24 * std::abs(exponent) / (1 + std::exp(exponent));
  return {value, (relative + of_exp) * std::abs(value) + kTiny};
}

// Rows of gates, the first of which repeats values at the limits.
inline std::vector<float> Gates(const GatedActivationParams& p) {
  const float huge = p.activation == Activation::kClampedSwiglu ? 1e30f : 1.f;
  const float special[][2] = {{-300.f, 2.f},  {-200.f, 1.f}, {300.f, 2.f},  {0.f, 0.5f},
                              {-30.f, -30.f}, {-1.f, -7.f},  {6.9f, -7.1f}, {7.f, 7.f},
                              {7.1f, 7.1f},   {huge, -huge}, {kNan, 1.f},   {1.f, kNan}};
  std::vector<float> values = Normal((p.gated ? 2 : 1) * int64_t{p.num_rows} * p.dim, 5, 6.f);
  for (int i = 0; i < p.dim; ++i) {
    const auto& [gate, up] = special[i % std::ssize(special)];
    values[static_cast<size_t>(p.interleaved ? 2 * i : i)] = gate;
    if (p.gated) {
      values[static_cast<size_t>(p.interleaved ? 2 * i + 1 : p.dim + i)] = up;
    }
  }
  return values;
}

inline std::vector<Exact> ActivateAll(const GatedActivationParams& p,
                                      const std::vector<float>& gates,
                                      const std::vector<float>& scales,
                                      const std::vector<float>& others, double relative) {
  std::vector<Exact> exact;
  for (int row = 0; row < p.num_rows; ++row) {
    const float* values = gates.data() + int64_t{row} * (p.gated ? 2 : 1) * p.dim;
    const float scale = scales.empty() ? 1.f : scales[static_cast<size_t>(row)];
    for (int i = 0; i < p.dim; ++i) {
      const float gate = values[p.interleaved ? 2 * i : i] * scale;
      float up = p.gated ? values[p.interleaved ? 2 * i + 1 : p.dim + i] * scale : 1.f;
      up = others.empty() ? up : others[static_cast<size_t>(row * p.other_stride + i)];
      exact.push_back(Activate(p, gate, up, relative));
    }
  }
  return exact;
}

TEST_CASE_FIXTURE(DeviceSuite,
                  "activations with and without a gate" * doctest::test_suite("small")) {
  using enum Activation;
  for (const Activation activation : {kSilu, kGeluTanh, kClampedSwiglu, kGelu, kRelu2}) {
    for (const int dim : {1, 7, 64, 1001, 1028, 1030}) {
      for (const int form : {0, 1, 2, 3}) {  // gates then ups, interleaved, no gate, other array
        GatedActivationParams p = {.num_rows = dim == 1001 ? 21 : 3,
                                   .dim = dim,
                                   .activation = activation,
                                   .interleaved = form == 1,
                                   .gated = form < 2};
        if (form >= 2 && activation == kClampedSwiglu) {
          continue;
        }
        p.other_stride = form == 3 ? dim + dim % 3 : 0;
        const std::vector<float> gates = Gates(p);
        const std::vector<float> scales =
            dim % 2 == 0 && form < 3 ? std::vector{1.f, 0.3f, 0.8f} : std::vector<float>();
        const std::vector<float> others = Normal(p.num_rows * p.other_stride, 6, 2.f);
        CAPTURE(static_cast<int>(activation));
        CAPTURE(dim);
        CAPTURE(form);
        for (const size_t offset : {0, 1}) {
          const auto got = OnAll([&](Device& device) {
            const auto size = static_cast<size_t>(p.num_rows * dim);
            const DeviceArray<float> from(device, gates, offset);
            const DeviceArray<float> by(device, scales);
            const DeviceArray<float> with(device, others);
            const DeviceArray<float> to(device, std::vector<float>(size, 7.f), offset);
            p.gate_up = from.data();
            p.row_scales = by.data();
            p.other = with.data();
            p.out = to.data();
            device.GatedActivation(p);
            return to.Read();
          });
          CheckNear(got, ActivateAll(p, gates, scales, others, relative()));
        }
      }
    }
  }
}

// Returns the sampler's tokens for greedy requests, -1 for rows that it refuses.
inline std::vector<int32_t> GreedyTokens(std::vector<float> logits, int vocab_size) {
  std::vector<int32_t> ids;
  const SamplingRequest request;
  Sampler sampler(vocab_size);
  for (size_t first = 0; first < logits.size(); first += static_cast<size_t>(vocab_size)) {
    SampleInput input;
    input.logits = logits.data() + first;
    input.request = &request;
    try {
      ids.push_back(sampler.Sample(input).token);
    } catch (const std::runtime_error&) {
      ids.push_back(-1);
    }
  }
  return ids;
}

TEST_CASE_FIXTURE(DeviceSuite, "the argmax of each row is the sampler's greedy token") {
  // A GPU divides a row among its processors. It does not if there are many rows.
  constexpr int kShapes[][2] = {{9, 1},    {9, 5},     {9, 32},    {9, 1000},
                                {9, 8195}, {9, 20000}, {600, 4099}};
  for (const auto& [num_rows, vocab] : kShapes) {
    std::vector<float> logits = RandomVector(int64_t{num_rows} * vocab, 13);
    const auto row = [&](int i) { return logits.begin() + i * vocab; };
    std::fill_n(row(0), vocab, -kInf);
    std::fill_n(row(1), vocab, kNan);
    *(row(2) + vocab / 2) = kNan;
    *(row(3) + vocab - 1) = kInf;
    *(row(4) + vocab - 1) = *(row(4) + vocab / 2) = 50.f;
    std::fill_n(row(5), vocab, -0.f);
    *(row(5) + vocab - 1) = 0.f;  // a tie goes to the lowest id
    std::fill_n(row(6), vocab, -kInf);
    *(row(6) + vocab - 1) = -3e38f;
    CAPTURE(num_rows);
    CAPTURE(vocab);
    const std::vector<int32_t> want = GreedyTokens(logits, vocab);
    for (const int at_once : {num_rows, 1}) {
      ForAll([&](Device& device) {
        const DeviceArray<float> from(device, logits);
        const std::vector<int32_t> unwritten(want.size(), -7);
        const DeviceArray<int32_t> ids(device, unwritten);
        bool done = false;
        for (int first = 0; first < num_rows; first += at_once) {
          done = device.ArgMaxRows(
              {from.data() + int64_t{first} * vocab, ids.data() + first, at_once, vocab});
        }
        CHECK(ids.Read() == (done ? want : unwritten));
      });
    }
  }
}

TEST_CASE_FIXTURE(DeviceSuite, "ops without rows read and write nothing") {
  const Step step = {{0}, {0}};
  RopeConfig config;
  config.dim = 8;
  const RopeTable table(config);
  ForAll([&](Device& device) {
    const auto packed =
        device.PackMatrix(RandomMatrix(MatrixFormat::kF32, 2, 4, 1).source(), false);
    device.Norm({.dim = 4});
    device.Add({});
    device.SoftCap({});
    device.GatedActivation({.dim = 4});
    device.RouteExperts({.num_experts = 4, .top_k = 2});
    device.CombineExperts({.top_k = 2, .dim = 4});
    device.ArgMaxRows({.vocab_size = 4});
    step.Run(device, [&] {
      device.FillRope({.table = &table, .positions = step.positions.data()});
      device.Embed({.table = packed.get(), .ids = step.tokens.data()});
    });
    device.Synchronize();
  });
}

}  // namespace turbomind::testing
