#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "cpu/kv_quality_fixture.h"
#include "sanitized_sample.h"
#include "turbomind/kv/k_offset.h"

namespace turbomind {
namespace {

// Attention over given offsets.

Case OffsetCase(const FormatPair& pair, int dim, int block, KvCacheMode window_format) {
  Case c = BlockCase(pair, dim, block);
  c.shape.dtype = dim == 80 ? DataType::kFloat16 : DataType::kBFloat16;
  c.shape.k_offset = true;
  c.group = block == 16 ? 1 : block == 128 ? 7 : 3;
  c.window = block == 128 ? 200 : 0;
  c.sinks = block >= 64;
  c.mean = block == 64;
  c.window_format = window_format;
  return c;
}

// Larger scores cancel more digits: the offsets are three times as large as the keys.
constexpr double kOffsetFactor = 4;

void CheckOffsets(const Case& c, const std::string& isa) {
  Case exact = c;
  exact.exact = true;
  const bool affine = Affine({c.shape.k, c.shape.v}) || c.window_format == KvCacheMode::kInt8;
  CheckBits(exact, isa, kOffsetFactor * (affine ? kMaxErrorAffine : kMaxError));
  Case rounded = c;
  rounded.exact = false;
  CheckBits(rounded, isa, kOffsetFactor * kMaxErrorRounded);
}

TEST_CASE("prefill and decode add K offsets with the same bits, close to double precision") {
  constexpr int kStride = 7;  // coprime to the loops, so that every value of each is reached
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {64, 80, 128}) {
      for (int block : {16, 64, 128}) {
        for (KvCacheMode window_format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
          if (i++ % kStride == 0) {
            CheckOffsets(OffsetCase(pair, dim, block, window_format), BestIsa());
          }
        }
      }
    }
  }
}

TEST_CASE("K offsets without a window and with a score cap match the reference") {
  for (KvCacheMode format : kAllKvCacheModes) {
    Case c = OffsetCase({format, format}, 64, 64, KvCacheMode::kNone);
    c.window16 = {};
    CheckOffsets(c, BestIsa());
    c.sinks = c.mean = false;
    c.score_cap = 5.f;
    CheckOffsets(c, BestIsa());
  }
}

TEST_CASE("with K offsets, every instruction set returns the same bits") {
  for (KvCacheMode format : kAllKvCacheModes) {
    for (int block : {16, 64}) {
      CheckEveryIsa(OffsetCase({format, format}, 80, block, KvCacheMode::kInt8));
    }
  }
}

TEST_CASE("the reference detects a K offset that is left out") {
  Case c = OffsetCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, 64, 64, KvCacheMode::kNone);
  ThreadPool pool(1);
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  const std::vector<float> out =
      RunChunks(CpuKvKernelsFor(BestIsa()), pool, c, caches, in, c.shape.context);
  Case without = c;
  without.shape.k_offset = false;
  Caches other(without);
  CHECK(ErrorOf(without, other, in, out) > 100 * kMaxErrorRounded);
}

}  // namespace
}  // namespace turbomind

