#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/packed_layout.h"
#include "turbomind/core/check.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kFormats[] = {
    MatrixFormat::kF32,  MatrixFormat::kBF16,  MatrixFormat::kQ4_0,      MatrixFormat::kQ4_1,
    MatrixFormat::kQ8_0, MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split};
}  // namespace

TEST_CASE("every format and shape agrees with a double reference on every instruction set") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(2, isa);
    for (MatrixFormat format : kFormats) {
      const bool quantized = format >= MatrixFormat::kQ4_0;
      for (int64_t rows : {1, 16, 37, 130}) {
        for (int64_t cols :
             quantized ? std::vector<int64_t>{32, 96} : std::vector<int64_t>{1, 77}) {
          const Matrix m = RandomMatrix(format, rows, cols, static_cast<uint32_t>(rows + cols));
          const std::vector<float> x = RandomVector(70 * (cols + kPad), 7);
          const std::vector<float> bias = RandomVector(rows, 8);
          for (bool exact : {false, true}) {
            const auto weight = device->PackMatrix(m.source(), exact);
            CAPTURE(isa);
            CAPTURE(static_cast<int>(format));
            CAPTURE(rows);
            for (Call call : {Call{1, false, false}, Call{2, true, false}, Call{5, false, true},
                              Call{13, true, true}, Call{70, false, false}}) {
              CAPTURE(call.num_rows);
              CheckAgainstDouble(m, x, bias, RunLinear(*device, *weight, x, bias, call), call,
                                 exact);
            }
          }
        }
      }
    }
  }
}

TEST_CASE(
    "a row has the same bits for every number of rows and threads and every instruction set") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 203, 320, 3);
    const std::vector<float> x = RandomVector(70 * (m.cols + kPad), 4);
    const std::vector<float> bias = RandomVector(m.rows, 5);
    const auto reference_device = MakeCpuDevice(1, "scalar");
    const auto reference_weight = reference_device->PackMatrix(m.source(), false);
    const std::vector<float> want =
        RunLinear(*reference_device, *reference_weight, x, bias, {70, true, true});
    CheckAgainstDouble(m, x, bias, want, {70, true, true}, false);
    for (const std::string& isa : AvailableCpuIsas()) {
      for (int threads : {1, 2, 5}) {
        const auto device = MakeCpuDevice(threads, isa);
        const auto weight = device->PackMatrix(m.source(), false);
        for (int num_rows = 1; num_rows <= 70; num_rows += isa == "scalar" ? 23 : 1) {
          CAPTURE(isa);
          CAPTURE(threads);
          CAPTURE(num_rows);
          const auto y = RunLinear(*device, *weight, x, bias, {num_rows, true, true});
          const auto length = static_cast<int64_t>(y.size());
          REQUIRE(SameBits(y, {want.begin(), want.begin() + length}));
        }
      }
    }
  }
}

TEST_CASE("a row of a long matrix has the same bits alone and among other rows") {
  const auto device = MakeCpuDevice(2);
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 100, 2048, 11);  // several row blocks
    const std::vector<float> x = RandomVector(300 * (m.cols + kPad), 12);
    const auto weight = device->PackMatrix(m.source(), false);
    const auto all = RunLinear(*device, *weight, x, {}, {300});
    CheckAgainstDouble(m, x, {}, all, {300}, false);
    for (int row : {0, 11, 12, 133, 299}) {
      const std::vector<float> one(x.begin() + row * (m.cols + kPad),
                                   x.begin() + (row + 1) * (m.cols + kPad));
      const auto y = RunLinear(*device, *weight, one, {}, {1});
      const auto begin = all.begin() + row * (m.rows + kPad);
      CHECK(SameBits(y, {begin, begin + m.rows + kPad}));
    }
  }
}

