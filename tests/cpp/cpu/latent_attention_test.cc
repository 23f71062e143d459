// Attention over latents on the CPU against double precision, and its bits.

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_isa.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/layout.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/latent.h"
#include "turbomind/ops/quantize_blocks.h"

namespace turbomind {
namespace {

constexpr float kSentinel = 12345.f;
// Largest error against double precision, relative to the largest |v|. FP32: 576 products and 600
// weights (observed: 3e-6). FP4 in 8 bits: observed 0.012.
constexpr double kMaxError = 2e-5;
constexpr double kMaxErrorBytes = 0.03;

struct Case {
  KvCacheMode format = KvCacheMode::kNone;
  int heads = 16;
  int rank = 64;
  int rotary = 32;
  int block_seq_len = 32;
  int context = 300;
  int first = 270;  // queries are positions [first, context)
  PrecisionWindowTokens window16 = {};
  KvCacheMode rotary_format = KvCacheMode::kNone;
  KvCacheMode window_format = KvCacheMode::kNone;
  bool exact = false;
  bool rotate = false;
  bool offset = false;  // of blocks that leave the window
  float mean = 0.f;     // the size of the means of blocks
};

// A cache of one sequence whose blocks are poisoned up to the written rows.
class LatentCache {
 public:
  LatentCache(Device& device, const Case& c)
      : device_(device),
        case_(c),
        rule_(MakePrecisionWindow(c.window16, c.block_seq_len)),
        quantized_(MakeLayout(c, c.rotary_format, c.format, c.offset)),
        window16_(MakeLayout(c, KvCacheMode::kNone, c.window_format, false)),
        num_blocks_((c.context + c.block_seq_len - 1) / c.block_seq_len),
        tables_(static_cast<size_t>(num_blocks_)) {
    for (auto& [layout, data, scales] :
         {std::tie(quantized_, data_[0], scales_[0]), std::tie(window16_, data_[1], scales_[1])}) {
      data.assign(static_cast<size_t>(2 * num_blocks_ * layout.block_bytes()), std::byte{0xff});
      scales.assign(static_cast<size_t>(2 * num_blocks_ * layout.scale_block_bytes()),
                    std::byte{0xff});
    }
    for (int i = 0; i < num_blocks_; ++i) {
      tables_[static_cast<size_t>(i)] = 2 * (num_blocks_ - 1 - i) + 1;  // every second one
    }
    Fill();
  }

  KvLayerView kv() { return View(quantized_, 0); }
  KvLayerView window16() { return rule_.enabled() ? View(window16_, 1) : KvLayerView{}; }
  const PrecisionWindow& rule() const { return rule_; }

  // A batch of one sequence whose new tokens are the positions [begin, end).
  struct Batch {
    std::vector<int32_t> lens, contexts, positions;
    BatchView view;
  };
  Batch MakeBatch(int begin, int end, bool decode) {
    Batch batch = {{0, end - begin}, {end}, {}, {}};
    batch.positions.resize(static_cast<size_t>(end - begin));
    std::iota(batch.positions.begin(), batch.positions.end(), begin);
    batch.view = {.num_seqs = 1,
                  .num_decode = decode ? 1 : 0,
                  .num_tokens = end - begin,
                  .cu_seqlens = batch.lens.data(),
                  .context_lens = batch.contexts.data(),
                  .positions = batch.positions.data(),
                  .block_tables = tables_.data(),
                  .block_table_stride = num_blocks_,
                  .window16_tables = tables_.data()};
    return batch;
  }

 private:
  static block::Layout MakeLayout(const Case& c, KvCacheMode k, KvCacheMode v, bool offset) {
    return block::Layout({.layers = {{k, v}},
                          .kv_heads = 1,
                          .head_dim = c.rank,
                          .rotary_dim = c.rotary,
                          .block_seq_len = c.block_seq_len,
                          .k_offset = offset});
  }
  KvLayerView View(const block::Layout& layout, size_t pool) {
    return layout.LayerView(0, data_[pool].data(), scales_[pool].data());
  }

  void Fill() {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const size_t tokens = static_cast<size_t>(case_.context);
    std::vector<float> rows(tokens * static_cast<size_t>(case_.rank + case_.rotary));
    std::generate(rows.begin(), rows.end(), [&] { return normal(random); });
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t width = rows.size() / tokens;
      const size_t block = i / width / static_cast<size_t>(case_.block_seq_len);
      rows[i] += case_.mean * std::sin(static_cast<float>(i % width + 7 * block));
    }
    std::vector<float> q(tokens * static_cast<size_t>(case_.rotary));
    const std::vector<float> angles(q.size(), 0.6f);
    Batch batch = MakeBatch(0, case_.context, false);
    int64_t num_nonfinite = 0;
    invokeWriteLatents(device_, {.q = q.data(),
                                 .rows = rows.data(),
                                 .q_heads = 1,
                                 .rope_cos = angles.data(),
                                 .rope_sin = angles.data(),
                                 .rotate = case_.rotate,
                                 .kv = kv(),
                                 .window16 = window16(),
                                 .batch = batch.view,
                                 .num_nonfinite = &num_nonfinite});
    if (rule_.enabled()) {
      std::vector<PendingQuantization> pending;
      for (const int32_t block : tables_) {
        pending.push_back({block, block});
      }
      invokeQuantizeBlocks(device_, {.kv = kv(),
                                     .window16 = window16(),
                                     .blocks_to_quantize = pending.data(),
                                     .num_to_quantize = static_cast<int>(pending.size())});
    }
  }

