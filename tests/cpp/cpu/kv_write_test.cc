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
  static constexpr float kBeta = 0.3f;

  ProcessCase(const CacheShape& shape, int rope_dim, bool norm_after_rope, std::mt19937& random)
      : dim_(shape.head_dim),
        rope_dim_(rope_dim),
        norm_after_rope_(norm_after_rope),
        cache_(shape) {
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
    p.norm_after_rope = norm_after_rope_;
    p.query_scaling = {.beta = kBeta, .length = 4, .offset = 1};
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
      const std::vector<float>& norm = head < kQHeads ? q_norm_ : k_norm_;
      if (!norm_after_rope_) {
        Normalize(want, norm);
      }
      Rotate(want, token);
      if (norm_after_rope_) {
        Normalize(want, norm);
      }
      const double periods = std::floor((step_.positions[token] + 1) / 4.0);
      for (double& x : want) {
        x *= head < kQHeads ? 1 + kBeta * std::log(1 + periods) : 1;
      }
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
    std::vector<uint8_t> payload(block::RowBytes(row_format.format, dim_, row_format.dtype));
    std::vector<uint8_t> metadata(block::ParamBytes(row_format.format, row_format.dtype) +
                                  block::ScaleBytes(row_format.format, dim_));
    std::vector<float> decoded(dim_);
    EncodeByCodec(row_format, qkv_.data() + RowAt(token, kQHeads + s * kHeads + head),
                  payload.data(), metadata.data());
    DecodeByCodec(row_format, payload.data(), metadata.data(), decoded.data());
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
  bool norm_after_rope_;
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

void CheckProcess(Device& device, const CacheShape& shape, int rope_dim, std::mt19937& random,
                  bool norm_after_rope = false) {
  constexpr double kMaxError = 1e-5;  // a dozen FP32 operations on values below 8
  ProcessCase c(shape, rope_dim, norm_after_rope, random);
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
          CheckProcess(*device, shape, rope_dim, random, true);
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
