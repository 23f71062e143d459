// Runs prefill attention of the CUDA backend thread by thread on the CPU (cuda_shim/shim.h).
// Compares it with FP64 attention over the values that the codecs define.

#include "turbomind/backend/cuda/prefill/prefill_ops.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/prefill_fixture.h"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda::prefill_step {

TEST_CASE("prefill matches the codecs' values for every pair of formats") {
  constexpr int kDims[] = {64, 80, 96, 128, 256};
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      Case c = MakeCase(pair, kDims[i % 5], dtype);
      c.shape.block_seq_len = 16 << (i % 4);
      Batch b;
      b.chunks = {{110, 150}};
      b.num_sms = i % 2 == 0 ? kManySms : 1;
      CheckBatch(c, b);
      ++i;
    }
  }
}

TEST_CASE("prefill matches the codecs' values at every head_dim from position 0 on") {
  for (int dim : {64, 80, 96, 128, 256}) {
    for (DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      Case c = MakeCase({kNone, kNone}, dim, dtype);
      c.shape.context = 130;
      c.shape.kv_heads = 1;
      Batch b;
      b.chunks = {{0, 130}};
      CheckBatch(c, b);
    }
  }
}

TEST_CASE("prefill handles sliding windows, sinks, means and caps" * doctest::test_suite("small")) {
  for (int window : {0, 1, 30, 64, 100, 400, -1, -50, -128}) {
    Case c = MakeCase({kFp4Nv, kFp4Nv}, 64);
    c.window = window;
    c.sinks = window != 30;
    c.mean = window != 100;
    c.score_cap = window > 50 ? 0.5f : 0.f;
    c.shape.context = 290;
    c.group = 3;
    Batch b;
    b.chunks = {{200, 290}, {0, 70}};
    CheckBatch(c, b);
  }
}

TEST_CASE("prefill handles 1 to 16 query heads per KV head") {
  for (int group = 1; group <= 16; ++group) {
    Case c = MakeCase({kFp8E4m3, kFp8E4m3}, 64);
    c.group = group;
    c.shape.kv_heads = 1 + group % 2;
    c.sinks = group % 3 == 0;
    Batch b;
    b.chunks = {{101, 114}, {0, 5}};
    b.num_sms = group % 4 < 2 ? 1 : kManySms;
    CheckBatch(c, b);
  }
}

TEST_CASE("every query sees its own 16-bit window") {
  constexpr PrecisionWindowTokens kSizes[] = {{64, 64}, {64, 0},    {0, 64},
                                              {0, 0},   {128, 128}, {64, 256}};
  int i = 0;
  for (const PrecisionWindowTokens& window16 : kSizes) {
    for (int window : {0, 100, 40, -100, -192}) {
      Case c =
          MakeCase(i % 3 == 0   ? FormatPair{kFp4Nv, kFp4Nv}
                   : i % 3 == 1 ? FormatPair{kNone, kInt4}
                                : FormatPair{kFp8E4m3, kFp8E4m3},
                   i % 4 == 0 ? 128 : 64, i % 2 == 0 ? DataType::kBFloat16 : DataType::kFloat16);
      c.window16 = window16;
      c.window = window;
      c.sinks = i % 2 == 0;
      c.mean = i % 3 == 0;
      c.shape.kv_heads = 1 + i % 2;
      c.shape.context = 333;
      c.shape.block_seq_len = 16 << (i % 4);
      Batch b;
      b.chunks = {{250, 333}, {0, 37}};
      b.num_sms = i % 5 == 0 ? 1 : kManySms;
      CheckBatch(c, b);
      ++i;
    }
  }
}

TEST_CASE("prefill adds K offsets and reads int8 windows") {
  constexpr int kDims[] = {64, 80, 96, 128, 256};
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    if (pair.k == kNone) {
      continue;
    }
    for (KvCacheMode window_format : {kNone, kInt8}) {
      Case c = MakeCase(pair, kDims[i % 5], i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16);
      c.shape.k_offset = i % 4 != 3;
      c.shape.block_seq_len = 16 << (i % 4);
      c.shape.context = 250;
      c.window16 = i % 3 == 2 ? PrecisionWindowTokens{} : PrecisionWindowTokens{64, 64};
      c.window_format = window_format;
      Batch b;
      b.chunks = {{210, 250}, {0, 21}};
      b.num_sms = i % 2 == 0 ? kManySms : 1;
      CheckBatch(c, b);
      ++i;
    }
  }
}