  Device& device_;
  Case case_;
  PrecisionWindow rule_;
  block::Layout quantized_, window16_;
  int num_blocks_;
  std::vector<int32_t> tables_;
  std::vector<std::byte> data_[2], scales_[2];
};

std::vector<float> Queries(const Case& c, int width, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(c.context) * static_cast<size_t>(c.heads * width));
  std::generate(q.begin(), q.end(), [&] { return normal(random); });
  return q;
}

// Returns a factor with which random scores have a standard deviation of 2.
float ScaleOf(const Case& c) { return 2.f / std::sqrt(static_cast<float>(c.rank + c.rotary)); }

// Attends with the positions [first, context) in chunks, the last of which are of one token.
// Returns [context, heads, rank]; rows before `first` keep the sentinel.
std::vector<float> Attend(Device& device, LatentCache& cache, const Case& c, int chunk) {
  const std::vector<float> q = Queries(c, c.rank, 5);
  const std::vector<float> rotary = Queries(c, c.rotary, 6);
  std::vector<float> out(q.size(), kSentinel);
  const int64_t stride = int64_t{c.heads} * c.rank;
  const int64_t rotary_stride = int64_t{c.heads} * c.rotary;
  for (int begin = c.first; begin < c.context;) {
    const int end = std::min(begin + chunk, c.context);
    LatentCache::Batch batch = cache.MakeBatch(begin, end, end - begin == 1);
    invokeLatentAttention(device, {.q = q.data() + begin * stride,
                                   .q_stride = stride,
                                   .q_rotary = rotary.data() + begin * rotary_stride,
                                   .q_rotary_stride = rotary_stride,
                                   .q_rotary_head_stride = c.rotary,
                                   .out = out.data() + begin * stride,
                                   .q_heads = c.heads,
                                   .softmax_scale = ScaleOf(c),
                                   .rotate = c.rotate,
                                   .exact = c.exact,
                                   .kv = cache.kv(),
                                   .window16 = cache.window16(),
                                   .rule = cache.rule(),
                                   .batch = batch.view});
    begin = end;
  }
  return out;
}

// Multiplies each run with the normalized Hadamard matrix, (-1)^popcount(i & j) / sqrt(size).
void RotateBack(int size, std::vector<float>& x) {
  const std::vector<float> from = x;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t run = i / static_cast<size_t>(size) * static_cast<size_t>(size);
    double sum = 0;
    for (size_t j = 0; j < static_cast<size_t>(size); ++j) {
      sum += std::popcount((i - run) & j) % 2 == 0 ? from[run + j] : -from[run + j];
    }
    x[i] = static_cast<float>(sum / std::sqrt(static_cast<double>(size)));
  }
}

