// Attention with heads of more than 256 values (backend/cuda/large_head), run thread by thread on
// the CPU. Decoding is compared with the CPU backend, and prompts with FP64 over the values that
// the codecs define.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/decode_fixture.h"
#include "cuda/prefill_fixture.h"
#include "turbomind/backend/cuda/large_head/large_head_ops.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {

namespace decode_step {
namespace {

using enum KvCacheMode;

constexpr int kBlockLens[] = {64, 32, 16, 128};
constexpr size_t kSmallShared = size_t{99} << 10;    // SM 86, 89 and 120
constexpr size_t kMediumShared = size_t{163} << 10;  // SM 80

void CheckCase(const Case& c, const std::vector<int32_t>& context_lens, int num_sms = 1,
               size_t shared_bytes = PropertiesOf(0).shared_bytes_per_block) {
  const Layer layer(c);
  TestGpu gpu(layer, num_sms);
  gpu.context().gpu.shared_bytes_per_block = shared_bytes;
  const Step step(layer, context_lens, FirstSequences(context_lens.size()));
  CheckClose(layer, step, gpu.Run(step));
}

// Return a case with other dimensions for every `i`.
Case Varied(KvCacheMode k, KvCacheMode v, size_t i) {
  Case c = {.k = k, .v = v, .head_dim = 512};
  c.block_seq_len = kBlockLens[i % 4];
  c.dtype = i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16;
  c.group = static_cast<int>(1 + i % 16);
  c.kv_heads = i % 5 == 4 ? 2 : 1;
  return c;
}

TEST_CASE("decoding with heads of 512 values matches the CPU for every listed pair of formats") {
  size_t i = 0;
  for (KvCacheMode k : kAllKvCacheModes) {
    for (KvCacheMode v : kAllKvCacheModes) {
      if (!IsListedPair(k, v)) {
        continue;
      }
      Case c = Varied(k, v, i);
      c.sinks = i % 3 == 0;
      c.score_cap = i % 4 == 3 ? 5.f : 0.f;
      c.max_seqs = 2;
      c.max_context = 90;
      CheckCase(c, {90, 33}, static_cast<int>(1 + i % 2));
      ++i;
    }
  }
}

TEST_CASE("decoding with every head_dim above 256 and any group of query heads") {
  size_t i = 0;
  for (const int head_dim : {272, 320, 400, 496, 512}) {
    for (const int group : {1, 8, 16, 17, 40}) {
      Case c = Varied(i % 2 == 0 ? kFp4Nv : kInt8, i % 2 == 0 ? kFp4Mx : kInt4, i);
      c.k = IsListedPair(c.k, c.v) ? c.k : c.v;
      c.head_dim = head_dim;
      c.group = group;
      c.max_seqs = 1;
      c.max_context = 70;
      CheckCase(c, {70});
      ++i;
    }
  }
}

TEST_CASE("decoding with large heads splits long contexts and counts sinks and means once") {
  Case c = {.head_dim = 512, .kv_heads = 2, .group = 9, .sinks = true, .mean = true};
  c.max_seqs = 2;
  c.max_context = 1100;
  CheckCase(c, {1100, 3}, 4);
  c.window = 700;
  c.kv_heads = 1;
  CheckCase(c, {1100, 650}, 8);
}

TEST_CASE("decoding with large heads reads 16-bit blocks and quantized ones as the rule says") {
  size_t i = 0;
  for (const PrecisionWindowTokens& window16 :
       {PrecisionWindowTokens{64, 64}, {0, 0}, {64, 0}, {0, 128}}) {
    for (const int window : {0, 100, -90}) {
      Case c = Varied(i % 3 == 0 ? kInt8 : i % 3 == 1 ? kFp8E4m3 : kFp4Nv, kFp4Nv, i);
      c.window = window;
      c.window16 = window16;
      c.sinks = c.mean = i % 2 == 0;
      c.group = 2;
      c.max_context = static_cast<int>(200 + 13 * i);
      CheckCase(c, {c.max_context, 64, static_cast<int32_t>(1 + 17 * i)});
      ++i;
    }
  }
}

TEST_CASE("decoding with large heads adds K offsets and fast biases in both pools") {
  size_t i = 0;
  for (const KvCacheMode format : {kFp4Nv, kFp4Mx, kInt4, kInt8, kFp8E4m3, kFp8E5m2}) {
    for (const KvCacheMode window_format : {kNone, kInt8}) {
      Case c = Varied(format, format, i);
      c.head_dim = i % 4 == 3 ? 320 : 512;
      c.group = 3;
      c.kv_heads = 2;
      c.window16 = i % 3 == 0 ? PrecisionWindowTokens{} : PrecisionWindowTokens{64, 64};
      c.window_format = window_format;
      c.k_offset = i % 4 != 1;
      c.fast_pairs = static_cast<int>(i % 3);
      c.score_cap = i % 5 == 4 ? 5.f : 0.f;
      c.max_context = 250;
      CheckCase(c, {250, 64});
      ++i;
    }
  }
}

TEST_CASE("a GPU with little shared memory runs large heads with smaller tiles") {
  for (const size_t shared_bytes : {kSmallShared, kMediumShared}) {
    for (const KvCacheMode format : {kNone, kInt8, kFp4Mx}) {
      for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16}) {
        Case c = {.k = format, .v = format, .dtype = dtype, .head_dim = 512, .group = 20};
        c.window16 = format == kInt8 ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
        c.max_seqs = 1;
        c.max_context = 150;
        CheckCase(c, {150}, 2, shared_bytes);
      }
    }
  }
}

