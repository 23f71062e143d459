#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "sanitized_sample.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"

namespace turbomind {
namespace {

constexpr uint8_t kSentinel = 0xa5;
constexpr int kPad = 16;  // sentinel bytes after each row

struct Encoded {
  std::vector<uint8_t> payload;
  std::vector<uint8_t> meta;
  RowCounts counts;
  bool operator==(const Encoded& other) const {
    return payload == other.payload && meta == other.meta &&
           counts.nonfinite == other.counts.nonfinite && counts.clipped == other.counts.clipped;
  }
};

Encoded Empty(KvCacheMode format, int n, DataType dtype) {
  Encoded e;
  e.payload.assign(block::RowBytes(format, n, dtype) + kPad, kSentinel);
  e.meta.assign(block::ParamBytes(format, dtype) + block::ScaleBytes(format, n) + kPad, kSentinel);
  return e;
}

float RandomValue(std::mt19937& random, int kind) {
  std::normal_distribution<float> normal;
  const uint32_t bits = random();
  float any;
  std::memcpy(&any, &bits, sizeof(any));
  switch (kind) {
    case 0:
      return normal(random);
    case 1:
      return std::ldexp(normal(random), static_cast<int>(random() % 40) - 20);
    case 2:  // ties of every format
      return std::ldexp(static_cast<float>(static_cast<int>(random() % 33) - 16) * 0.25f,
                        static_cast<int>(random() % 5) - 2);
    case 3:
      return any;  // every bit pattern: NaN, infinities, subnormals
    case 4:
      return 0.f * (bits & 1 ? -1.f : 1.f);
    default:
      return bits % 16 == 0 ? any : normal(random);
  }
}

TEST_CASE("encoders equal the codec bit for bit on a million random rows") {
  // 7 modes * 3 dtypes * 48000 = 1,008,000, each ISA
  constexpr int kRowsPerCase = testing::kSanitized ? 6000 : 48000;
  constexpr int kDim = 48;
  std::mt19937 random(11);
  std::vector<CpuKvKernels> isas;
  for (const std::string& isa : AvailableCpuIsas()) {
    isas.push_back(CpuKvKernelsFor(isa));
  }
  const float global_scales[] = {1.f, 0.37f, 1e-3f, 250.f};
  for (KvCacheMode format : kAllKvCacheModes) {
    for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      int64_t different = 0;
      for (int i = 0; i < kRowsPerCase; ++i) {
        float row[kDim];
        for (float& x : row) {
          x = RandomValue(random, i % 6);
        }
        const RowFormat row_format = {format, kDim, dtype,
                                      HasGlobalScale(format) ? global_scales[i / 6 % 4] : 1.f};
        Encoded want = Empty(format, kDim, dtype);
        want.counts = EncodeAndCount(row_format, row, want.payload.data(), want.meta.data());
        for (const CpuKvKernels& kernels : isas) {
          Encoded got = Empty(format, kDim, dtype);
          got.counts = kernels.encode_row(row_format, row, got.payload.data(), got.meta.data());
          different += got == want ? 0 : 1;
        }
      }
      INFO(ToString(format) << " " << ToString(dtype));
      CHECK(different == 0);
    }
  }
}

TEST_CASE("FP8 encoders equal the codec at every tie, code, limit and special value") {
  // Ties and codes of E4M3 and E5M2 have no bits in the lower half of an FP32; the lower halves
  // below are those and their neighbors.
  constexpr uint32_t kLower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  constexpr int kDim = 256;
  for (const std::string& isa : AvailableCpuIsas()) {
    const CpuKvKernels kernels = CpuKvKernelsFor(isa);
    for (KvCacheMode format : {KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E5m2}) {
      int64_t different = 0;
      for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
        for (float global_scale : {1.f, 0.37f, 0x1p-64f, 0x1p64f}) {
          const RowFormat row_format = {format, kDim, dtype, global_scale};
          for (uint32_t first = 0; first < 0x10000; first += kDim) {
            for (uint32_t lower : kLower) {
              float row[kDim];
              for (uint32_t i = 0; i < kDim; ++i) {
                row[i] = BitsFloat((first + i) << 16 | lower);
              }
              Encoded want = Empty(format, kDim, dtype);
              want.counts = EncodeAndCount(row_format, row, want.payload.data(), want.meta.data());
              Encoded got = Empty(format, kDim, dtype);
              got.counts = kernels.encode_row(row_format, row, got.payload.data(), got.meta.data());
              different += got == want ? 0 : 1;
            }
          }
        }
      }
      INFO(isa << " " << ToString(format));
      CHECK(different == 0);
    }
  }
}

