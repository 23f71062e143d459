// The scores of a model whose K has a bias, through the ops of a step: written, quantized, read.

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/kv_quality_fixture.h"
#include "turbomind/model/k_bias.h"

namespace turbomind::kv_quality {
namespace {

constexpr int kDim = 64;
constexpr int kContext = 512;
constexpr int kBlock = 64;

RopeTable QwenRope() {
  RopeConfig config;
  config.kind = RopeKind::kDefault;
  config.theta = 1e6f;
  config.dim = kDim;
  return RopeTable(config);
}

enum class Pairs { kSlow, kFast, kBoth };

// Returns a bias, [kHeads, kDim], of `size` in some channels of every head.
std::vector<float> BiasIn(int channels, Pairs pairs, float size) {
  std::vector<float> bias(kHeads * kDim, 0.f);
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < channels; ++i) {
      const bool fast = pairs == Pairs::kFast || (pairs == Pairs::kBoth && i % 2 == 0);
      const int pair = fast ? i : kDim / 2 - 1 - i;
      const int half = (i / 2 + head) % 2;  // of a pair: its first or its second channel
      bias[static_cast<size_t>(head * kDim + half * kDim / 2 + pair)] = i % 3 == 1 ? -size : size;
    }
  }
  return bias;
}

// RoPE's cos and sin of all positions, and those of the middle of each position's block.
struct Angles {
  explicit Angles(const RopeTable& rope) {
    for (int position = 0; position < kContext; ++position) {
      Add(rope, position, &cos, &sin);
      Add(rope, position / kBlock * kBlock + kBlock / 2, &block_cos, &block_sin);
    }
  }
  static void Add(const RopeTable& rope, int position, std::vector<float>* cos,
                  std::vector<float>* sin) {
    cos->resize(cos->size() + kDim / 2);
    sin->resize(sin->size() + kDim / 2);
    rope.Fill(&position, nullptr, 1, cos->data() + cos->size() - kDim / 2,
              sin->data() + sin->size() - kDim / 2);
  }
  std::vector<float> cos, sin, block_cos, block_sin;
};

std::vector<double> Turned(const float* x, const float* bias, const Angles& angles, int position) {
  std::vector<double> y(kDim);
  for (int i = 0; i < kDim / 2; ++i) {
    const double a = x[i] + double{bias == nullptr ? 0.f : bias[i]};
    const double b = x[kDim / 2 + i] + double{bias == nullptr ? 0.f : bias[kDim / 2 + i]};
    const double cos = angles.cos[static_cast<size_t>(position * kDim / 2 + i)];
    const double sin = angles.sin[static_cast<size_t>(position * kDim / 2 + i)];
    y[static_cast<size_t>(i)] = a * cos - b * sin;
    y[static_cast<size_t>(kDim / 2 + i)] = b * cos + a * sin;
  }
  return y;
}

double Dot(const float* q, const float* x) { return std::inner_product(q, q + kDim, x, 0.); }

// Returns the mean error of the scores of the last 64 queries with quantized keys.
double ScoreError(KvCacheMode format, const std::vector<float>& bias) {
  const RopeTable rope = QwenRope();
  const Angles angles(rope);
  std::vector<float> slow = bias;
  const FastPairs fast = TakeFastPairs(&slow, kDim, rope, kBlock);
  const std::vector<float> waves = MakeWaves(fast.pairs, rope, kContext);
  const std::vector<float> base = MakeKBase(slow, kDim, &rope, kBlock);
  std::vector<float> qkv_bias(kAllHeads * kDim, 0.f);
  std::copy(slow.begin(), slow.end(), qkv_bias.begin() + kQHeads * kDim);
  const auto adjust = [&](WriteKvParams& p, int begin) {
    const int64_t at = int64_t{begin} * kDim / 2;
    p.bias = qkv_bias.data();
    p.k_base = base.data();
    p.rope_dim = kDim;
    p.rope_cos = angles.cos.data() + at;
    p.rope_sin = angles.sin.data() + at;
    p.block_cos = angles.block_cos.data() + at;
    p.block_sin = angles.block_sin.data() + at;
  };
  const CacheShape shape = Shape(format, kDim, kBlock, kContext);
  Layer layer(shape, {.rotate = true,
                      .search = true,
                      .window16 = {64, 64},
                      .window_format = KvCacheMode::kInt8,
                      .k_offset = true,
                      .k_bias = true,
                      .adjust_write = adjust});
  const Sequence given(shape, 4);
  Sequence written = given;
  RunSteps(layer, written, kContext, 100);
  std::vector<float> k;
  std::vector<float> v;
  const int32_t context = kContext;
  layer.Flatten(k, v, context);
  double error = 0;
  int count = 0;
  for (int query = kContext - 64; query < kContext; ++query) {
    for (int q_head = 0; q_head < kQHeads; ++q_head) {
      const int head = q_head / kGroup;
      Sequence exact = given;
      const std::vector<double> q = Turned(exact.Row(query, q_head), nullptr, angles, query);
      // The directions are not rotated, so they are multiplied by the query before its rotation.
      const std::vector<float> unrotated(q.begin(), q.end());
      for (int t = 64; t < kContext - 192; ++t) {
        const std::vector<double> key =
            Turned(exact.Row(t, kQHeads + head), bias.data() + head * kDim, angles, t);
        double score = Dot(written.Row(query, q_head),
                           k.data() + (static_cast<int64_t>(head) * kContext + t) * kDim);
        for (int i = 0; i < fast.num_pairs; ++i) {
          const int pair = head * fast.num_pairs + i;
          for (int wave = 0; wave < 2; ++wave) {
            score += Dot(unrotated.data(), fast.directions.data() + (2 * pair + wave) * kDim) *
                     waves[static_cast<size_t>((2 * pair + wave) * kContext + t)];
          }
        }
        error += std::fabs(score - std::inner_product(q.begin(), q.end(), key.begin(), 0.));
        ++count;
      }
    }
  }
  return error / count;
}

TEST_CASE("scores with 4 bits are as exact with a bias of K of any size and frequency as without") {
  for (KvCacheMode format : {KvCacheMode::kFp4Nv, KvCacheMode::kFp4Mx, KvCacheMode::kInt4}) {
    const double without = ScoreError(format, BiasIn(0, Pairs::kSlow, 0.f));
    for (const Pairs pairs : {Pairs::kSlow, Pairs::kFast, Pairs::kBoth}) {
      for (const int channels : {2, 8}) {
        for (const float size : {10.f, 100.f, 300.f}) {
          const double with = ScoreError(format, BiasIn(channels, pairs, size));
          INFO(std::string(ToString(format))
               << " pairs " << static_cast<int>(pairs) << " channels " << channels << " size "
               << size << " error " << with << " without " << without);
          CHECK(with < 1.2 * without);
        }
      }
    }
  }
}

}  // namespace
}  // namespace turbomind::kv_quality
