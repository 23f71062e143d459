#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"

using namespace turbomind;

namespace {

constexpr double kRelative = 1e-6;  // a handful of FP32 roundings, exp within 2 ulp

std::vector<float> RandomVector(size_t size, float scale) {
  std::mt19937 random(17);
  std::normal_distribution<float> normal(0.f, scale);
  std::vector<float> x(size);
  for (float& value : x) {
    value = normal(random);
  }
  return x;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_CASE("RMSNorm agrees with double precision and has the same bits on every instruction set") {
  for (int dim : {1, 63, 64, 576, 2051}) {
    constexpr int kRows = 41;
    const auto size = static_cast<size_t>(dim);
    const std::vector<float> x = RandomVector(kRows * size, 3.f);
    const std::vector<float> weight = RandomVector(size, 1.f);
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      for (int threads : {1, 3}) {
        std::vector<float> out = x;  // in place
        MakeCpuDevice(threads, isa)
            ->Norm({out.data(), weight.data(), out.data(), kRows, dim, 1e-5f});
        if (first.empty()) {
          first = out;
        }
        REQUIRE(SameBits(first, out));
      }
    }
    for (size_t r = 0; r < kRows; ++r) {
      double squares = 0;
      for (size_t i = 0; i < size; ++i) {
        squares += static_cast<double>(x[r * size + i]) * x[r * size + i];
      }
      const double scale = 1 / std::sqrt(squares / dim + 1e-5f);
      for (size_t i = 0; i < size; ++i) {
        const double want = x[r * size + i] * scale * weight[i];
        REQUIRE(std::abs(first[r * size + i] - want) <= kRelative * std::abs(want));
      }
    }
  }
}

TEST_CASE("gated activations match double precision with the same bits on every instruction set") {
  constexpr int kRows = 21;
  constexpr int kDim = 1001;
  std::vector<float> gate_up = RandomVector(kRows * 2 * kDim, 6.f);
  gate_up[0] = -200.f;
  gate_up[1] = 200.f;
  gate_up[2] = 0.f;
  for (Activation activation : {Activation::kSilu, Activation::kGeluTanh}) {
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      std::vector<float> out(kRows * kDim);
      MakeCpuDevice(2, isa)->GatedActivation({gate_up.data(), out.data(), kRows, kDim, activation});
      if (first.empty()) {
        first = out;
      }
      REQUIRE(SameBits(first, out));
    }
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t i = 0; i < kDim; ++i) {
        const double g = gate_up[r * 2 * kDim + i];
        const double up = gate_up[r * 2 * kDim + kDim + i];
        const double u = std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g);
        // 0.5 (1 + tanh u), written so that a large negative u loses no digits.
        const double act =
            activation == Activation::kSilu ? g / (1 + std::exp(-g)) : g / (1 + std::exp(-2 * u));
        // An FP32 exponent x is off by |x| 2^-24, which exp turns into a relative error.
        const double exponent = activation == Activation::kSilu ? std::abs(g) : 2 * std::abs(u);
        const double bound = (kRelative + 4 * exponent * 0x1p-24) * std::abs(act * up) + 1e-30;
        REQUIRE(std::abs(first[r * kDim + i] - act * up) <= bound);
      }
    }
  }
}

TEST_CASE("clamped SwiGLU applies its limits and keeps NaN") {
  constexpr float kLimit = 7.f;
  constexpr float kGate[] = {-30.f, -1.f, 0.f, 6.9f, 7.f, 7.1f, 1e30f, NAN, 1.f};
  constexpr float kUp[] = {-30.f, -7.f, 0.5f, -7.1f, 7.f, 7.1f, -1e30f, 1.f, NAN};
  std::vector<float> gate;
  std::vector<float> up;
  for (int times = 0; times < 8; ++times) {  // 72 elements: whole vectors and a remainder of 8
    gate.insert(gate.end(), std::begin(kGate), std::end(kGate));
    up.insert(up.end(), std::begin(kUp), std::end(kUp));
  }
  const size_t dim = gate.size();
  for (const bool interleaved : {false, true}) {
    std::vector<float> gate_up(2 * dim);
    for (size_t i = 0; i < dim; ++i) {
      gate_up[interleaved ? 2 * i : i] = gate[i];
      gate_up[interleaved ? 2 * i + 1 : dim + i] = up[i];
    }
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      std::vector<float> out(dim);
      MakeCpuDevice(1, isa)->GatedActivation({.gate_up = gate_up.data(),
                                              .out = out.data(),
                                              .num_rows = 1,
                                              .dim = static_cast<int>(dim),
                                              .activation = Activation::kClampedSwiglu,
                                              .interleaved = interleaved,
                                              .limit = kLimit});
      if (first.empty()) {
        first = out;
      }
      CHECK(SameBits(first, out));
    }
    for (size_t i = 0; i < dim; ++i) {
      if (std::isnan(gate[i]) || std::isnan(up[i])) {
        CHECK(std::isnan(first[i]));
        continue;
      }
      const double g = std::min(gate[i], kLimit);
      const double u = std::clamp(up[i], -kLimit, kLimit);
      const double want = g / (1 + std::exp(-1.702 * g)) * (u + 1);
      CHECK(std::abs(first[i] - want) <= 1e-5 * std::abs(want) + 1e-30);
    }
  }
}

