#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/dense_kernels.h"
#include "turbomind/backend/cpu/packed_layout.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormats[] = {MatrixFormat::kQ4_0, MatrixFormat::kQ4_1, MatrixFormat::kQ4_K};
// Formats whose activations keep their own form.
constexpr MatrixFormat kOthers[] = {
    MatrixFormat::kF32,  MatrixFormat::kBF16,  MatrixFormat::kQ8_0,      MatrixFormat::kQ5_K,
    MatrixFormat::kQ6_K, MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split};
constexpr int kPairs = 16;  // of columns k and 16 + k of a block
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

bool CanRun() {
  const std::vector<std::string> isas = AvailableCpuIsas();
  if (std::find(isas.begin(), isas.end(), "avx512") != isas.end()) {
    return true;
  }
  MESSAGE("skipped: this machine has no AVX-512");
  return false;
}

std::unique_ptr<Device> MakeInt12Device(int threads) {
  return MakeCpuDevice(threads, "avx512", {.deterministic = false});
}

// A block of 32 activations: codes of at most 119 * 256 + 8 times a scale.
struct Codes {
  float scale = 0;
  int of[32] = {};

  double sum() const {
    double sum = 0;
    for (int code : of) {
      sum += code;
    }
    return sum;
  }
};

// Rounds a block as the kernels do. The code of column 16 + k is a multiple of 16. That of column k
// is a multiple of 16 plus the last digit of the former divided by 16.
Codes RoundBlock(const float* x) {
  Codes codes;
  float amax = 0;
  for (int i = 0; i < 32; ++i) {
    if (!std::isfinite(x[i])) {
      codes.scale = kNan;
      return codes;
    }
    amax = std::max(amax, std::abs(x[i]));
  }
  if (amax < 1e-33f) {
    return codes;
  }
  codes.scale = amax / (119.f * 256.f);
  const float inverse = 119.f * 16.f / amax;
  for (int k = 0; k < kPairs; ++k) {
    const auto second = static_cast<int>(std::nearbyint(x[kPairs + k] * inverse));
    const int digit = second & 15;
    const float steps = x[k] * inverse - static_cast<float>(digit) / 16.f;
    codes.of[k] = 16 * static_cast<int>(std::nearbyint(steps)) + digit;
    codes.of[kPairs + k] = 16 * second;
  }
  return codes;
}

