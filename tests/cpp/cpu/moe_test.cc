#include "turbomind/ops/moe.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/moe_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

namespace turbomind::moe {
namespace {

// FP32 sums of at most 96 products each, three in a row, of values around 1. Measured: 1.7e-6.
constexpr double kAbsolute = 5e-6;
// Five products in a row, of which the last adds 32 values of about 3. Measured: 5.8e-6.
constexpr double kLatentAbsolute = 1.5e-5;

TEST_CASE("experts agree with double precision") {
  const auto device = MakeCpuDevice(2);
  constexpr int kTokens = 29;
  const std::vector<float> x = Random(91, kTokens * kHidden, 1.5f);
  const std::vector<float> residual = Random(92, x.size(), 1.f);
  for (const Shape& shape : AllShapes()) {
    CAPTURE(shape.top_k);
    CAPTURE(shape.normalize);
    CAPTURE(shape.interleaved);
    CAPTURE(shape.has_shared);
    CAPTURE(shape.is_latent);
    TestLayer layer(shape, *device, kTokens);
    std::vector<float> out = residual;
    layer.Run(x, out);
    double max_error = 0;
    for (size_t t = 0; t < kTokens; ++t) {
      const std::vector<double> want = layer.Reference(x.data() + t * kHidden);
      for (size_t i = 0; i < kHidden; ++i) {
        const size_t at = t * kHidden + i;
        max_error = std::max(max_error, std::abs(out[at] - residual[at] - want[i]));
      }
    }
    CHECK(max_error < (shape.is_latent ? kLatentAbsolute : kAbsolute));
  }
}

TEST_CASE("a NaN or infinite token affects only its own row") {
  const auto device = MakeCpuDevice(2);
  TestLayer layer({.has_shared = true}, *device, 5);
  std::vector<float> x = Random(3, 5 * kHidden, 1.f);
  std::vector<float> clean(x.size());
  layer.Run(x, clean);
  for (const float bad : {NAN, std::numeric_limits<float>::infinity()}) {
    x[2 * kHidden + 7] = bad;
    std::vector<float> out(x.size());
    layer.Run(x, out);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / kHidden == 2) {
        CHECK(!std::isfinite(out[i]));
      } else {
        CHECK(out[i] == clean[i]);
      }
    }
  }
}

TEST_CASE("a token has the same bits in every batch, chunk, thread count and instruction set") {
  constexpr size_t kTokens = 64;
  const std::vector<float> x = Random(17, kTokens * kHidden, 1.5f);
  for (const bool quantized : {false, true}) {
    std::vector<float> want;
    for (const std::string& isa : AvailableCpuIsas()) {
      for (const int threads : {1, 2}) {
        const auto device = MakeCpuDevice(threads, isa);
        TestLayer layer({.has_shared = true}, *device, kTokens, quantized);
        for (const size_t chunk : {kTokens, size_t{1}, size_t{13}}) {
          std::vector<float> out(x.size());
          for (size_t first = 0; first < kTokens; first += chunk) {
            const size_t tokens = std::min(chunk, kTokens - first);
            const auto begin = static_cast<std::ptrdiff_t>(first * kHidden);
            const auto end = static_cast<std::ptrdiff_t>((first + tokens) * kHidden);
            std::vector<float> piece(tokens * kHidden);
            layer.Run({x.begin() + begin, x.begin() + end}, piece);
            std::ranges::copy(piece, out.begin() + begin);
          }
          if (want.empty()) {
            want = out;
          }
          REQUIRE(SameBits(want, out));
        }
      }
    }
  }
}

TEST_CASE("the layer is correct if all tokens select the same experts and other experts get none") {
  const auto device = MakeCpuDevice(2);
  constexpr int kTokens = 40;
  TestLayer layer({.top_k = 2}, *device, kTokens);
  std::vector<float> logits(kExperts, -4.f);
  logits[6] = 2.f;
  logits[1] = 1.f;
  SetLogits(layer.router(), *device, logits);
  layer.layer().router = layer.router().view();
  const std::vector<float> x = Random(5, kTokens * kHidden, 1.f);
  std::vector<float> out(x.size());
  layer.Run(x, out);
  for (size_t t = 0; t < kTokens; ++t) {
    CHECK(layer.scratch().ids[2 * t] == 1);
    CHECK(layer.scratch().ids[2 * t + 1] == 6);
    const std::vector<double> want = layer.Reference(x.data() + t * kHidden);
    for (size_t i = 0; i < kHidden; ++i) {
      CHECK(std::abs(out[t * kHidden + i] - want[i]) < kAbsolute);
    }
  }
}