// Fills a row with values and midpoints of E2M1 times a scale of either format, so that the errors
// of candidates often tie.
void FillWithTies(std::mt19937& random, float* row, int n) {
  constexpr float kEdges[] = {0.f, .25f, .5f, .75f, 1.f, 1.25f, 1.5f, 1.75f,
                              2.f, 2.5f, 3.f, 3.5f, 4.f, 5.f,   6.f,  6.5f};
  for (int d = 0; d < n; d += 16) {
    const float scale = random() % 2 == 0 ? E4M3ToFloat(static_cast<uint8_t>(random() % 0x7F))
                                          : MxStep(kMxMinByte + static_cast<int>(random() % 25));
    for (int i = d; i < d + 16; ++i) {
      const uint32_t bits = random();
      row[i] = kEdges[bits % 16] * scale * (bits & 16 ? -1.f : 1.f);
      const float far = bits & 64 ? 1e30f : -1e30f;
      row[i] = (bits >> 8) % 5 == 0 ? std::nextafter(row[i], far) : row[i];
    }
  }
}

TEST_CASE("searching encoders equal the codec bit for bit on a million random rows") {
  // 2 modes * 3 dtypes * 168000 = 1,008,000, each ISA
  constexpr int kRowsPerCase = testing::kSanitized ? 21000 : 168000;
  constexpr int kMaxDim = 80;
  std::mt19937 random(12);
  std::vector<CpuKvKernels> isas;
  for (const std::string& isa : AvailableCpuIsas()) {
    isas.push_back(CpuKvKernelsFor(isa));
  }
  const float global_scales[] = {1.f, 0.37f, 0x1p-9f, 250.f, 1e-40f, 0x1p60f};
  for (KvCacheMode format : {KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      int64_t different = 0;
      int64_t searched = 0;  // rows with at least one scale that is not the plain one
      for (int i = 0; i < kRowsPerCase; ++i) {
        const int dim = i % 8 == 0 ? kMaxDim : i % 8 == 1 ? 64 : 16 * (1 + i % 2);
        float row[kMaxDim];
        for (float& x : row) {
          x = RandomValue(random, i % 7);
        }
        if (i % 7 == 6) {
          FillWithTies(random, row, dim);
        }
        RowFormat row_format = {format, dim, dtype,
                                HasGlobalScale(format) ? global_scales[i / 7 % 6] : 1.f, true};
        Encoded want = Empty(format, dim, dtype);
        want.counts = EncodeAndCount(row_format, row, want.payload.data(), want.meta.data());
        for (const CpuKvKernels& kernels : isas) {
          Encoded got = Empty(format, dim, dtype);
          got.counts = kernels.encode_row(row_format, row, got.payload.data(), got.meta.data());
          different += got == want ? 0 : 1;
        }
        row_format.search = false;
        Encoded plain = Empty(format, dim, dtype);
        EncodeByCodec(row_format, row, plain.payload.data(), plain.meta.data());
        searched += plain.meta == want.meta ? 0 : 1;
      }
      INFO(ToString(format) << " " << ToString(dtype));
      CHECK(different == 0);
      CHECK(searched > kRowsPerCase / 8);
    }
  }
}

TEST_CASE("decoders equal the codec for every code and every scale byte") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const CpuKvKernels kernels = CpuKvKernelsFor(isa);
    for (KvCacheMode format : kAllKvCacheModes) {
      for (int meta_byte = 0; meta_byte < 256; ++meta_byte) {
        constexpr int kDim = 256;
        const DataType dtype = meta_byte % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
        std::vector<uint8_t> payload(block::RowBytes(format, kDim, dtype));
        for (size_t i = 0; i < payload.size(); ++i) {
          payload[i] = static_cast<uint8_t>(i);  // every code in both nibbles
        }
        const std::vector<uint8_t> meta(16, static_cast<uint8_t>(meta_byte));
        float want[kDim];
        float got[kDim];
        const RowFormat row_format = {format, kDim, dtype, 0.7f};
        DecodeByCodec(row_format, payload.data(), meta.data(), want);
        kernels.decode_row(row_format, payload.data(), meta.data(), got);
        INFO(isa << " " << ToString(format) << " byte " << meta_byte);
        CHECK(std::memcmp(want, got, sizeof(want)) == 0);
      }
    }
  }
}

}  // namespace
}  // namespace turbomind