TEST_CASE("LayerNorm with a bias agrees with double precision on rows at a stride") {
  for (const int dim : {1, 63, 64, 576, 2051}) {
    constexpr int kRows = 7;
    const auto size = static_cast<size_t>(dim);
    const size_t stride = size + 5;
    std::vector<float> x = RandomVector(kRows * stride, 3.f);
    for (float& value : x) {
      value += 10.f;  // a mean far from 0
    }
    const std::vector<float> weight = RandomVector(size, 1.f);
    const std::vector<float> bias = RandomVector(size, 2.f);
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      std::vector<float> out = x;  // in place
      MakeCpuDevice(3, isa)->Norm({.x = out.data(),
                                   .weight = weight.data(),
                                   .out = out.data(),
                                   .num_rows = kRows,
                                   .dim = dim,
                                   .eps = 1e-5f,
                                   .stride = static_cast<int64_t>(stride),
                                   .bias = bias.data(),
                                   .centered = true});
      if (first.empty()) {
        first = out;
      }
      REQUIRE(SameBits(first, out));
    }
    for (size_t r = 0; r < kRows; ++r) {
      const float* row = x.data() + r * stride;
      double mean = 0;
      double squares = 0;
      for (size_t i = 0; i < size; ++i) {
        mean += row[i] / static_cast<double>(dim);
      }
      for (size_t i = 0; i < size; ++i) {
        squares += (row[i] - mean) * (row[i] - mean);
      }
      const double scale = 1 / std::sqrt(squares / dim + 1e-5f);
      for (size_t i = 0; i < stride; ++i) {
        const float got = first[r * stride + i];
        if (i >= size) {
          REQUIRE(got == row[i]);  // between the rows
          continue;
        }
        // The mean of FP32 values of about 10 is off by 1e-6.
        const double want = (row[i] - mean) * scale * weight[i] + bias[i];
        REQUIRE(std::abs(got - want) <= 4e-6 * (1 + scale * std::abs(weight[i]) + std::abs(want)));
      }
    }
  }
}

TEST_CASE("GELU, squared ReLU and feed-forwards without a gate match double precision") {
  constexpr int kRows = 3;
  constexpr int kDim = 1001;
  for (const Activation activation : {Activation::kGelu, Activation::kRelu2, Activation::kSilu}) {
    for (const bool gated : {true, false}) {
      const size_t width = (gated ? 2 : 1) * size_t{kDim};
      const std::vector<float> in = RandomVector(kRows * width, 3.f);
      std::vector<float> first;
      for (const std::string& isa : AvailableCpuIsas()) {
        std::vector<float> out(kRows * kDim);
        MakeCpuDevice(2, isa)->GatedActivation({.gate_up = in.data(),
                                                .out = out.data(),
                                                .num_rows = kRows,
                                                .dim = kDim,
                                                .activation = activation,
                                                .gated = gated});
        if (first.empty()) {
          first = out;
        }
        REQUIRE(SameBits(first, out));
      }
      for (size_t r = 0; r < kRows; ++r) {
        for (size_t i = 0; i < kDim; ++i) {
          const double x = in[r * width + i];
          const double up = gated ? in[r * width + kDim + i] : 1;
          const double relu = std::max(x, 0.0);
          const double act = activation == Activation::kGelu ? 0.5 * x * (1 + std::erf(x / M_SQRT2))
                             : activation == Activation::kRelu2 ? relu * relu
                                                                : x / (1 + std::exp(-x));
          // Erf has an absolute error of 2e-7.
          const double bound = (2e-6 * std::abs(act) + 3e-7 * std::abs(x)) * std::abs(up);
          REQUIRE(std::abs(first[r * kDim + i] - act * up) <= bound);
        }
      }
    }
  }
}

TEST_CASE("soft caps and scaled additions match double precision") {
  constexpr size_t kCount = 10007;
  const std::vector<float> x = RandomVector(kCount, 40.f);
  for (const float cap : {0.f, 30.f}) {
    std::vector<float> first;
    for (const std::string& isa : AvailableCpuIsas()) {
      std::vector<float> out = x;
      MakeCpuDevice(2, isa)->SoftCap({out.data(), kCount, 0.5f, cap});
      if (first.empty()) {
        first = out;
      }
      REQUIRE(SameBits(first, out));
    }
    for (size_t i = 0; i < kCount; ++i) {
      const double scaled = 0.5 * x[i];
      const double want = cap > 0 ? cap * std::tanh(scaled / cap) : scaled;
      REQUIRE(std::abs(first[i] - want) <= 1e-5);
    }
  }
  std::vector<float> sum(kCount, 1.f);
  MakeCpuDevice(2)->Add({x.data(), sum.data(), kCount, 0.25f});
  for (size_t i = 0; i < kCount; ++i) {
    REQUIRE(sum[i] == 1.f + 0.25f * x[i]);
  }
}
