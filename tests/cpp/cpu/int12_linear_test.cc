// Activations of 12 bits (isa/linear/int12_activations.h). linear_test.cc has the tests of the
// arithmetic.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormats[] = {MatrixFormat::kQ4_0, MatrixFormat::kQ4_1, MatrixFormat::kQ4_K};
constexpr int kPairs = 16;  // of columns k and 16 + k of a block

bool CanRun() {
  const std::vector<std::string> isas = AvailableCpuIsas();
  if (std::find(isas.begin(), isas.end(), "avx512") != isas.end()) {
    return true;
  }
  MESSAGE("skipped: this machine has no AVX-512");
  return false;
}

// One row of one step of a panel.
struct Int12Row {
  int8_t coarse[32] = {};
  int8_t residuals[kPairs] = {};
  float scale = 0;
  uint32_t offset = 0;  // the bits
};

template <class V>
V ReadAt(const uint8_t* p) {
  V value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// Packs rows of 32 columns as one panel.
std::vector<Int12Row> PackRows(MatrixFormat format, const std::vector<float>& x) {
  CpuDenseKernels kernels;
  avx512::FillInt12Kernels(kernels);
  const auto rows = static_cast<int>(x.size()) / 32;
  std::vector<uint8_t> panel(
      static_cast<size_t>(kernels.coarse.plan_panels(format, 32, rows).bytes));
  PackPanelArgs args;
  args.format = format;
  args.x = x.data();
  args.x_stride = 32;
  args.num_rows = rows;
  args.all_rows = rows;
  args.cols = 32;
  args.panel = panel.data();
  kernels.coarse.pack_panel(args);
  std::vector<Int12Row> packed(static_cast<size_t>(rows));
  for (int r = 0; r < rows; ++r) {
    Int12Row& row = packed[static_cast<size_t>(r)];
    const uint8_t* codes = panel.data() + kInt12RowBytes * r;
    const uint8_t* scales = panel.data() + kInt12RowBytes * rows;
    std::memcpy(row.coarse, codes, sizeof(row.coarse));
    std::memcpy(row.residuals, codes + 32, sizeof(row.residuals));
    row.scale = ReadAt<float>(scales + 4 * r);
    row.offset = ReadAt<uint32_t>(scales + 4 * (rows + r));
  }
  return packed;
}

// Checks that a row holds these codes, and that the residuals times bytes of two weights give the
// exact sum of the products.
void CheckCodes(const Int12Row& row, const Int12Codes& codes, std::mt19937& random) {
  int64_t want = 0;
  int64_t coarse = 0;
  int64_t rest = 0;
  for (int k = 0; k < kPairs; ++k) {
    const auto low = static_cast<int>(random() % 16);
    const auto high = static_cast<int>(random() % 16);
    const int v = row.residuals[k];
    REQUIRE(std::abs(row.coarse[k]) <= 127);
    REQUIRE(std::abs(row.coarse[kPairs + k]) <= 127);
    REQUIRE(256 * row.coarse[k] + v == codes.of[k]);
    REQUIRE(256 * row.coarse[kPairs + k] + 16 * v == codes.of[kPairs + k]);
    want += low * codes.of[k] + high * codes.of[kPairs + k];
    coarse += low * row.coarse[k] + high * row.coarse[kPairs + k];
    rest += v * (low + 16 * high);
  }
  REQUIRE(256 * coarse + rest == want);
}

// Checks the scale, the codes and the offset of each row, and that each code is within half a step
// of its activation.
void CheckRows(MatrixFormat format, const std::vector<float>& x, std::mt19937& random) {
  const std::vector<Int12Row> packed = PackRows(format, x);
  for (size_t r = 0; r < packed.size(); ++r) {
    const float* block = x.data() + 32 * r;
    const Int12Codes codes = RoundToInt12Codes(block);
    CheckCodes(packed[r], codes, random);
    if (std::isnan(codes.scale)) {
      REQUIRE(std::isnan(packed[r].scale));
      continue;
    }
    REQUIRE(packed[r].scale == codes.scale);
    for (int i = 0; i < 32 && codes.scale > 0; ++i) {
      // The scale, its inverse and the product are rounded to FP32.
      REQUIRE(std::abs(block[i] / double{codes.scale} - codes.of[i]) <= 8 + 0x1p-7);
    }
    if (HasMinimum(format)) {
      const float product = codes.scale * static_cast<float>(codes.sum());
      REQUIRE(std::memcmp(&packed[r].offset, &product, sizeof(product)) == 0);
    } else {
      REQUIRE(static_cast<int32_t>(packed[r].offset) == -8 * static_cast<int>(codes.sum()));
    }
  }
}

std::vector<float> Filled(const std::function<float(int)>& value) {
  std::vector<float> block(32);
  for (int i = 0; i < 32; ++i) {
    block[static_cast<size_t>(i)] = value(i);
  }
  return block;
}

// Returns blocks that overflow or lose codes if the rule is wrong.
std::vector<std::vector<float>> HostileBlocks() {
  std::vector<std::vector<float>> blocks;
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const int at : {0, 15, 16, 31}) {
      blocks.push_back(Filled([&](int i) { return i == at ? bad : static_cast<float>(i); }));
    }
  }
  for (const float value :
       {0.f, -0.f, 1e-44f, 1e-38f, 9e-34f, 1.1e-33f, 1.f, -1.f, 3e38f, -3e38f}) {
    blocks.push_back(Filled([&](int) { return value; }));
    blocks.push_back(Filled([&](int i) { return i == 7 ? value : 0.f; }));
    blocks.push_back(Filled([&](int i) { return i == 23 ? value : 1e-40f; }));
    blocks.push_back(Filled([&](int i) { return i % 2 == 0 ? value : -value; }));
  }
  // The scale is 1, so that every residual meets the largest codes of both signs.
  for (int units = -136; units <= 136; ++units) {
    for (const float largest : {119.f * 256, -119.f * 256}) {
      blocks.push_back(
          Filled([&](int i) { return i < kPairs ? static_cast<float>(units + i) : largest; }));
      blocks.push_back(
          Filled([&](int i) { return i < kPairs ? largest : static_cast<float>(16 * units + i); }));
    }
  }
  return blocks;
}

}  // namespace