// Returns the largest error of the outputs, relative to the largest |v|.
double ErrorOf(Device& device, LatentCache& cache, const Case& c, const std::vector<float>& got) {
  const std::vector<float> q = Queries(c, c.rank, 5);
  const std::vector<float> rotary = Queries(c, c.rotary, 6);
  std::vector<float> k(static_cast<size_t>(c.context) * static_cast<size_t>(c.rotary));
  std::vector<float> v(static_cast<size_t>(c.context) * static_cast<size_t>(c.rank));
  double worst = 0;
  double largest = 0;
  const auto dot = [](const float* a, const float* b, int n) {
    return std::inner_product(a, a + n, b, 0.0, std::plus<>(),
                              [](double x, double y) { return x * y; });
  };
  for (int position = c.first; position < c.context; ++position) {
    LatentCache::Batch batch = cache.MakeBatch(position, position + 1, true);
    invokeFlattenKV_v2(device, {.k = k.data(),
                                .v = v.data(),
                                .max_len = c.context,
                                .kv = cache.kv(),
                                .window16 = cache.window16(),
                                .rule = cache.rule(),
                                .batch = batch.view});
    if (c.rotate) {
      RotateBack(c.rank == 192 ? 64 : c.rank, v);
    }
    for (int head = 0; head < c.heads; ++head) {
      const int64_t row = int64_t{position} * c.heads + head;
      std::vector<double> weights;
      for (int t = 0; t <= position; ++t) {
        weights.push_back(std::exp(
            ScaleOf(c) * (dot(q.data() + row * c.rank, v.data() + t * c.rank, c.rank) +
                          dot(rotary.data() + row * c.rotary, k.data() + t * c.rotary, c.rotary))));
      }
      const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
      for (int d = 0; d < c.rank; ++d) {
        double wanted = 0;
        for (int t = 0; t <= position; ++t) {
          const double value = v[static_cast<size_t>(t * c.rank + d)];
          wanted += weights[static_cast<size_t>(t)] * value;
          largest = std::max(largest, std::abs(value));
        }
        worst =
            std::max(worst, std::abs(got[static_cast<size_t>(row * c.rank + d)] - wanted / sum));
      }
    }
  }
  return worst / largest;
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const KvCacheMode format : kAllKvCacheModes) {
    cases.push_back({.format = format, .heads = 16, .exact = true});
    cases.push_back({.format = format, .heads = 5, .rank = 192, .rotary = 16});
  }
  for (const KvCacheMode format : {KvCacheMode::kFp4Nv, KvCacheMode::kInt8}) {
    cases.push_back(
        {.format = format, .heads = 20, .block_seq_len = 16, .first = 250, .window16 = {64, 64}});
  }
  cases.push_back({.format = KvCacheMode::kFp4Nv,
                   .heads = 3,
                   .block_seq_len = 64,
                   .window16 = {64, 64},
                   .window_format = KvCacheMode::kInt8});
  cases.push_back({.format = KvCacheMode::kFp4Mx,
                   .heads = 40,
                   .rank = 512,
                   .rotary = 64,
                   .block_seq_len = 128,
                   .first = 297});
  cases.push_back({.format = KvCacheMode::kFp4Nv, .rotary_format = KvCacheMode::kInt8});
  cases.push_back({.exact = true, .rotate = true});
  cases.push_back({.heads = 5, .rank = 192, .rotary = 16, .first = 296, .rotate = true});
  cases.push_back({.format = KvCacheMode::kFp4Mx,
                   .rank = 512,
                   .rotary = 64,
                   .block_seq_len = 128,
                   .first = 298,
                   .rotate = true});
  cases.push_back({.format = KvCacheMode::kFp4Nv,
                   .heads = 20,
                   .rank = 192,
                   .block_seq_len = 16,
                   .first = 290,
                   .window16 = {64, 64},
                   .window_format = KvCacheMode::kInt8,
                   .exact = true,
                   .rotate = true});
  // Offsets: several in a tile of 64 tokens, one, and one for two tiles. Only FP4 has bytes.
  const int lengths[] = {16, 32, 64, 128};
  int next = 0;
  for (const KvCacheMode format : kAllKvCacheModes) {
    for (const int length : lengths) {
      ++next;
      if (!IsFp4(format) && next % 3 != 0) {
        continue;
      }
      cases.push_back({.format = format,
                       .heads = next % 2 == 0 ? 20 : 3,
                       .rank = next % 3 == 0 ? 192 : 64,
                       .block_seq_len = length,
                       .context = 400,
                       .first = length < 64 ? 380 : 391,  // a block leaves the window
                       .window16 = {length == 128 ? 128 : 64, 64},
                       .window_format = format != KvCacheMode::kNone && length == 32
                                            ? KvCacheMode::kInt8
                                            : KvCacheMode::kNone,
                       .exact = next % 5 == 0,
                       .rotate = next / 2 % 2 == 0,
                       .offset = true,
                       .mean = 2.f});
    }
  }
  return cases;
}

bool InBytes(const Case& c) { return IsFp4(c.format) && !c.exact; }

TEST_CASE("attention over latents equals double precision") {
  const auto device = MakeCpuDevice(2);
  for (const Case& c : Cases()) {
    LatentCache cache(*device, c);
    const std::vector<float> got = Attend(*device, cache, c, 7);
    const double error = ErrorOf(*device, cache, c, got);
    MESSAGE(std::string(ToString(c.format)), ", ", c.heads, " heads: ", error);
    CHECK(error <= (InBytes(c) ? kMaxErrorBytes : kMaxError));
    CHECK(std::all_of(got.begin(), got.begin() + int64_t{c.first} * c.heads * c.rank,
                      [](float x) { return x == kSentinel; }));
  }
}