// There is one launch for each pool, and one that merges unless the last block does.
TEST_CASE("a recorded step with large heads takes as many launches as one with smaller heads") {
  for (const bool has_window16 : {false, true}) {
    for (const int head_dim : {256, 512}) {
      Case c = {.k = kFp8E4m3, .v = kInt4, .head_dim = head_dim, .group = 4, .block_seq_len = 32};
      c.window16 = has_window16 ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
      c.sinks = true;
      c.max_context = 700;
      const Layer layer(c);
      TestGpu gpu(layer, 3);
      for (const auto& [lens, sequences] :
           std::vector<std::pair<std::vector<int32_t>, std::vector<int>>>{{{100, 600}, {0, 1}},
                                                                          {{101, 601}, {0, 1}},
                                                                          {{700, 1}, {2, 0}},
                                                                          {{30, 31}, {1, 2}}}) {
        const Step step(layer, lens, sequences);
        CheckClose(layer, step, gpu.RunRecorded(step));
        const int want = has_window16 ? 3 : 2;
        CHECK(gpu.num_launches().value_or(want) == want);
      }
      CHECK(gpu.graphs().num_replayed() > 0);
      gpu.planner().Use({LayerRule::Of(0, layer.rule), layer.q_heads(), c.kv_heads, 1},
                        {.slots_per_sm = 5, .waves = 2, .last_merges = true});
      for (const int32_t length : {650, 651, 652}) {
        const Step step(layer, {length, 64}, {1, 2});
        CheckClose(layer, step, gpu.RunRecorded(step));
        const int want = has_window16 ? 2 : 1;
        CHECK(gpu.num_launches().value_or(want) == want);
      }
    }
  }
}