TEST_CASE("rows grouped by weight have the same bits as one row alone in every grouping") {
  constexpr int kWeights = 5;
  constexpr int64_t kRows = 70;
  const std::vector<std::vector<int>> groupings = {
      {70, 0, 0, 0, 0}, {1, 1, 1, 1, 1}, {0, 13, 1, 0, 30}, {2, 12, 24, 11, 3}};
  for (const std::string& isa : AvailableCpuIsas()) {
    for (MatrixFormat format : kFormats) {
      const auto single = MakeCpuDevice(1, isa);
      std::vector<std::unique_ptr<PackedMatrix>> weights;
      std::vector<std::vector<float>> biases;
      std::vector<std::vector<float>> want;  // [kWeights] of every row alone
      const std::vector<float> x = RandomVector(kRows * (96 + kPad), 61);
      for (uint32_t i = 0; i < kWeights; ++i) {
        weights.push_back(single->PackMatrix(RandomMatrix(format, 150, 96, i).source(), false));
        biases.push_back(RandomVector(150, 70 + i));
        want.push_back(
            RunLinear(*single, *weights.back(), x, biases.back(), {kRows, i % 2 == 0, false}));
      }
      for (int threads : {1, 2}) {
        const auto device = MakeCpuDevice(threads, isa);
        for (const std::vector<int>& sizes : groupings) {
          for (bool gathered : {false, true}) {
            std::vector<int32_t> x_rows(kRows);
            for (int32_t row = 0; row < kRows; ++row) {
              x_rows[static_cast<size_t>(row)] = gathered ? row * 37 % kRows : row;
            }
            std::vector<LinearPart> experts;
            std::vector<int32_t> offsets = {0};
            for (size_t i = 0; i < kWeights; ++i) {
              experts.push_back({weights[i].get(), i % 2 == 0 ? biases[i].data() : nullptr});
              offsets.push_back(offsets.back() + sizes[i]);
            }
            std::vector<float> y(want[0].size(), kSentinel);
            device->GroupedLinear({.x = x.data(),
                                   .x_stride = 96 + kPad,
                                   .x_rows = gathered ? x_rows.data() : nullptr,
                                   .y = y.data(),
                                   .y_stride = 150 + kPad,
                                   .experts = experts.data(),
                                   .num_experts = kWeights,
                                   .offsets = offsets.data(),
                                   .num_rows = kRows});
            std::vector<float> expected(y.size(), kSentinel);
            for (size_t i = 0; i < kWeights; ++i) {
              for (int r = offsets[i]; r < offsets[i + 1]; ++r) {
                std::copy_n(want[i].begin() + x_rows[static_cast<size_t>(r)] * (150 + kPad), 150,
                            expected.begin() + r * (150 + kPad));
              }
            }
            CAPTURE(isa);
            CAPTURE(static_cast<int>(format));
            CAPTURE(threads);
            REQUIRE(SameBits(y, expected));
          }
        }
      }
    }
  }
}

