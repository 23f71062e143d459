// MXFP4 weights in both stored forms, in place and at the end of a mapping. linear_test.cc has the
// tests that cover every format.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cpu/linear_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/check.h"

using namespace turbomind;
using namespace turbomind::testing;

namespace {

constexpr MatrixFormat kForms[] = {MatrixFormat::kMxfp4, MatrixFormat::kMxfp4Split};

// Copies bytes to the end of a page that an unreadable page follows.
class EndOfMapping {
 public:
  explicit EndOfMapping(const std::vector<uint8_t>& bytes) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = (bytes.size() + page - 1) / page * page;
    size_ = used + page;
    void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    memory_ = static_cast<uint8_t*>(memory);
    data_ = memory_ + used - bytes.size();
    std::memcpy(data_, bytes.data(), bytes.size());
    REQUIRE(mprotect(memory_ + used, page, PROT_NONE) == 0);
  }
  ~EndOfMapping() { munmap(memory_, size_); }
  EndOfMapping(const EndOfMapping&) = delete;
  EndOfMapping& operator=(const EndOfMapping&) = delete;

  const uint8_t* data() const { return data_; }

 private:
  uint8_t* memory_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

std::shared_ptr<const void> NoOwner() { return std::make_shared<int>(0); }

// Returns a matrix of one block per row. Each row has its own exponent and the codes 0 to 15 twice.
Matrix OneBlockRows(MatrixFormat format, const std::vector<int>& exponents) {
  Matrix m{format, static_cast<int64_t>(exponents.size()), 32, {}, {}};
  for (int exponent : exponents) {
    uint8_t codes[32];
    for (int c = 0; c < 32; ++c) {
      codes[c] = static_cast<uint8_t>(c % 16);
    }
    AppendMxfp4Block(m, exponent, codes);
  }
  return m;
}

}  // namespace

TEST_CASE("both MXFP4 forms have the same bits, copied or in place, on every instruction set") {
  const Matrix blocks = RandomMxfp4(MatrixFormat::kMxfp4, 101, 2880, 1);
  const Matrix split = RandomMxfp4(MatrixFormat::kMxfp4Split, 101, 2880, 1);
  REQUIRE(blocks.values == split.values);
  const std::vector<float> x = RandomVector(26 * 2880, 2);
  const std::vector<float> bias = RandomVector(101, 3);
  std::vector<float> want;
  for (const std::string& isa : AvailableCpuIsas()) {
    for (int threads : {1, 2, 3}) {
      const auto device = MakeCpuDevice(threads, isa);
      for (const Matrix* m : {&blocks, &split}) {
        for (bool in_place : {false, true}) {
          MatrixSource source = m->source();
          source.owner = in_place ? NoOwner() : nullptr;
          const auto weight = device->PackMatrix(source, false);
          CHECK(weight->num_bytes() == 101 * 90 * 17);
          const auto y = RunLinear(*device, *weight, x, bias, {26, true, true});
          want = want.empty() ? y : want;
          CAPTURE(isa);
          CAPTURE(in_place);
          CHECK(SameBits(y, want));
        }
      }
    }
  }
}

TEST_CASE("kernels read nothing past the end of a mapping") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(1, isa);
    const auto many_rows = MakeCpuDevice(1, isa, {.deterministic = false});
    for (MatrixFormat form : kForms) {
      for (int64_t cols : {32, 64, 96, 128, 2880}) {
        for (int64_t rows : {1, 3, 18}) {
          const Matrix m = RandomMxfp4(form, rows, cols, 5);
          const EndOfMapping bytes(m.bytes);
          const EndOfMapping scales(m.scales);
          MatrixSource source = m.source();
          source.data = bytes.data();
          source.scales = m.scales.empty() ? nullptr : scales.data();
          source.owner = NoOwner();
          const auto weight = device->PackMatrix(source, false);
          const std::vector<float> x = RandomVector(14 * cols, 6);
          const auto copied = device->PackMatrix(m.source(), false);
          for (int num_rows : {1, 14}) {
            CHECK(SameBits(RunLinear(*device, *weight, x, {}, {num_rows}),
                           RunLinear(*device, *copied, x, {}, {num_rows})));
          }
          RunLinear(*many_rows, *weight, RandomVector(33 * cols, 7), {}, {33});
          std::vector<float> row(static_cast<size_t>(cols));
          const int32_t last = static_cast<int32_t>(rows - 1);
          device->Embed({weight.get(), &last, row.data(), 1});
          CHECK(row.back() == m.values.back());
        }
      }
    }
  }
}