// Returns the activations as the kernels round them.
std::vector<float> RoundedTo12Bits(const Matrix& m, const std::vector<float>& x) {
  std::vector<float> rounded = x;
  const int64_t stride = m.cols + kPad;
  for (int64_t first = 0; first + m.cols <= static_cast<int64_t>(x.size()); first += stride) {
    for (int64_t c = first; c < first + m.cols; c += 32) {
      const Codes codes = RoundBlock(x.data() + c);
      for (int i = 0; i < 32; ++i) {
        rounded[static_cast<size_t>(c + i)] = static_cast<float>(codes.of[i]) * codes.scale;
      }
    }
  }
  return rounded;
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
  avx512::FillDenseKernels(kernels);
  avx512::FillInt12Kernels(kernels);
  const auto rows = static_cast<int>(x.size()) / 32;
  std::vector<uint8_t> panel(static_cast<size_t>(kernels.plan_panels(format, 32, rows).bytes));
  PackPanelArgs args;
  args.format = format;
  args.x = x.data();
  args.x_stride = 32;
  args.num_rows = rows;
  args.all_rows = rows;
  args.cols = 32;
  args.panel = panel.data();
  kernels.pack_panel(args);
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
void CheckCodes(const Int12Row& row, const Codes& codes, std::mt19937& random) {
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
    const Codes codes = RoundBlock(block);
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

TEST_CASE("products of 12-bit activations agree with a double reference for every shape") {
  if (!CanRun()) {
    return;
  }
  const auto device = MakeInt12Device(2);
  for (MatrixFormat format : kFormats) {
    for (int64_t rows : {1, 16, 37, 130}) {
      for (int64_t blocks : {1, 3}) {
        const int64_t cols = blocks * SourceBlockCols(format);
        const Matrix m = RandomMatrix(format, rows, cols, static_cast<uint32_t>(rows + cols));
        const std::vector<float> x = RandomVector(25 * (cols + kPad), 7);
        const std::vector<float> rounded = RoundedTo12Bits(m, x);
        const std::vector<float> bias = RandomVector(rows, 8);
        const auto weight = device->PackMatrix(m.source(), false);
        CAPTURE(static_cast<int>(format));
        CAPTURE(rows);
        for (int num_rows = 1; num_rows <= 25; ++num_rows) {
          CAPTURE(num_rows);
          const Call call = {num_rows, num_rows % 2 == 0, num_rows % 3 == 0};
          const auto y = RunLinear(*device, *weight, x, bias, call);
          CheckAgainstDouble(m, rounded, bias, y, call, true);
        }
      }
    }
  }
}

TEST_CASE("a row of 12-bit activations has the same bits in every panel and thread") {
  if (!CanRun()) {
    return;
  }
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 203, 512, 3);
    const std::vector<float> x = RandomVector(70 * (m.cols + kPad), 4);
    const std::vector<float> bias = RandomVector(m.rows, 5);
    const auto reference = MakeInt12Device(1);
    const auto want =
        RunLinear(*reference, *reference->PackMatrix(m.source(), false), x, bias, {70, true, true});
    for (int threads : {1, 5}) {
      const auto device = MakeInt12Device(threads);
      const auto weight = device->PackMatrix(m.source(), false);
      for (int num_rows = 1; num_rows <= 70; ++num_rows) {
        CAPTURE(threads);
        CAPTURE(static_cast<int>(format));
        CAPTURE(num_rows);
        const auto y = RunLinear(*device, *weight, x, bias, {num_rows, true, true});
        const auto length = static_cast<int64_t>(y.size());
        REQUIRE(SameBits(y, {want.begin(), want.begin() + length}));
      }
    }
  }
}

TEST_CASE("a row of 12-bit activations has the same bits alone and in several row blocks") {
  if (!CanRun()) {
    return;
  }
  const auto device = MakeInt12Device(2);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 40, 2048, 11);
    const std::vector<float> x = RandomVector(500 * (m.cols + kPad), 12);
    const auto weight = device->PackMatrix(m.source(), false);
    const auto all = RunLinear(*device, *weight, x, {}, {500});
    for (int row : {0, 11, 12, 133, 499}) {
      const std::vector<float> one(x.begin() + row * (m.cols + kPad),
                                   x.begin() + (row + 1) * (m.cols + kPad));
      const auto begin = all.begin() + row * (m.rows + kPad);
      CHECK(SameBits(RunLinear(*device, *weight, one, {}, {1}), {begin, begin + m.rows + kPad}));
    }
  }
}

TEST_CASE("rows of 12-bit activations grouped by weight have the same bits as alone") {
  if (!CanRun()) {
    return;
  }
  const auto device = MakeInt12Device(2);
  for (MatrixFormat format : kFormats) {
    CAPTURE(static_cast<int>(format));
    CheckGroupedRows(*device, format);
  }
}