TEST_CASE("codes of 12 bits and products with packed weights are exact in random blocks") {
  if (!CanRun()) {
    return;
  }
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  constexpr int kBlocks = 20000;
  for (int done = 0; done < kBlocks; done += kPanelRows) {
    std::vector<float> x(32 * kPanelRows);
    for (float& value : x) {
      const bool outlier = random() % 16 == 0;
      value = normal(random) * (outlier ? 50.f : 1.f);
    }
    CheckRows(done % 24 == 0 ? MatrixFormat::kQ4_0 : MatrixFormat::kQ4_1, x, random);
  }
}

TEST_CASE("codes of 12 bits and products with packed weights are exact in hostile blocks") {
  if (!CanRun()) {
    return;
  }
  std::mt19937 random(2);
  for (const std::vector<float>& block : HostileBlocks()) {
    for (MatrixFormat format : kFormats) {
      CheckRows(format, block, random);
    }
  }
}

TEST_CASE("only Q4 on a device with AVX-512 that is not deterministic has activations of 12 bits") {
  const auto reference = MakeCpuDevice(1, "scalar");
  const auto product = [](Device& device, const Matrix& m, const std::vector<float>& x) {
    return RunLinear(device, *device.PackMatrix(m.source(), false), x, {}, {13});
  };
  for (const std::string& isa : AvailableCpuIsas()) {
    if (isa == "amx") {
      continue;  // it has kernels of its own for devices that are not deterministic
    }
    const auto exact = MakeCpuDevice(2, isa);
    const auto fast = MakeCpuDevice(2, isa, {.deterministic = false});
    const auto int8 = MakeCpuDevice(2, isa, {.int8_activations = true});
    const auto fast_int8 =
        MakeCpuDevice(2, isa, {.int8_activations = true, .deterministic = false});
    for (MatrixFormat format : kAllFormats) {
      const bool packed = std::ranges::find(kFormats, format) != std::end(kFormats);
      CAPTURE(isa);
      CAPTURE(static_cast<int>(format));
      const Matrix m = RandomMatrix(format, 33, 256, 1);
      const std::vector<float> x = RandomVector(13 * m.cols, 2);
      const auto want = product(*reference, m, x);
      CHECK(SameBits(product(*exact, m, x), want));
      CHECK(SameBits(product(*fast, m, x), want) == !(packed && isa == "avx512"));
      CHECK(SameBits(product(*fast_int8, m, x), product(*int8, m, x)));
    }
  }
}

TEST_CASE("12-bit activations are rounded 15 times as finely as 8-bit ones") {
  if (!CanRun()) {
    return;
  }
  constexpr int kRows = 100;
  // Steps of amax / 127 and of 16 amax / (119 * 256).
  constexpr double kExpected = 119.0 * 256 / 16 / 127;
  const auto exact = MakeCpuDevice(1, "avx512");
  const auto int8 = MakeCpuDevice(1, "avx512", {.int8_activations = true});
  const auto packed = MakeCpuDevice(1, "avx512", {.deterministic = false});
  const Matrix m = RandomMatrix(MatrixFormat::kQ4_0, 100, 512, 71);
  const std::vector<float> x = RandomVector(kRows * m.cols, 72);
  const auto error = [&](Device& device) {
    const auto y = RunLinear(device, *device.PackMatrix(m.source(), false), x, {}, {kRows});
    double squares = 0;
    for (int r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < m.rows; ++o) {
        double want = 0;
        for (int64_t c = 0; c < m.cols; ++c) {
          want += m.values[static_cast<size_t>(o * m.cols + c)] *
                  x[static_cast<size_t>(r * m.cols + c)];
        }
        const double off = y[static_cast<size_t>(r * m.rows + o)] - want;
        squares += off * off;
      }
    }
    return std::sqrt(squares);
  };
  const double of_packed = error(*packed);
  // 51,200 random roundings of each kind give the ratio to within a few percent.
  CHECK(error(*int8) / of_packed == doctest::Approx(kExpected).epsilon(0.05));
  CHECK(error(*exact) < of_packed / 8);
}