TEST_CASE("latents: every instruction set returns the same bits, in chunks of any size") {
  for (const Case& c : Cases()) {
    const auto device = MakeCpuDevice(1, "scalar");
    LatentCache cache(*device, c);
    const std::vector<float> wanted = Attend(*device, cache, c, 1000);
    for (const std::string& isa : AvailableCpuIsas()) {
      for (const int chunk : {1, 7, 1000}) {
        const auto other = MakeCpuDevice(chunk == 7 ? 3 : 1, isa);
        const std::vector<float> got = Attend(*other, cache, c, chunk);
        CAPTURE(isa);
        CAPTURE(chunk);
        CAPTURE(ToString(c.format));
        CHECK(std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("an offset takes the mean of a block out of its latents") {
  const auto device = MakeCpuDevice(1);
  for (const KvCacheMode window : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
    double errors[2];
    for (const bool offset : {false, true}) {
      Case c = {.format = KvCacheMode::kFp4Nv,
                .window16 = {64, 64},
                .window_format = window,
                .rotate = true,
                .offset = offset,
                .mean = 100.f};
      LatentCache cache(*device, c);
      const auto read = [&](const KvLayerView& view) {
        std::vector<float> k(static_cast<size_t>(c.context * c.rotary));
        std::vector<float> v(static_cast<size_t>(c.context * c.rank));
        LatentCache::Batch batch = cache.MakeBatch(c.context - 1, c.context, true);
        batch.view.window16_tables = nullptr;
        invokeFlattenKV_v2(
            *device,
            {.k = k.data(), .v = v.data(), .max_len = c.context, .kv = view, .batch = batch.view});
        return v;
      };
      const std::vector<float> wanted = read(cache.window16());
      const std::vector<float> got = read(cache.kv());
      double sum = 0;
      const auto whole = static_cast<size_t>(c.context / c.block_seq_len * c.block_seq_len);
      for (size_t i = 0; i < whole * static_cast<size_t>(c.rank); ++i) {
        sum += std::pow(got[i] - wanted[i], 2.0);
      }
      errors[offset ? 1 : 0] = std::sqrt(sum / static_cast<double>(whole) / c.rank);
    }
    MESSAGE("NVFP4 without an offset: ", errors[0], ", with one: ", errors[1]);
    CHECK(errors[1] < 0.2);  // of deviations of 1: 2^-4 of each value, and the step of the offset
    CHECK(errors[0] > 2);
  }
}

TEST_CASE("a row of latents has the bytes of the design") {
  const auto bytes = [](KvCacheMode k, KvCacheMode v) {
    return block::Layout({.layers = {{k, v}}, .kv_heads = 1, .head_dim = 512, .rotary_dim = 64})
        .bytes_per_token();
  };
  CHECK(bytes(KvCacheMode::kNone, KvCacheMode::kNone) == 1152);
  CHECK(bytes(KvCacheMode::kNone, KvCacheMode::kInt8) == 644);
  CHECK(bytes(KvCacheMode::kNone, KvCacheMode::kFp8E4m3) == 640);
  CHECK(bytes(KvCacheMode::kNone, KvCacheMode::kInt4) == 388);
  CHECK(bytes(KvCacheMode::kNone, KvCacheMode::kFp4Nv) == 416);
  CHECK(bytes(KvCacheMode::kInt8, KvCacheMode::kFp4Mx) == 356);
  // An offset per block of 64 tokens has 516 bytes, in whole cache lines.
  CHECK(block::Layout({.layers = {{KvCacheMode::kNone, KvCacheMode::kFp4Nv}},
                       .kv_heads = 1,
                       .head_dim = 512,
                       .rotary_dim = 64,
                       .k_offset = true})
            .bytes_per_token() == 416 + 576 / 64);
  CHECK_THROWS_WITH_AS(bytes(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv),
                       doctest::Contains("rotary part"), InvalidArgument);
}

TEST_CASE("RoPE of latents rotates neighbors or halves") {
  const auto device = MakeCpuDevice(1);
  const Case c = {.rank = 16, .rotary = 16, .context = 1, .first = 0};
  for (const bool interleaved : {false, true}) {
    LatentCache cache(*device, c);
    LatentCache::Batch batch = cache.MakeBatch(0, 1, true);
    std::vector<float> q(16 + 3);
    std::iota(q.begin(), q.end(), 1.f);
    std::vector<float> rows(32, 1.f);
    std::vector<float> cos(8, 0.f);
    const std::vector<float> sin(8, 1.f);
    int64_t num_nonfinite = 0;
    invokeWriteLatents(*device, {.q = q.data(),
                                 .rows = rows.data(),
                                 .q_heads = 1,
                                 .nope_dim = 3,
                                 .rope_cos = cos.data(),
                                 .rope_sin = sin.data(),
                                 .interleaved = interleaved,
                                 .kv = cache.kv(),
                                 .batch = batch.view,
                                 .num_nonfinite = &num_nonfinite});
    CHECK(q[2] == 3.f);                           // the part without RoPE
    CHECK(q[3] == (interleaved ? -5.f : -12.f));  // -1 times its partner
    CHECK(q[interleaved ? 4 : 11] == 4.f);
    CHECK(rows[15] == 1.f);
    CHECK(rows[16] == -1.f);
  }
}

}  // namespace
}  // namespace turbomind