std::string Refusal(const KvLayerView& view, const GpuProperties& gpu) {
  try {
    RequireLargeHeadKernels(view, gpu);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("layers with large heads that no kernel supports are refused by name") {
  GpuProperties gpu = PropertiesOf(0);
  const auto view = [](const Case& c) {
    return block::Layout(ConfigOf(c, c.k, c.v)).LayerView(0, nullptr, nullptr);
  };
  const Case large = {.k = kNone, .v = kNone, .head_dim = 512};
  CHECK(HasLargeHeads(view(large)));
  CHECK(!HasLargeHeads(view({.head_dim = 256})));
  CHECK(Refusal(view(large), gpu) == "");
  CHECK(Refusal(view({.dtype = DataType::kFloat32, .head_dim = 512}), gpu)
            .find("dtype float32 is not supported") == 0);
  gpu.shared_bytes_per_block = kSmallShared;
  for (const KvCacheMode k : kAllKvCacheModes) {
    for (const KvCacheMode v : kAllKvCacheModes) {
      if (IsListedPair(k, v)) {
        CHECK(Refusal(view({.k = k, .v = v, .head_dim = 512}), gpu) == "");
      }
    }
  }
  gpu.shared_bytes_per_block = 64 << 10;  // the limit of SM 75
  CHECK(Refusal(view(large), gpu).find("head_dim 512 does not fit") == 0);
}

}  // namespace
}  // namespace decode_step