TEST_CASE(
    "a matrix with an owner is read in place and keeps the owner alive; without one it is copied") {
  const auto device = MakeCpuDevice(1);
  for (MatrixFormat form : kForms) {
    Matrix m = RandomMxfp4(form, 8, 64, 9);
    const std::vector<float> x = RandomVector(64, 10);
    MatrixSource source = m.source();
    const auto copied = device->PackMatrix(source, false);
    source.owner = NoOwner();
    const std::weak_ptr<const void> alive = source.owner;
    auto in_place = device->PackMatrix(source, false);
    const auto exact = device->PackMatrix(source, true);
    source.owner.reset();
    CHECK(!alive.expired());
    const auto before = RunLinear(*device, *copied, x, {}, {1});
    CHECK(SameBits(RunLinear(*device, *in_place, x, {}, {1}), before));
    // Only the matrix that reads in place sees new values.
    for (uint8_t& byte : form == MatrixFormat::kMxfp4Split ? m.scales : m.bytes) {
      byte = 128;
    }
    CHECK(SameBits(RunLinear(*device, *copied, x, {}, {1}), before));
    CHECK(!SameBits(RunLinear(*device, *in_place, x, {}, {1}), before));
    in_place.reset();
    CHECK(alive.expired());
    CHECK(exact->format == MatrixFormat::kF32);
  }
}

TEST_CASE("every exponent is its power of two, from the subnormal 2^-127 to 2^127") {
  std::vector<int> exponents;
  for (int e = 0; e < 255; ++e) {
    exponents.push_back(e);
  }
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(1, isa);
    for (MatrixFormat form : kForms) {
      const Matrix m = OneBlockRows(form, exponents);
      const auto weight = device->PackMatrix(m.source(), false);
      // One activation is nonzero, and it is a power of two, so every product is exact.
      for (int c : {0, 1, 6, 9, 15, 16, 31}) {
        for (const float magnitude : {1.f, 0x1p-20f}) {
          std::vector<float> x(32);
          x[static_cast<size_t>(c)] = magnitude;
          const auto y = RunLinear(*device, *weight, x, {}, {1});
          for (size_t row = 0; row < exponents.size(); ++row) {
            const double value = m.values[row * 32 + static_cast<size_t>(c)] * magnitude;
            const double rounding = std::abs(value) * 0x1p-22 + 0x1p-149;
            const float got = y[row];
            CAPTURE(row);
            if (std::abs(value) > 0x1.fffffep127) {
              CHECK(std::isinf(got));
            } else {
              CHECK(std::abs(got - value) <= rounding);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("the exponent 255 makes only its own output NaN") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(1, isa);
    for (MatrixFormat form : kForms) {
      for (bool zero_codes : {false, true}) {
        for (int64_t poisoned : {0, 2, 6}) {
          Matrix m = RandomMxfp4(form, 7, 160, 11);
          const std::vector<float> x = RandomVector(13 * 160, 12);
          const auto clean =
              RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {13});
          const auto block = static_cast<size_t>(poisoned * 5 + 3);
          if (form == MatrixFormat::kMxfp4) {
            m.bytes[block * 17] = 255;
          } else {
            m.scales[block] = 255;
          }
          for (size_t j = 0; zero_codes && j < 16; ++j) {
            m.bytes[form == MatrixFormat::kMxfp4 ? block * 17 + 1 + j : block * 16 + j] = 0;
          }
          const auto y = RunLinear(*device, *device->PackMatrix(m.source(), false), x, {}, {13});
          for (size_t i = 0; i < y.size(); ++i) {
            if (static_cast<int64_t>(i) % 7 == poisoned) {
              CHECK(std::isnan(y[i]));
            } else {
              CHECK(y[i] == clean[i]);
            }
          }
        }
      }
    }
  }
}