TEST_CASE("prefill adds the fast bias in both pools, for every format of K") {
  int i = 0;
  for (KvCacheMode format : {kFp4Nv, kFp4Mx, kInt4, kInt8, kFp8E4m3, kFp8E5m2}) {
    for (KvCacheMode window_format : {kNone, kInt8}) {
      Case c = MakeCase({format, format}, i % 2 == 0 ? 64 : 128);
      c.shape.k_offset = i % 3 != 2;
      c.shape.context = 250;
      c.window16 = {64, 64};
      c.window_format = window_format;
      c.fast_pairs = 1 + i % 3;
      Batch b;
      b.chunks = {{210, 250}, {0, 21}};
      b.scratch_bytes = i % 4 < 2 ? kPrefillScratchBytes : 1;  // all heads at once, or one by one
      CheckBatch(c, b);
      ++i;
    }
  }
}

// A rule that is off by one block must increase the error.
TEST_CASE("a wrong window rule is detected") {
  Case c = MakeCase({kInt4, kInt4}, 64);
  c.shape.context = 333;
  c.window16 = {64, 64};
  Batch b;
  b.chunks = {{290, 333}};
  Caches caches(c);
  const Inputs in = MakeInputs(c);
  GpuRun run(c, caches, in, b);
  const std::vector<float> out = run.Run(b);
  CHECK(RelativeError(c, caches, in, b, out) < kMaxHalfError);
  for (const PrecisionWindowTokens& other :
       {PrecisionWindowTokens{0, 64}, PrecisionWindowTokens{64, 0},
        PrecisionWindowTokens{64, 128}}) {
    Case wrong = c;
    wrong.window16 = other;
    Caches wrong_caches(wrong);
    CHECK(RelativeError(wrong, wrong_caches, in, b, out) > 5 * kMaxHalfError);
  }
}

TEST_CASE("prefill skips decode sequences and splits many sequences into several launches") {
  Case c = MakeCase({kInt8, kInt8}, 64);
  Batch b;
  b.chunks = {{149, 150}, {10, 11}};
  b.num_decode = 2;
  for (int i = 0; i < kMaxPrefillSequences + 3; ++i) {
    b.chunks.push_back({i, i + 1 + i % 3});
  }
  b.num_sms = kManySms;
  CheckBatch(c, b);
}

TEST_CASE("little scratch memory gives the same bits") {
  for (const FormatPair& pair : {FormatPair{kInt4, kInt4}, FormatPair{kFp8E4m3, kFp4Nv}}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase(pair, 64, DataType::kBFloat16);
      c.shape.kv_heads = 3;
      c.group = 1;
      c.sinks = true;
      c.shape.context = 200;
      c.window16.recent_tokens = recent;
      Batch b;
      b.chunks = {{170, 200}, {0, 20}, {60, 70}};
      const std::vector<float> want = CheckBatch(c, b);
      for (int64_t rows : {1, 500}) {
        b.scratch_bytes = rows * 2 * 2 * c.shape.head_dim;
        CHECK(SameBits(want, CheckBatch(c, b)));
      }
    }
  }
}

TEST_CASE("a sequence has the same bits for every chunking and tile size") {
  Case c = MakeCase({kFp4Mx, kFp4Mx}, 64);
  c.shape.context = 180;
  c.window = 90;
  c.window16 = {64, 64};
  c.shape.block_seq_len = 32;
  Batch whole;
  whole.chunks = {{0, 180}};
  const std::vector<float> want = CheckBatch(c, whole);
  whole.num_sms = kManySms;
  CHECK(SameBits(want, CheckBatch(c, whole)));
  for (int size : {1, 17, 64}) {
    Batch cut;
    cut.num_sms = size == 17 ? 1 : kManySms;
    for (int begin = size == 1 ? 170 : 0; begin < 180; begin += size) {
      cut.chunks.push_back({begin, std::min(begin + size, 180)});
    }
    const std::vector<float> got = CheckBatch(c, cut);
    CHECK(std::memcmp(want.data() + want.size() - got.size(), got.data(),
                      got.size() * sizeof(float)) == 0);
  }
}