namespace prefill_step {
namespace {

Case LargeCase(const FormatPair& pair, DataType dtype = DataType::kFloat16) {
  Case c = MakeCase(pair, 512, dtype);
  c.shape.kv_heads = 1;
  return c;
}

TEST_CASE("prompts with heads of 512 values match the codecs' values for every pair of formats") {
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    Case c = LargeCase(pair, i % 2 == 0 ? DataType::kFloat16 : DataType::kBFloat16);
    c.shape.head_dim = i % 7 == 6 ? 320 : 512;
    c.shape.block_seq_len = 16 << (i % 4);
    c.shape.context = 110;
    c.shape.kv_heads = 1 + i % 2;
    Batch b;
    b.chunks = {{90, 110}, {0, 6}};
    b.num_sms = i % 2 == 0 ? kManySms : 1;
    CheckKernel(c, b);
    ++i;
  }
}

TEST_CASE("prompts with large heads handle sliding windows, sinks, means and caps") {
  for (const int window : {0, 1, 30, 64, 100, -1, -50, -128}) {
    Case c = LargeCase({kFp4Nv, kFp4Nv});
    c.window = window;
    c.sinks = window != 30;
    c.mean = window != 100;
    c.score_cap = window > 50 ? 0.5f : 0.f;
    c.shape.context = 230;
    c.group = 3;
    Batch b;
    b.chunks = {{200, 230}, {0, 20}};
    CheckKernel(c, b);
  }
}

TEST_CASE("prompts with large heads handle 1 to 16 query heads per KV head") {
  for (int group = 1; group <= 16; ++group) {
    Case c = LargeCase({kFp8E4m3, kFp8E4m3});
    c.group = group;
    c.shape.kv_heads = 1 + group % 2;
    c.sinks = group % 3 == 0;
    Batch b;
    b.chunks = {{101, 107}, {0, 3}};
    b.num_sms = group % 4 < 2 ? 1 : kManySms;
    CheckKernel(c, b);
  }
}

TEST_CASE("every query of a prompt with large heads sees its own 16-bit window") {
  int i = 0;
  for (const PrecisionWindowTokens& window16 :
       {PrecisionWindowTokens{64, 64}, {64, 0}, {0, 64}, {64, 256}}) {
    for (const int window : {0, 100, -100}) {
      Case c = LargeCase(i % 3 == 0   ? FormatPair{kFp4Nv, kFp4Nv}
                         : i % 3 == 1 ? FormatPair{kNone, kInt4}
                                      : FormatPair{kFp8E4m3, kFp8E4m3},
                         i % 2 == 0 ? DataType::kBFloat16 : DataType::kFloat16);
      c.window16 = window16;
      c.window = window;
      c.window_format = i % 4 == 3 && i % 3 != 1 ? kInt8 : kNone;
      c.shape.k_offset = i % 3 != 1;
      c.shape.context = 333;
      c.shape.block_seq_len = 16 << (i % 4);
      Batch b;
      b.chunks = {{310, 333}, {0, 17}};
      b.num_sms = i % 5 == 0 ? 1 : kManySms;
      CheckKernel(c, b);
      ++i;
    }
  }
}

TEST_CASE("drafts over long contexts with large heads are cut into parts") {
  int i = 0;
  for (const FormatPair& pair : {FormatPair{kFp4Nv, kFp4Nv}, FormatPair{kNone, kNone}}) {
    for (const int recent : {-1, 64}) {
      Case c = LargeCase(pair, DataType::kBFloat16);
      c.shape.context = 1100;
      c.shape.kv_heads = 1 + i / 3;
      c.window = i % 2 == 0 ? 0 : 1060;
      c.sinks = c.mean = i > 1;
      c.window16 = {recent < 0 ? 0 : 64, recent};
      Batch b;
      b.chunks = {{20, 21}, {1096, 1100}, {30, 37}};
      b.num_decode = 1;
      b.num_sms = kManySms;
      const std::vector<float> split = CheckKernel(c, b);
      b.deterministic = true;
      const std::vector<float> whole = CheckKernel(c, b);
      CHECK(!SameBits(split, whole));
      b.num_sms = 1;
      CHECK(SameBits(whole, CheckKernel(c, b)));
      ++i;
    }
  }
}

TEST_CASE("a deterministic device gives rows of large heads the same bits in any batch and chunk") {
  for (const FormatPair& pair : {FormatPair{kNone, kNone}, FormatPair{kInt8, kFp4Mx}}) {
    Case c = LargeCase(pair, DataType::kBFloat16);
    c.group = 5;
    c.sinks = true;
    c.shape.context = 180;
    c.window = pair.k == kNone ? 90 : 0;
    c.window16 = {64, 64};
    c.shape.block_seq_len = 32;
    Batch whole;
    whole.deterministic = true;
    whole.chunks = {{130, 180}};
    const std::vector<float> want = CheckKernel(c, whole);
    const size_t row = static_cast<size_t>(c.group * c.shape.head_dim);
    for (const int size : {1, 17}) {
      Batch cut;
      cut.deterministic = true;
      cut.num_sms = size == 17 ? 1 : kManySms;
      for (int begin = size == 1 ? 170 : 130; begin < 180; begin += size) {
        cut.chunks.insert(cut.chunks.begin(), {begin, std::min(begin + size, 180)});
      }
      const std::vector<float> got = CheckKernel(c, cut);
      const float* next = got.data();
      for (const Chunk& chunk : cut.chunks) {
        const size_t count = static_cast<size_t>(chunk.end - chunk.begin) * row;
        CHECK(std::memcmp(want.data() + static_cast<size_t>(chunk.begin - 130) * row, next,
                          count * sizeof(float)) == 0);
        next += count;
      }
    }
  }
}

TEST_CASE("the largest score of a large head may come late") {
  constexpr float kLarge = 32.f;
  Case c = LargeCase({kFp4Nv, kFp4Nv});
  c.shape.context = 200;
  Caches caches(c);
  for (int t = 0; t < c.shape.context; ++t) {
    float* row = caches.quantized.Decoded(KvSide::kK, 0, t);
    std::for_each(row, row + c.shape.head_dim, [&](float& x) { x *= kLarge; });
  }
  Inputs in = MakeInputs(c);
  for (float& x : in.q) {  // exact in FP16, so that only the order of sums differs
    x = HalfToFloat(FloatToHalf(x));
  }
  Batch b;
  b.chunks = {{180, 200}};
  b.key_scale = kLarge;
  GpuRun run(c, caches, in, b);
  CHECK(RelativeError(c, caches, in, b, run.Run(b)) < kMaxHalfError);
}

// A rule that is off by one block must increase the error.
TEST_CASE("a wrong window rule of large heads is detected") {
  Case c = LargeCase({kInt4, kInt4});
  c.shape.context = 333;
  c.window16 = {64, 64};
  Batch b;
  b.chunks = {{320, 333}};
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

}  // namespace
}  // namespace prefill_step
}  // namespace turbomind::cuda