TEST_CASE("one token reads only its own experts, and many tokens read each expert once") {
  constexpr int kTokens = 64;
  CountingDevice device(MakeCpuDevice(1));
  TestLayer layer({.top_k = 3}, device, kTokens);
  const std::vector<float> x = Random(6, kTokens * kHidden, 1.5f);
  for (const int tokens : {1, kTokens}) {
    device.reads.clear();
    device.num_rows = 0;
    const std::vector<float> some(x.begin(), x.begin() + tokens * kHidden);
    std::vector<float> out(some.size());
    layer.Run(some, out);
    std::vector<int32_t> experts(layer.scratch().ids, layer.scratch().ids + 3 * tokens);
    std::ranges::sort(experts);
    const auto repeated = std::ranges::unique(experts);
    experts.erase(repeated.begin(), repeated.end());
    CHECK(experts.size() == (tokens == 1 ? 3 : kExperts));
    CHECK(device.num_rows == 3 * 3 * tokens);  // gate, up and down; three experts per token
    REQUIRE(device.reads.size() == 3 * experts.size());
    for (size_t i = 0; i < experts.size(); ++i) {
      const auto expert = static_cast<size_t>(experts[i]);
      CHECK(device.reads[i] == layer.layer().gate[expert].weight);
      CHECK(device.reads[experts.size() + i] == layer.layer().up[expert].weight);
      CHECK(device.reads[2 * experts.size() + i] == layer.layer().down[expert].weight);
    }
  }
}

TEST_CASE("a grouped layer returns the same bits as its groups one by one") {
  constexpr size_t kRows = 23;
  constexpr int64_t kStride = 2 * kInner + 5;
  const std::vector<float> x = Random(8, 9 * kHidden, 1.f);
  const auto device = MakeCpuDevice(2);
  std::vector<Matrix> weights;
  for (uint32_t i = 0; i < 3; ++i) {
    Matrix matrix{kInner, kHidden, Random(20 + i, kInner * kHidden, 0.3f), {}, {}};
    matrix.packed = device->PackMatrix(
        {MatrixFormat::kF32, matrix.values.data(), matrix.rows, matrix.cols}, false);
    if (i != 1) {
      matrix.bias = Random(40 + i, kInner, 1.f);
    }
    weights.push_back(std::move(matrix));
  }
  std::vector<int32_t> x_rows(kRows);
  for (size_t i = 0; i < kRows; ++i) {
    x_rows[i] = static_cast<int32_t>((i * 5) % 9);
  }
  const LinearPart experts[] = {{weights[0].packed.get(), weights[0].view().bias},
                                {weights[1].packed.get(), weights[1].view().bias},
                                {weights[2].packed.get(), weights[2].view().bias}};
  const int32_t offsets[] = {0, 16, 17, kRows};
  std::vector<float> got(kRows * kStride, -1.f);
  std::vector<float> want = got;
  device->GroupedLinear({.x = x.data(),
                         .x_stride = kHidden,
                         .x_rows = x_rows.data(),
                         .y = got.data(),
                         .y_stride = kStride,
                         .experts = experts,
                         .num_experts = 3,
                         .offsets = offsets,
                         .num_rows = kRows});
  for (int expert = 0; expert < 3; ++expert) {
    for (int row = offsets[expert]; row < offsets[expert + 1]; ++row) {
      device->Linear({.x = x.data() + x_rows[static_cast<size_t>(row)] * kHidden,
                      .x_stride = kHidden,
                      .parts = &experts[expert],
                      .num_parts = 1,
                      .y = want.data() + row * kStride,
                      .y_stride = kStride,
                      .num_rows = 1});
    }
  }
  CHECK(SameBits(got, want));
}

TEST_CASE("inconsistent arguments raise InternalError") {
  const auto device = MakeCpuDevice(1);
  const std::vector<float> x(4 * kHidden, 0.5f);
  std::vector<float> out(x.size());
  const auto broken = [&](auto change) {
    TestLayer layer({.has_shared = true}, *device, 4);
    change(layer.layer());
    CHECK_THROWS_AS(layer.Run(x, out), InternalError);
  };
  broken([](MoeLayer& layer) { layer.top_k = kExperts + 1; });
  broken([](MoeLayer& layer) { layer.top_k = 0; });
  broken([](MoeLayer& layer) { layer.num_experts = kExperts + 1; });
  broken([](MoeLayer& layer) { layer.intermediate_size = kInner + 1; });
  broken([](MoeLayer& layer) { layer.down.pop_back(); });
  broken([](MoeLayer& layer) { layer.up[3].weight = nullptr; });
  broken([](MoeLayer& layer) { layer.gate[3] = layer.down[3]; });
  broken([](MoeLayer& layer) { layer.shared_down = {}; });
  broken([](MoeLayer& layer) { layer.shared_router = layer.router; });
  broken([](MoeLayer& layer) { layer.gate.clear(); });  // the shared expert has a gate
  broken([](MoeLayer& layer) { layer.gate.pop_back(); });
  broken([](MoeLayer& layer) { layer.latent_size = kLatent; });  // the experts have none
  TestLayer latent({.is_latent = true}, *device, 4);
  latent.layer().latent_up = latent.layer().latent_down;
  CHECK_THROWS_AS(latent.Run(x, out), InternalError);
  TestLayer narrow({}, *device, 3);
  CHECK_THROWS_AS(narrow.Run(x, out), InternalError);
}

}  // namespace
}  // namespace turbomind::moe