TEST_CASE("few queries of a long context split its positions" * doctest::test_suite("small")) {
  int i = 0;
  for (const FormatPair& pair :
       {FormatPair{kFp4Nv, kFp4Nv}, FormatPair{kNone, kNone}, FormatPair{kInt8, kFp4Mx}}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase(pair, i == 3 ? 256 : i == 4 ? 80 : 64, DataType::kBFloat16);
      c.shape.context = 1100;
      c.group = 2;
      c.shape.kv_heads = 1 + i / 4;
      c.window = i % 2 == 0 ? 0 : 1060;
      c.sinks = c.mean = i > 1;
      c.window16 = {recent < 0 ? 0 : 64, recent};
      Batch b;
      b.chunks = {{20, 21}, {1093, 1100}, {30, 37}, {1080, 1081}};
      b.num_decode = 1;
      b.num_sms = kManySms;
      const std::vector<float> split = CheckBatch(c, b);
      b.deterministic = true;
      const std::vector<float> whole = CheckBatch(c, b);
      CHECK(!SameBits(split, whole));
      b.num_sms = 1;
      CHECK(SameBits(whole, CheckBatch(c, b)));
      if (c.shape.kv_heads > 1) {
        b.deterministic = false;
        b.num_sms = kManySms;
        b.scratch_bytes = 1;
        CheckBatch(c, b);  // each sequence and head separately
      }
      ++i;
    }
  }
}

// Queries are exact in FP16, so that only the order of the sums differs from the reference.
TEST_CASE("prefill scales its sums down when later positions have much larger scores") {
  constexpr float kLarge = 32.f;
  Case c = MakeCase({kFp4Nv, kFp4Nv}, 64);
  c.shape.context = 460;
  Caches caches(c);
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    for (int t = 0; t < c.shape.context; ++t) {
      float* row = caches.quantized.Decoded(KvSide::kK, head, t);
      std::for_each(row, row + c.shape.head_dim, [&](float& x) { x *= kLarge; });
    }
  }
  Inputs in = MakeInputs(c);
  for (float& x : in.q) {
    x = HalfToFloat(FloatToHalf(x));
  }
  Batch b;
  b.chunks = {{420, 460}};
  b.key_scale = kLarge;
  GpuRun run(c, caches, in, b);
  for (const PrefillProducts products : {PrefillProducts::kMma, PrefillProducts::kWarpGroups}) {
    b.products = products;
    CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
  }
}

// The softmax scale cancels the global scale of keys; that of values appears in the reference.
TEST_CASE("prefill handles the largest and smallest scales") {
  constexpr float kLarge = 0x1p62f;
  for (float scale : {kLarge, 1 / kLarge}) {
    for (int recent : {-1, 64}) {
      Case c = MakeCase({kFp4Nv, kFp4Nv}, 64);
      c.shape.context = 260;
      c.window16.recent_tokens = recent;
      Batch b;
      b.chunks = {{220, 260}};
      b.value_scale = scale;
      if (recent < 0) {
        b.key_scale = scale;
        b.softmax_factor = 1 / scale;
      }
      Caches caches(c);
      for (int head = 0; head < c.shape.kv_heads; ++head) {
        for (int t = 0; t < c.shape.context; ++t) {
          float* row = caches.quantized.Decoded(KvSide::kV, head, t);
          std::for_each(row, row + c.shape.head_dim, [&](float& x) { x *= scale; });
        }
      }
      const Inputs in = MakeInputs(c);
      GpuRun run(c, caches, in, b);
      for (const PrefillProducts products : {PrefillProducts::kMma, PrefillProducts::kWarpGroups}) {
        b.products = products;
        CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
      }
    }
  }
}

TEST_CASE("BF16 values beyond FP16 become the largest FP16 value") {
  Case c = MakeCase({kNone, kInt4}, 64, DataType::kBFloat16);
  c.shape.context = 64;
  c.window16 = {};
  Caches caches(c);
  std::vector<float> row(64, 0.f);
  row[3] = -1e30f;
  for (int head = 0; head < c.shape.kv_heads; ++head) {
    caches.quantized.Write(KvSide::kK, head, 5, row.data());
    caches.quantized.Decoded(KvSide::kK, head, 5)[3] = -65504.f;
  }
  const Inputs in = MakeInputs(c);
  Batch b;
  b.chunks = {{20, 50}};
  GpuRun run(c, caches, in, b);
  CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
}

}  // namespace turbomind::cuda::prefill_step
