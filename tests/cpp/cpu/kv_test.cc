#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"

namespace turbomind {
namespace {

constexpr uint8_t kSentinel = 0xa5;
constexpr int kPad = 16;  // sentinel bytes behind each row

struct Encoded {
  std::vector<uint8_t> payload;
  std::vector<uint8_t> meta;
  int nonfinite = 0;
  bool operator==(const Encoded&) const = default;
};

Encoded Empty(KvCacheMode mode, int n, DataType dtype) {
  Encoded e;
  e.payload.assign(block::RowBytes(mode, n, dtype) + kPad, kSentinel);
  e.meta.assign(block::ParamBytes(mode, dtype) + block::ScaleBytes(mode, n) + kPad, kSentinel);
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
  constexpr int kRowsPerCase = 16000;  // 7 modes * 3 dtypes * 3 ISAs * 16000 = 1,008,000
  constexpr int kDim = 48;
  std::mt19937 random(11);
  std::vector<CpuKvKernels> isas;
  for (const std::string& isa : AvailableCpuIsas()) {
    isas.push_back(CpuKvKernelsFor(isa));
  }
  const float factors[] = {1.f, 0.37f, 1e-3f, 250.f};
  for (KvCacheMode mode : kAllKvCacheModes) {
    for (DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      int64_t different = 0;
      for (int i = 0; i < kRowsPerCase; ++i) {
        float row[kDim];
        for (float& x : row) {
          x = RandomValue(random, i % 6);
        }
        const float g = UsesFactor(mode) ? factors[i / 6 % 4] : 1.f;
        Encoded want = Empty(mode, kDim, dtype);
        want.nonfinite =
            EncodeByCodec(mode, row, kDim, dtype, g, want.payload.data(), want.meta.data());
        for (const CpuKvKernels& kernels : isas) {
          Encoded got = Empty(mode, kDim, dtype);
          got.nonfinite =
              kernels.encode_row(mode, row, kDim, dtype, g, got.payload.data(), got.meta.data());
          different += got == want ? 0 : 1;
        }
      }
      INFO(ToString(mode) << " " << ToString(dtype));
      CHECK(different == 0);
    }
  }
}

TEST_CASE("decoders equal the codec for every code and every scale byte") {
  for (const std::string& isa : AvailableCpuIsas()) {
    const CpuKvKernels kernels = CpuKvKernelsFor(isa);
    for (KvCacheMode mode : kAllKvCacheModes) {
      for (int meta_byte = 0; meta_byte < 256; ++meta_byte) {
        constexpr int kDim = 256;
        const DataType dtype = meta_byte % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
        std::vector<uint8_t> payload(block::RowBytes(mode, kDim, dtype));
        for (size_t i = 0; i < payload.size(); ++i) {
          payload[i] = static_cast<uint8_t>(i);  // every code in both nibbles
        }
        const std::vector<uint8_t> meta(16, static_cast<uint8_t>(meta_byte));
        float want[kDim];
        float got[kDim];
        DecodeByCodec(mode, payload.data(), meta.data(), kDim, dtype, 0.7f, want);
        kernels.decode_row(mode, payload.data(), meta.data(), kDim, dtype, 0.7f, got);
        INFO(isa << " " << ToString(mode) << " byte " << meta_byte);
        CHECK(std::memcmp(want, got, sizeof(want)) == 0);
      }
    }
  }
}

// One step of two sequences through ProcessKV: 5 new tokens at 3, 1 at 20.
struct Step {
  static constexpr int kTokens = 6;
  int32_t cu_seqlens[3] = {0, 1, kTokens};
  int32_t context_lens[2] = {21, 8};
  int32_t positions[kTokens] = {20, 3, 4, 5, 6, 7};
  int32_t tables[4] = {3, 1, 2, -1};
  BatchView View() const { return {2, 1, kTokens, cu_seqlens, context_lens, positions, tables, 2}; }
};

// The reference of one head row, in double precision.
std::vector<double> ReferenceRow(std::vector<double> x, const float* bias, const float* norm,
                                 const float* cos, const float* sin, int rope_dim) {
  const int n = static_cast<int>(x.size());
  double squares = 0;
  for (int d = 0; d < n; ++d) {
    x[d] += bias[d];
    squares += x[d] * x[d];
  }
  for (int d = 0; norm != nullptr && d < n; ++d) {
    x[d] = x[d] / std::sqrt(squares / n + 1e-6) * norm[d];
  }
  for (int i = 0; cos != nullptr && i < rope_dim / 2; ++i) {
    const double a = x[i];
    const double b = x[rope_dim / 2 + i];
    x[i] = a * cos[i] - b * sin[i];
    x[rope_dim / 2 + i] = b * cos[i] + a * sin[i];
  }
  return x;
}

TEST_CASE("ProcessKV transforms rows in place and stores what the codec says") {
  constexpr int kQHeads = 4;
  constexpr int kHeads = 2;
  constexpr double kMaxError = 1e-5;  // a dozen FP32 operations on values below 8
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto fill = [&](size_t n) {
    std::vector<float> x(n);
    for (float& v : x) {
      v = normal(random);
    }
    return x;
  };
  for (const std::string& isa : AvailableCpuIsas()) {
    const auto device = MakeCpuDevice(2, isa);
    for (KvCacheMode mode : kAllKvCacheModes) {
      for (int dim : {64, 80}) {
        for (int rope_dim : {dim, 32}) {
          INFO(isa << " " << ToString(mode) << " dim " << dim << " rope " << rope_dim);
          CacheShape shape;
          shape.k = shape.v = mode;
          shape.head_dim = dim;
          shape.kv_heads = kHeads;
          shape.block_seq_len = 16;
          shape.context = 64;
          TestCache cache(shape);
          const Step step;
          const int heads = kQHeads + 2 * kHeads;
          const std::vector<float> input = fill(static_cast<size_t>(Step::kTokens) * heads * dim);
          const std::vector<float> bias = fill(static_cast<size_t>(heads) * dim);
          const std::vector<float> q_norm = fill(dim);
          const std::vector<float> k_norm = fill(dim);
          const std::vector<float> cos = fill(static_cast<size_t>(Step::kTokens) * rope_dim / 2);
          const std::vector<float> sin = fill(static_cast<size_t>(Step::kTokens) * rope_dim / 2);
          std::vector<float> qkv = input;
          int64_t num_nonfinite = 0;
          ProcessKVParams p;
          p.qkv = qkv.data();
          p.bias = bias.data();
          p.q_norm = q_norm.data();
          p.k_norm = k_norm.data();
          p.rope_cos = cos.data();
          p.rope_sin = sin.data();
          p.rope_dim = rope_dim;
          p.q_heads = kQHeads;
          p.kv = cache.view();
          p.batch = step.View();
          p.num_nonfinite = &num_nonfinite;
          invokeProcessKV_v2(*device, p);
          CHECK(num_nonfinite == 0);

          std::vector<float> k(static_cast<size_t>(2) * kHeads * 21 * dim, -1.f);
          std::vector<float> v = k;
          FlattenKVParams f;
          f.k = k.data();
          f.v = v.data();
          f.max_len = 21;
          f.kv = cache.view();
          f.batch = step.View();
          invokeFlattenKV_v2(*device, f);

          double error = 0;
          bool stored = true;
          for (int t = 0; t < Step::kTokens; ++t) {
            for (int h = 0; h < heads; ++h) {
              const size_t at = (static_cast<size_t>(t) * heads + h) * dim;
              const bool value = h >= kQHeads + kHeads;
              const std::vector<double> want = ReferenceRow(
                  {input.begin() + at, input.begin() + at + dim}, bias.data() + h * dim,
                  value         ? nullptr
                  : h < kQHeads ? q_norm.data()
                                : k_norm.data(),
                  value ? nullptr : cos.data() + t * rope_dim / 2, sin.data() + t * rope_dim / 2,
                  rope_dim);
              for (int d = 0; d < dim; ++d) {
                error =
                    std::max(error, std::fabs(want[d] - qkv[at + d]) / (1 + std::fabs(want[d])));
              }
              if (h < kQHeads) {
                continue;
              }
              // The stored row is the codec's image of the row in place.
              const int head = (h - kQHeads) % kHeads;
              const KvSide side = value ? KvSide::kV : KvSide::kK;
              Encoded e = Empty(mode, dim, shape.dtype);
              std::vector<float> decoded(dim);
              const float g = cache.Factor(side, head);
              EncodeByCodec(mode, qkv.data() + at, dim, shape.dtype, g, e.payload.data(),
                            e.meta.data());
              DecodeByCodec(mode, e.payload.data(), e.meta.data(), dim, shape.dtype, g,
                            decoded.data());
              const int seq = t == 0 ? 0 : 1;
              const float* flat =
                  (value ? v : k).data() + ((seq * kHeads + head) * 21 + step.positions[t]) * dim;
              stored &= std::memcmp(flat, decoded.data(), dim * sizeof(float)) == 0;
            }
          }
          CHECK(error < kMaxError);
          CHECK(stored);
          // Slots at or beyond the context stay as they were.
          CHECK(k[(1 * kHeads * 21 + 8) * dim] == -1.f);
        }
      }
    }
  }
}

TEST_CASE("NaN and infinities are counted") {
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
  int64_t num_nonfinite = 40;
  ProcessKVParams p;
  p.qkv = qkv.data();
  p.q_heads = 2;
  p.kv = cache.view();
  p.batch = step.View();
  p.num_nonfinite = &num_nonfinite;
  invokeProcessKV_v2(*device, p);
  CHECK(num_nonfinite == 42);
}

TEST_CASE("ops refuse arguments that would index outside the cache") {
  const auto device = MakeCpuDevice(1);
  CacheShape shape;
  shape.block_seq_len = 16;
  shape.context = 64;
  TestCache cache(shape);
  std::vector<float> qkv(static_cast<size_t>(Step::kTokens) * 6 * 64);
  int64_t num_nonfinite = 0;
  const auto refused = [&](auto change) {
    Step step;
    ProcessKVParams p;
    p.qkv = qkv.data();
    p.q_heads = 2;
    p.kv = cache.view();
    p.batch = step.View();
    p.num_nonfinite = &num_nonfinite;
    change(step, p);
    CHECK_THROWS_AS(invokeProcessKV_v2(*device, p), InternalError);
  };
  refused([](Step& step, ProcessKVParams&) { step.tables[1] = -1; });
  refused([](Step& step, ProcessKVParams&) { step.positions[2] = 9; });
  refused([](Step&, ProcessKVParams& p) { p.q_heads = 3; });
  refused([](Step&, ProcessKVParams& p) { p.batch.block_table_stride = 1; });
  refused([](Step& step, ProcessKVParams&) { step.context_lens[1] = 4; });
}

}  // namespace
}  // namespace turbomind