namespace turbomind::kv_quality {
namespace {

// Offsets that the ops store.

Ingredients WithOffsets(KvCacheMode window_format, bool k_bias) {
  return {.rotate = true,
          .search = true,
          .mean = true,
          .window16 = {64, 64},
          .window_format = window_format,
          .k_offset = true,
          .k_bias = k_bias};
}

// Returns key `token` as the window stores it, by the definition.
std::vector<float> InWindow(Layer& layer, Sequence& sequence, int head, int token) {
  const KvLayerView& view = layer.window16().view();
  const int n = view.head_dim;
  const float* key = sequence.Row(token, kQHeads + head);  // already without its base
  std::vector<uint8_t> payload(static_cast<size_t>(n) * 4);
  std::vector<uint8_t> meta(64);
  std::vector<float> row(static_cast<size_t>(n));
  const RowFormat format = {view.format[0], n, view.dtype, 1.f, false};
  EncodeByCodec(format, key, payload.data(), meta.data());
  DecodeByCodec(format, payload.data(), meta.data(), row.data());
  return row;
}

// Returns the offset that the window subtracts from every key of a head, which is the bias minus
// the mean, rotated.
std::vector<float> BaseOf(const KvLayerView& window16, const float* mean) {
  std::vector<float> base(static_cast<size_t>(window16.head_dim), 0.f);
  if (window16.HasKOffset()) {
    for (size_t d = 0; d < base.size(); ++d) {
      base[d] = BiasOf(static_cast<int>(d)) - mean[d];
    }
    FastestCpuRowKernels().rotate_row(base.data(), window16.head_dim);
    std::vector<uint8_t> payload(base.size());
    std::vector<uint8_t> meta(8);
    StoreKOffset({payload.data(), meta.data()}, window16.head_dim, window16.dtype, 1, base.data());
  }
  return base;
}

// Checks that a quantized block stores the mean of its keys as the window has them, and what
// remains of each key.
void CheckBlock(Layer& layer, Sequence& sequence, int block) {
  const KvLayerView& view = layer.quantized().view();
  const int n = view.head_dim;
  const int64_t id = layer.quantized().table()[static_cast<size_t>(block)];
  for (int head = 0; head < kHeads; ++head) {
    const std::vector<float> base =
        BaseOf(layer.window16().view(), sequence.mean.data() + static_cast<int64_t>(head) * n);
    std::vector<std::vector<float>> keys;
    std::vector<float> offset(static_cast<size_t>(n), 0.f);
    std::vector<float> run(static_cast<size_t>(n));
    for (int slot = 0; slot < view.block_seq_len; ++slot) {
      keys.push_back(InWindow(layer, sequence, head, block * view.block_seq_len + slot));
      for (size_t d = 0; layer.window16().view().HasKOffset() && d < base.size(); ++d) {
        keys.back()[d] += base[d];
      }
      AddToKOffset(keys.back().data(), slot, n, view.dtype, run.data(), offset.data());
    }
    std::vector<uint8_t> codes(static_cast<size_t>(n));
    std::vector<uint8_t> params(8);
    StoreKOffset({codes.data(), params.data()}, n, view.dtype, view.block_seq_len, offset.data());
    const KvRow stored = view.KOffset(id, head);
    CHECK(std::memcmp(stored.payload, codes.data(), codes.size()) == 0);
    CHECK(std::memcmp(stored.metadata, params.data(),
                      static_cast<size_t>(2 * SizeOf(view.dtype))) == 0);
    int different = 0;
    for (int slot = 0; slot < view.block_seq_len; ++slot) {
      std::vector<float> rest = keys[static_cast<size_t>(slot)];
      for (size_t d = 0; d < rest.size(); ++d) {
        rest[d] -= offset[d];
      }
      std::vector<uint8_t> payload(static_cast<size_t>(n) * 4);
      std::vector<uint8_t> meta(64);
      EncodeByCodec(
          {view.format[0], n, view.dtype, layer.quantized().GlobalScale(KvSide::kK, head), true},
          rest.data(), payload.data(), meta.data());
      different += std::memcmp(view.Row(KvSide::kK, id, head, slot).payload, payload.data(),
                               static_cast<size_t>(view.row_bytes[0])) != 0;
    }
    CHECK(different == 0);
  }
}

TEST_CASE("a block that leaves the window stores the mean of its keys and what remains") {
  testing::SanitizedSample sample(5);
  for (const std::string& isa : AvailableCpuIsas()) {
    for (KvCacheMode format : kAllKvCacheModes) {
      for (KvCacheMode window_format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
        for (bool k_bias : {false, true}) {
          if (format == KvCacheMode::kNone || !sample.Next()) {
            continue;
          }
          INFO(isa << " " << std::string(ToString(format)) << " window of "
                   << std::string(ToString(window_format)) << " bias " << k_bias);
          const CacheShape shape = Shape(format, 64, 64);
          Sequence sequence(shape, 21);
          Layer layer(shape, WithOffsets(window_format, k_bias), isa);
          RunSteps(layer, sequence, shape.context, 70);
          for (int block : {1, 2}) {
            CheckBlock(layer, sequence, block);
          }
        }
      }
    }
  }
}

TEST_CASE("with K offsets, every chunk size returns the same outputs bit for bit") {
  for (KvCacheMode format : kAllKvCacheModes) {
    if (format == KvCacheMode::kNone) {
      continue;  // has no offsets
    }
    for (int block : {16, 64, 128}) {
      for (bool windowed : {false, true}) {
        const CacheShape shape = Shape(format, 64, block, 420);
        std::vector<float> want;
        for (int chunk : {420, 1, 7, 64, 130}) {
          INFO(std::string(ToString(format)) << " block " << block << " chunk " << chunk);
          Sequence sequence(shape, 33);
          Ingredients with = WithOffsets(KvCacheMode::kInt8, true);
          with.window16 = windowed ? with.window16 : PrecisionWindowTokens{};
          Layer layer(shape, with);
          const std::vector<float> got = RunSteps(layer, sequence, shape.context, chunk);
          want = want.empty() ? got : want;
          CHECK(SameBits(want, got));
          CHECK(layer.num_nonfinite() == 0);
        }
      }
    }
  }
}

// Returns the largest difference between outputs with a bias of K in every channel, which a 16-bit
// cache does not notice, and outputs of a 16-bit cache.
double ErrorWithBias(KvCacheMode format, const Ingredients& with) {
  CacheShape shape = Shape(format, 64, 64, 420);
  Sequence sequence(shape, 9);
  for (int token = 0; token < shape.context; ++token) {
    for (int head = kQHeads; head < kQHeads + kHeads; ++head) {
      for (int d = 0; d < shape.head_dim; ++d) {
        sequence.Row(token, head)[d] += BiasOf(d);
      }
    }
  }
  CacheShape exact = shape;
  exact.k = exact.v = KvCacheMode::kNone;
  exact.dtype = DataType::kFloat32;
  Sequence copy = sequence;
  Layer plain(exact, {});
  const std::vector<float> want = RunSteps(plain, copy, shape.context, 100);
  Layer layer(shape, with);
  const std::vector<float> got = RunSteps(layer, sequence, shape.context, 100);
  double sum = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    sum += std::fabs(want[i] - got[i]);
  }
  return sum / static_cast<double>(want.size());
}

TEST_CASE("K offsets remove a bias of K from the error of every format") {
  for (KvCacheMode format : kAllKvCacheModes) {
    if (format == KvCacheMode::kNone) {
      continue;
    }
    INFO(std::string(ToString(format)));
    Ingredients raw;
    const double without = ErrorWithBias(format, raw);
    raw.k_offset = raw.k_bias = true;
    CHECK(ErrorWithBias(format, raw) < 0.7 * without);
    Ingredients balanced = WithOffsets(KvCacheMode::kInt8, true);
    balanced.mean = false;
    const double with_offset = ErrorWithBias(format, balanced);
    balanced.k_offset = balanced.k_bias = false;
    CHECK(with_offset < ErrorWithBias(format, balanced));
  }
}

TEST_CASE("keys that are not finite leave the K offset of their block finite") {
  const CacheShape shape = Shape(KvCacheMode::kFp4Nv, 64);
  Sequence sequence(shape, 2);
  sequence.Row(100, kQHeads)[5] = INFINITY;
  sequence.Row(101, kQHeads)[6] = NAN;
  Layer layer(shape, WithOffsets(KvCacheMode::kNone, false));
  RunSteps(layer, sequence, shape.context, 64);
  std::vector<float> offset(64);
  DecodeKOffset(layer.quantized().view(), layer.quantized().table()[1], 0, offset.data());
  for (const float x : offset) {
    CHECK(std::isfinite(x));
  }
}

}  // namespace
}  // namespace turbomind::kv_quality