TEST_CASE("parts of formats with 12-bit activations and of others share a linear layer") {
  if (!CanRun()) {
    return;
  }
  std::vector<Matrix> matrices;
  for (MatrixFormat format : {MatrixFormat::kQ4_0, MatrixFormat::kQ8_0, MatrixFormat::kQ4_K,
                              MatrixFormat::kQ6_K, MatrixFormat::kQ4_1, MatrixFormat::kMxfp4}) {
    matrices.push_back(RandomMatrix(format, 33, 256, static_cast<uint32_t>(matrices.size())));
  }
  CheckPartsShareALayer(*MakeInt12Device(2), matrices);
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
    for (const bool packed : {true, false}) {
      const auto* begin = packed ? std::begin(kFormats) : std::begin(kOthers);
      const auto* end = packed ? std::end(kFormats) : std::end(kOthers);
      for (const auto* format = begin; format < end; ++format) {
        CAPTURE(isa);
        CAPTURE(static_cast<int>(*format));
        const Matrix m = RandomMatrix(*format, 33, 256, 1);
        const std::vector<float> x = RandomVector(13 * (m.cols + kPad), 2);
        const auto want = product(*reference, m, x);
        CHECK(SameBits(product(*exact, m, x), want));
        CHECK(SameBits(product(*fast, m, x), want) == !(packed && isa == "avx512"));
        CHECK(SameBits(product(*fast_int8, m, x), product(*int8, m, x)));
      }
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
  const auto packed = MakeInt12Device(1);
  const Matrix m = RandomMatrix(MatrixFormat::kQ4_0, 100, 512, 71);
  const std::vector<float> x = RandomVector(kRows * (m.cols + kPad), 72);
  const auto error = [&](Device& device) {
    const auto y = RunLinear(device, *device.PackMatrix(m.source(), false), x, {}, {kRows});
    double squares = 0;
    for (int r = 0; r < kRows; ++r) {
      for (int64_t o = 0; o < m.rows; ++o) {
        double want = 0;
        for (int64_t c = 0; c < m.cols; ++c) {
          want += m.values[static_cast<size_t>(o * m.cols + c)] *
                  x[static_cast<size_t>(r * (m.cols + kPad) + c)];
        }
        const double off = y[static_cast<size_t>(r * (m.rows + kPad) + o)] - want;
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

TEST_CASE("the largest codes times the largest 12-bit activations are summed exactly") {
  if (!CanRun()) {
    return;
  }
  constexpr int kRows = 13;  // a panel of 12 and one row
  constexpr int64_t kOutputs = 17;
  const auto device = MakeInt12Device(1);
  for (MatrixFormat format : {MatrixFormat::kQ4_0, MatrixFormat::kQ4_1}) {
    for (const uint8_t codes : {uint8_t{0xff}, uint8_t{0}}) {
      Matrix m{format, kOutputs, 32, {}, {}};
      for (int64_t o = 0; o < kOutputs; ++o) {
        Append(m.bytes, Half(1));
        if (format == MatrixFormat::kQ4_1) {
          Append(m.bytes, uint16_t{0});
        }
        m.bytes.insert(m.bytes.end(), 16, codes);
      }
      const int weight = (codes == 0 ? 0 : 15) - (format == MatrixFormat::kQ4_0 ? 8 : 0);
      for (const int sign : {1, -1}) {
        const auto largest = static_cast<float>(sign * 119 * 256);  // the scale is 1
        const std::vector<float> x(kRows * (32 + kPad), largest);
        const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {kRows});
        for (size_t r = 0; r < kRows; ++r) {
          for (size_t o = 0; o < kOutputs; ++o) {
            REQUIRE(y[r * (kOutputs + kPad) + o] == 32.f * largest * static_cast<float>(weight));
          }
        }
      }
    }
  }
}

TEST_CASE("NaN and infinite activations affect only the outputs of their row with 12 bits, too") {
  if (!CanRun()) {
    return;
  }
  const auto device = MakeInt12Device(1);
  for (MatrixFormat format : kFormats) {
    CheckPoisonStaysInItsRow(*device, RandomMatrix(format, 40, 256, 21));
  }
}

TEST_CASE("zero, tiny and huge activations do not overflow the scale of 12-bit codes") {
  if (!CanRun()) {
    return;
  }
  const auto device = MakeInt12Device(1);
  const Matrix m = RandomMatrix(MatrixFormat::kQ4_1, 16, 32, 31);
  const auto weight = device->PackMatrix(m.source(), false);
  for (float magnitude : {0.f, 1e-44f, 1e-37f, 1e-30f, 1e34f}) {
    const std::vector<float> x(static_cast<size_t>(m.cols + kPad), magnitude);
    const auto y = RunLinear(*device, *weight, x, {}, {1});
    for (int64_t o = 0; o < m.rows; ++o) {
      REQUIRE(std::isfinite(y[static_cast<size_t>(o)]));
      REQUIRE((magnitude > 0.f || y[static_cast<size_t>(o)] == 0.f));
    }
  }
}
