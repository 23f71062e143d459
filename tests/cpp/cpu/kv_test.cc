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
#include "turbomind/core/check.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"

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
  const float factors[] = {1.f, 0.37f, 1e-3f, 250.f};
  for (KvCacheMode format : kAllKvCacheModes) {
    for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      int64_t different = 0;
      for (int i = 0; i < kRowsPerCase; ++i) {
        float row[kDim];
        for (float& x : row) {
          x = RandomValue(random, i % 6);
        }
        const RowFormat row_format = {format, kDim, dtype,
                                      HasGlobalScale(format) ? factors[i / 6 % 4] : 1.f};
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
  const float factors[] = {1.f, 0.37f, 0x1p-9f, 250.f, 1e-40f, 0x1p60f};
  for (KvCacheMode format : {KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
    for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      int64_t different = 0;
      int64_t moved = 0;  // rows with at least one scale that is not the plain one
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
                                HasGlobalScale(format) ? factors[i / 7 % 6] : 1.f, true};
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
        moved += plain.meta == want.meta ? 0 : 1;
      }
      INFO(ToString(format) << " " << ToString(dtype));
      CHECK(different == 0);
      CHECK(moved > kRowsPerCase / 8);
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

// One step of two sequences through WriteKv: one token at position 20, and five tokens from
// position 3 on.
struct Step {
  static constexpr int kTokens = 6;
  static constexpr int kMaxLen = 21;
  int32_t cu_seqlens[3] = {0, 1, kTokens};
  int32_t context_lens[2] = {kMaxLen, 8};
  int32_t positions[kTokens] = {20, 3, 4, 5, 6, 7};
  int32_t tables[4] = {3, 1, 2, -1};
  BatchView View() const { return {2, 1, kTokens, cu_seqlens, context_lens, positions, tables, 2}; }
};

// Random inputs of WriteKv for one step, the rows that it changes, and the cache that it writes.
class ProcessCase {
 public:
  static constexpr int kQHeads = 4;
  static constexpr int kHeads = 2;
  static constexpr int kAllHeads = kQHeads + 2 * kHeads;

  ProcessCase(const CacheShape& shape, int rope_dim, std::mt19937& random)
      : dim_(shape.head_dim), rope_dim_(rope_dim), cache_(shape) {
    const auto fill = [&](size_t n) {
      std::normal_distribution<float> normal;
      std::vector<float> x(n);
      for (float& v : x) {
        v = normal(random);
      }
      return x;
    };
    input_ = fill(static_cast<size_t>(Step::kTokens) * kAllHeads * dim_);
    bias_ = fill(static_cast<size_t>(kAllHeads) * dim_);
    q_norm_ = fill(dim_);
    k_norm_ = fill(dim_);
    cos_ = fill(static_cast<size_t>(Step::kTokens) * rope_dim / 2);
    sin_ = fill(static_cast<size_t>(Step::kTokens) * rope_dim / 2);
    qkv_ = input_;
  }

  // Returns the number of NaN and infinite values.
  int64_t Process(Device& device) {
    int64_t num_nonfinite = 0;
    WriteKvParams p;
    p.qkv = qkv_.data();
    p.bias = bias_.data();
    p.q_norm = q_norm_.data();
    p.k_norm = k_norm_.data();
    p.rope_cos = cos_.data();
    p.rope_sin = sin_.data();
    p.rope_dim = rope_dim_;
    p.q_heads = kQHeads;
    p.kv = cache_.view();
    p.batch = step_.View();
    p.num_nonfinite = &num_nonfinite;
    invokeProcessKV_v2(device, p);
    return num_nonfinite;
  }

  // Reads both sides of the cache as [sequence, head, kMaxLen, dim]. Slots past the context stay
  // -1.
  void Flatten(Device& device) {
    flat_[0].assign(static_cast<size_t>(2) * kHeads * Step::kMaxLen * dim_, -1.f);
    flat_[1] = flat_[0];
    FlattenKVParams f;
    f.k = flat_[0].data();
    f.v = flat_[1].data();
    f.max_len = Step::kMaxLen;
    f.kv = cache_.view();
    f.batch = step_.View();
    invokeFlattenKV_v2(device, f);
  }

  // Returns the largest error of the transformed row against double precision, relative to 1 +
  // |value|.
  double RowError(int token, int head) const {
    const size_t at = RowAt(token, head);
    const bool value = head >= kQHeads + kHeads;
    std::vector<double> want(input_.begin() + at, input_.begin() + at + dim_);
    Add(want, bias_.data() + head * dim_);
    if (!value) {
      Normalize(want, head < kQHeads ? q_norm_ : k_norm_);
      Rotate(want, token);
    }
    double error = 0;
    for (int d = 0; d < dim_; ++d) {
      error = std::max(error, std::fabs(want[d] - qkv_[at + d]) / (1 + std::fabs(want[d])));
    }
    return error;
  }

  // Returns true if the cache holds the transformed row as the codec encodes it.
  bool StoresTheRow(int token, KvSide side, int head) const {
    const int s = static_cast<int>(side);
    const RowFormat row_format = {cache_.view().format[s], dim_, cache_.shape().dtype,
                                  cache_.GlobalScale(side, head)};
    Encoded e = Empty(row_format.format, dim_, row_format.dtype);
    std::vector<float> decoded(dim_);
    EncodeByCodec(row_format, qkv_.data() + RowAt(token, kQHeads + s * kHeads + head),
                  e.payload.data(), e.meta.data());
    DecodeByCodec(row_format, e.payload.data(), e.meta.data(), decoded.data());
    return std::memcmp(Flat(side, token == 0 ? 0 : 1, head, step_.positions[token]), decoded.data(),
                       dim_ * sizeof(float)) == 0;
  }

  const float* Flat(KvSide side, int seq, int head, int position) const {
    return flat_[static_cast<int>(side)].data() +
           (static_cast<size_t>(seq * kHeads + head) * Step::kMaxLen + position) * dim_;
  }

 private:
  size_t RowAt(int token, int head) const {
    return (static_cast<size_t>(token) * kAllHeads + head) * dim_;
  }
  static void Add(std::vector<double>& x, const float* bias) {
    for (size_t d = 0; d < x.size(); ++d) {
      x[d] += bias[d];
    }
  }
  static void Normalize(std::vector<double>& x, const std::vector<float>& weight) {
    double squares = 0;
    for (double value : x) {
      squares += value * value;
    }
    for (size_t d = 0; d < x.size(); ++d) {
      x[d] = x[d] / std::sqrt(squares / static_cast<double>(x.size()) + 1e-6) * weight[d];
    }
  }
  void Rotate(std::vector<double>& x, int token) const {
    const int half = rope_dim_ / 2;
    for (int i = 0; i < half; ++i) {
      const double cos = cos_[token * half + i];
      const double sin = sin_[token * half + i];
      const double a = x[i];
      const double b = x[half + i];
      x[i] = a * cos - b * sin;
      x[half + i] = b * cos + a * sin;
    }
  }

  int dim_;
  int rope_dim_;
  Step step_;
  TestCache cache_;
  std::vector<float> input_;
  std::vector<float> bias_;
  std::vector<float> q_norm_;
  std::vector<float> k_norm_;
  std::vector<float> cos_;
  std::vector<float> sin_;
  std::vector<float> qkv_;
  std::vector<float> flat_[2];
};

void CheckProcess(Device& device, const CacheShape& shape, int rope_dim, std::mt19937& random) {
  constexpr double kMaxError = 1e-5;  // a dozen FP32 operations on values below 8
  ProcessCase c(shape, rope_dim, random);
  CHECK(c.Process(device) == 0);
  c.Flatten(device);
  double error = 0;
  bool stored = true;
  for (int t = 0; t < Step::kTokens; ++t) {
    for (int h = 0; h < ProcessCase::kAllHeads; ++h) {
      error = std::max(error, c.RowError(t, h));
    }
    for (int h = 0; h < ProcessCase::kHeads; ++h) {
      stored &= c.StoresTheRow(t, KvSide::kK, h) && c.StoresTheRow(t, KvSide::kV, h);
    }
  }
  CHECK(error < kMaxError);
  CHECK(stored);
  // Slots past the context are unchanged.
  CHECK(*c.Flat(KvSide::kK, 1, 0, 8) == -1.f);
}

TEST_CASE("WriteKv transforms rows in place and stores them as the codec encodes them") {
  std::mt19937 random(3);
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(2, isa);
    for (KvCacheMode format : kAllKvCacheModes) {
      for (int dim : {64, 80}) {
        for (int rope_dim : {dim, 32}) {
          INFO(isa << " " << ToString(format) << " dim " << dim << " rope " << rope_dim);
          CacheShape shape;
          shape.k = shape.v = format;
          shape.head_dim = dim;
          shape.kv_heads = ProcessCase::kHeads;
          shape.block_seq_len = 16;
          shape.context = 64;
          CheckProcess(*device, shape, rope_dim, random);
        }
      }
    }
  }
}

TEST_CASE("WriteKv counts NaN, infinite and clipped values of K and V") {
  const auto device = MakeCpuDevice(2);
  CacheShape shape;
  shape.k = shape.v = KvCacheMode::kFp4Nv;
  shape.block_seq_len = 16;
  shape.context = 64;
  TestCache cache(shape);
  const Step step;
  std::vector<float> qkv(static_cast<size_t>(Step::kTokens) * 6 * 64, 0.5f);
  qkv[(0 * 6 + 2) * 64 + 5] = std::numeric_limits<float>::quiet_NaN();   // K
  qkv[(3 * 6 + 5) * 64 + 63] = -std::numeric_limits<float>::infinity();  // V
  qkv[(3 * 6 + 1) * 64] = std::numeric_limits<float>::infinity();        // Q: not stored
  qkv[(2 * 6 + 3) * 64 + 1] = 1e5f;  // K: beyond 6 * 448 * global_scale
  qkv[(2 * 6 + 3) * 64 + 2] = -1e30f;
  qkv[(5 * 6 + 1) * 64 + 7] = 1e30f;  // Q
  int64_t num_nonfinite = 40;
  int64_t num_clipped = 50;
  WriteKvParams p;
  p.qkv = qkv.data();
  p.q_heads = 2;
  p.kv = cache.view();
  p.batch = step.View();
  p.num_nonfinite = &num_nonfinite;
  p.num_clipped = &num_clipped;
  invokeProcessKV_v2(*device, p);
  CHECK(num_nonfinite == 42);
  CHECK(num_clipped == 52);
}

TEST_CASE("ops reject arguments that would index outside the cache") {
  const auto device = MakeCpuDevice(1);
  CacheShape shape;
  shape.block_seq_len = 16;
  shape.context = 64;
  TestCache cache(shape);
  std::vector<float> qkv(static_cast<size_t>(Step::kTokens) * 6 * 64);
  int64_t num_nonfinite = 0;
  const auto refused = [&](auto change) {
    Step step;
    WriteKvParams p;
    p.qkv = qkv.data();
    p.q_heads = 2;
    p.kv = cache.view();
    p.batch = step.View();
    p.num_nonfinite = &num_nonfinite;
    change(step, p);
    CHECK_THROWS_AS(invokeProcessKV_v2(*device, p), InternalError);
  };
  refused([](Step& step, WriteKvParams&) { step.tables[1] = -1; });
  refused([](Step& step, WriteKvParams&) { step.positions[2] = 9; });
  refused([](Step&, WriteKvParams& p) { p.q_heads = 3; });
  refused([](Step&, WriteKvParams& p) { p.batch.block_table_stride = 1; });
  refused([](Step& step, WriteKvParams&) { step.context_lens[1] = 4; });
  shape.k = shape.v = KvCacheMode::kFp4Nv;
  TestCache fp4(shape);
  refused([&](Step&, WriteKvParams& p) {
    p.kv = fp4.view();
    p.kv.scales = nullptr;
  });
}

}  // namespace
}  // namespace turbomind