TEST_CASE("parts stacked along the outputs have the same bits as each part alone") {
  constexpr int64_t kCols = 96;
  constexpr int64_t kRows[] = {40, 7, 150};
  for (const std::string& isa : AvailableCpuIsas()) {
    for (MatrixFormat format : kFormats) {
      for (bool mixed : {false, true}) {
        const auto single = MakeCpuDevice(1, isa);
        std::vector<std::unique_ptr<PackedMatrix>> weights;
        std::vector<std::vector<float>> biases;
        std::vector<LinearPart> parts;
        for (uint32_t i = 0; i < 3; ++i) {
          const MatrixFormat own = mixed && i == 1 ? MatrixFormat::kQ4_1 : format;
          weights.push_back(
              single->PackMatrix(RandomMatrix(own, kRows[i], kCols, i).source(), false));
          biases.push_back(RandomVector(kRows[i], 70 + i));
          parts.push_back({weights.back().get(), i == 1 ? nullptr : biases.back().data()});
        }
        for (int num_rows : {1, 5, 12, 70}) {
          for (bool accumulate : {false, true}) {
            const std::vector<float> x = RandomVector(num_rows * (kCols + kPad), 61);
            constexpr int64_t kStride = 40 + 7 + 150 + kPad;
            std::vector<float> expected(static_cast<size_t>(num_rows * kStride), kSentinel);
            int64_t output = 0;
            for (size_t i = 0; i < 3; ++i) {
              const auto alone = RunLinear(*single, *weights[i], x, biases[i],
                                           {num_rows, parts[i].bias != nullptr, accumulate});
              for (int r = 0; r < num_rows; ++r) {
                std::copy_n(alone.begin() + r * (kRows[i] + kPad), kRows[i],
                            expected.begin() + r * kStride + output);
              }
              output += kRows[i];
            }
            for (int threads : {1, 2}) {
              const auto device = MakeCpuDevice(threads, isa);
              std::vector<float> y(expected.size(), kSentinel);
              device->Linear({.x = x.data(),
                              .x_stride = kCols + kPad,
                              .parts = parts.data(),
                              .num_parts = 3,
                              .y = y.data(),
                              .y_stride = kStride,
                              .num_rows = num_rows,
                              .accumulate = accumulate});
              CAPTURE(isa);
              CAPTURE(static_cast<int>(format));
              CAPTURE(num_rows);
              REQUIRE(SameBits(y, expected));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("NaN and infinite activations affect only the outputs of their row") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(1, isa);
    for (MatrixFormat format : kFormats) {
      CheckPoisonStaysInItsRow(*device, RandomMatrix(format, 40, 64, 21));
    }
  }
}

TEST_CASE("zero, tiny and huge activations do not overflow the scale of 16-bit codes") {
  const auto device = MakeCpuDevice(1);
  const Matrix m = RandomMatrix(MatrixFormat::kQ8_0, 16, 32, 31);
  const auto weight = device->PackMatrix(m.source(), false);
  for (float magnitude : {0.f, 1e-44f, 1e-37f, 1e-30f, 1e34f}) {
    std::vector<float> x(static_cast<size_t>(m.cols + kPad), magnitude);
    const auto y = RunLinear(*device, *weight, x, {}, {1});
    for (int64_t o = 0; o < m.rows; ++o) {
      REQUIRE(std::isfinite(y[static_cast<size_t>(o)]));
      if (magnitude == 0.f) {
        REQUIRE(y[static_cast<size_t>(o)] == 0.f);
      }
    }
  }
}

TEST_CASE("the largest codes times the largest halves of activations are summed exactly") {
  constexpr int kRows = 13;  // a panel of 12 and one row
  constexpr int64_t kOutputs = 17;
  for (MatrixFormat format : {MatrixFormat::kQ4_0, MatrixFormat::kQ4_1, MatrixFormat::kQ8_0}) {
    for (const bool largest : {false, true}) {
      Matrix m{format, kOutputs, 32, {}, {}};
      const bool is_q8 = format == MatrixFormat::kQ8_0;
      const int code = is_q8 ? (largest ? 127 : -128) : (largest ? 15 : 0);
      for (int64_t o = 0; o < kOutputs; ++o) {
        Append(m.bytes, Half(1));
        if (format == MatrixFormat::kQ4_1) {
          Append(m.bytes, uint16_t{0});
        }
        m.bytes.insert(m.bytes.end(), is_q8 ? 32 : 16,
                       static_cast<uint8_t>(is_q8 ? code : code << 4 | code));
      }
      const int64_t value = format == MatrixFormat::kQ4_0 ? code - 8 : code;
      for (const float sign : {1.f, -1.f}) {
        // The scale of the activations is 1. Their codes have the halves (127, 0) once, then (126,
        // 127).
        std::vector<float> x(kRows * (32 + kPad), sign * 32383.f);
        for (size_t row = 0; row < kRows; ++row) {
          x[row * (32 + kPad)] = sign * 32512.f;
        }
        const auto want =
            static_cast<float>(static_cast<int64_t>(sign) * value * (32512 + 31 * int64_t{32383}));
        for (const std::string& isa : AvailableCpuIsas()) {
          const auto device = MakeCpuDevice(1, isa);
          const auto weight = device->PackMatrix(m.source(), false);
          const auto y = RunLinear(*device, *weight, x, {}, {kRows});
          for (int64_t row = 0; row < kRows; ++row) {
            for (int64_t o = 0; o < kOutputs; ++o) {
              REQUIRE(y[static_cast<size_t>(row * (kOutputs + kPad) + o)] == want);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the packed matrix returns exact embedding rows") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 50, 96, 41);
    for (bool exact : {false, true}) {
      const auto device = MakeCpuDevice(2);
      const auto table = device->PackMatrix(m.source(), exact);
      std::vector<int32_t> ids = {49, 0, 17, 17, 31};
      std::vector<float> out(ids.size() * 96, kSentinel);
      device->Embed({table.get(), ids.data(), out.data(), static_cast<int>(ids.size())});
      for (size_t i = 0; i < ids.size(); ++i) {
        for (size_t c = 0; c < 96; ++c) {
          const double want = m.values[static_cast<size_t>(ids[i]) * 96 + c];
          REQUIRE(std::abs(out[i * 96 + c] - want) <= std::abs(want) * 0x1p-23);
        }
      }
      ids[2] = 50;
      CHECK_THROWS_AS(
          device->Embed({table.get(), ids.data(), out.data(), static_cast<int>(ids.size())}),
          InvalidArgument);
    }
  }
}

MatrixSource PackedSource(const PackedMatrix& matrix, std::shared_ptr<const void> owner) {
  MatrixSource source{matrix.format, matrix.packed_data(), matrix.rows, matrix.cols};
  source.owner = std::move(owner);
  source.packed = true;
  return source;
}

TEST_CASE("a matrix can be loaded from its packed bytes, in place or copied") {
  for (MatrixFormat format : kFormats) {
    const Matrix m = RandomMatrix(format, 50, 96, 47);
    const auto device = MakeCpuDevice(2);
    const std::shared_ptr<const PackedMatrix> first = device->PackMatrix(m.source(), false);
    if (IsMxfp4(format)) {
      CHECK(first->packed_data() == nullptr);
      continue;
    }
    REQUIRE(first->packed_data() != nullptr);
    REQUIRE(first->num_bytes() == PackedBytes(format, 50, 96));
    const auto in_place = device->PackMatrix(PackedSource(*first, first), false);
    const auto copied = device->PackMatrix(PackedSource(*first, nullptr), false);
    CHECK(first.use_count() == 2);  // in_place holds it, copied does not
    CHECK(in_place->packed_data() == first->packed_data());
    CHECK(copied->packed_data() != first->packed_data());
    CHECK(std::memcmp(copied->packed_data(), first->packed_data(),
                      static_cast<size_t>(first->num_bytes())) == 0);
    if (format == MatrixFormat::kF32) {
      device->PackMatrix(PackedSource(*first, first), true);
    } else {
      CHECK_THROWS_AS(device->PackMatrix(PackedSource(*first, first), true), InvalidArgument);
    }
    MatrixSource misaligned = PackedSource(*first, first);
    misaligned.data = first->packed_data() + 4;
    CHECK_THROWS_AS(device->PackMatrix(misaligned, false), InvalidArgument);
  }
}

// Files of packed weights outlive a build. A change of the tiles needs a new kPackedLayoutId and
// then new values here.
TEST_CASE("the tiles match the layout id") {
  REQUIRE(kPackedLayoutId == 1);
  const auto device = MakeCpuDevice(1);
  const auto hash_of = [&](MatrixFormat format) {
    const Matrix m = RandomMatrix(format, 20, 64, 53);
    const auto packed = device->PackMatrix(m.source(), false);
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
    for (int64_t i = 0; i < packed->num_bytes(); ++i) {
      hash = (hash ^ packed->packed_data()[i]) * 0x100000001b3;
    }
    return hash;
  };
  CHECK(hash_of(MatrixFormat::kF32) == 7030175867461189190u);
  CHECK(hash_of(MatrixFormat::kBF16) == 9555641935666747825u);
  CHECK(hash_of(MatrixFormat::kQ4_0) == 12850000725789936096u);
  CHECK(hash_of(MatrixFormat::kQ4_1) == 13224752672577948833u);
  CHECK(hash_of(MatrixFormat::kQ8_0) == 4943437910362433791u);
}

TEST_CASE("matrices that cannot be packed are rejected") {
  const auto device = MakeCpuDevice(1);
  std::vector<uint8_t> bytes(4096);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kQ4_0, bytes.data(), 4, 40}, false),
                  InvalidArgument);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kF32, bytes.data(), 0, 32}, false),
                  InvalidArgument);
  CHECK_THROWS_AS(device->PackMatrix({MatrixFormat::kF32, nullptr, 4, 32}, false), InvalidArgument);
  MatrixSource packed{MatrixFormat::kMxfp4, bytes.data(), 4, 32};
  packed.packed = true;
  CHECK_THROWS_AS(device->PackMatrix(packed, false), InvalidArgument);
}
