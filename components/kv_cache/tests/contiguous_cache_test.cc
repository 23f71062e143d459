#include "kv_cache/contiguous_cache.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "sanitized_sample.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/ops/attention.h"
#include "turbomind/ops/flatten_kv.h"
#include "turbomind/ops/process_kv.h"

namespace turbomind {
namespace {

constexpr int kPagedBlock = 16;

ContiguousCacheConfig MakeConfig(KvCacheMode k, KvCacheMode v) {
  ContiguousCacheConfig config;
  config.layers = {{k, v}};
  config.q_heads = 6;
  config.kv_heads = 2;
  config.head_dim = 80;
  config.max_seq_len = 300;
  config.batch_size = 2;
  config.rotate_k = true;
  return config;
}

// Random Q, K and V of a prompt, [batch, heads, tokens, head_dim] each.
struct Prompt {
  Prompt(const ContiguousCacheConfig& config, int num_tokens) : c(config), tokens(num_tokens) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (auto [array, heads] : {std::pair(&q, c.q_heads), {&k, c.kv_heads}, {&v, c.kv_heads}}) {
      array->resize(static_cast<size_t>(c.batch_size) * heads * tokens * c.head_dim);
      std::generate(array->begin(), array->end(), [&] { return normal(random); });
    }
  }
  HeadRows Rows(const std::vector<float>& array, int heads, int first) const {
    const int64_t row = c.head_dim * int64_t{sizeof(float)};
    return {reinterpret_cast<const std::byte*>(array.data()) + first * row,
            DataType::kFloat32,
            {heads * tokens * row, tokens * row, row, int64_t{sizeof(float)}}};
  }
  NewRows New(int first, int count) const {
    return {Rows(k, c.kv_heads, first), Rows(v, c.kv_heads, first), count};
  }

  const ContiguousCacheConfig& c;
  int tokens;
  std::vector<float> q, k, v;
};

// [batch, tokens, heads, head_dim], so that results of pieces can be joined.
using TokenMajor = std::vector<float>;

void Join(const ContiguousCacheConfig& c, const std::vector<float>& piece, int first, int count,
          std::vector<TokenMajor>* tokens) {
  for (int i = 0; i < count; ++i) {
    TokenMajor& token = (*tokens)[static_cast<size_t>(first + i)];
    token.clear();
    for (int row = 0; row < c.batch_size * c.q_heads; ++row) {
      const float* from = piece.data() + (int64_t{row} * count + i) * c.head_dim;
      token.insert(token.end(), from, from + c.head_dim);
    }
  }
}

float Scale(const ContiguousCacheConfig& c) {
  return 1.f / std::sqrt(static_cast<float>(c.head_dim));
}

std::vector<float> Attend(ContiguousCache& cache, const Prompt& prompt, int first, int count) {
  const ContiguousCacheConfig& c = cache.config();
  std::vector<float> out(static_cast<size_t>(c.batch_size) * c.q_heads * count * c.head_dim, -7.f);
  cache.Attend(0, prompt.New(first, count),
               {.q = prompt.Rows(prompt.q, c.q_heads, first),
                .out = reinterpret_cast<std::byte*>(out.data()),
                .softmax_scale = Scale(c)});
  return out;
}

// Attends to a whole prompt in calls of these sizes, over and over.
std::vector<TokenMajor> AttendInCalls(ContiguousCache& cache, const Prompt& prompt,
                                      const std::vector<int>& sizes) {
  std::vector<TokenMajor> tokens(static_cast<size_t>(prompt.tokens));
  for (size_t call = 0; cache.seq_len() < prompt.tokens; ++call) {
    const int first = cache.seq_len();
    const int count = std::min(sizes[call % sizes.size()], prompt.tokens - first);
    Join(cache.config(), Attend(cache, prompt, first, count), first, count, &tokens);
    cache.Advance(count);
  }
  return tokens;
}

// Computes the same with the ops of the engine over a paged cache, in one step.
std::vector<TokenMajor> AttendPaged(Device& device, const Prompt& prompt) {
  const ContiguousCacheConfig& c = prompt.c;
  KvCacheConfig pool =
      MakeKvCacheConfig({0}, KvCacheMode::kNone, c.kv_heads, c.head_dim, kPagedBlock, c.dtype);
  pool.layers = c.layers;
  const int blocks = static_cast<int>(CeilDiv(prompt.tokens, kPagedBlock));
  const KvCache paged(device, pool, {int64_t{blocks} * c.batch_size});
  const int heads = c.q_heads + 2 * c.kv_heads;
  std::vector<float> qkv;
  std::vector<int32_t> positions, cu_seqlens = {0}, tables;
  for (int seq = 0; seq < c.batch_size; ++seq) {
    for (int i = 0; i < prompt.tokens; ++i) {
      positions.push_back(i);
      for (auto [array, n] :
           {std::pair(&prompt.q, c.q_heads), {&prompt.k, c.kv_heads}, {&prompt.v, c.kv_heads}}) {
        for (int head = 0; head < n; ++head) {
          const float* row =
              array->data() + ((int64_t{seq} * n + head) * prompt.tokens + i) * c.head_dim;
          qkv.insert(qkv.end(), row, row + c.head_dim);
        }
      }
    }
    cu_seqlens.push_back((seq + 1) * prompt.tokens);
    for (int i = 0; i < blocks; ++i) {
      tables.push_back(c.batch_size * blocks - 1 - (seq * blocks + i));
    }
  }
  const std::vector<int32_t> context_lens(static_cast<size_t>(c.batch_size), prompt.tokens);
  const BatchView batch = {.num_seqs = c.batch_size,
                           .num_tokens = c.batch_size * prompt.tokens,
                           .cu_seqlens = cu_seqlens.data(),
                           .context_lens = context_lens.data(),
                           .positions = positions.data(),
                           .block_tables = tables.data(),
                           .block_table_stride = blocks};
  int64_t num_nonfinite = 0;
  invokeProcessKV_v2(device, {.qkv = qkv.data(),
                              .q_heads = c.q_heads,
                              .rotate = c.rotate_k && c.layers[0].k != KvCacheMode::kNone,
                              .search_scales = c.search_scales,
                              .kv = paged.LayerView(0),
                              .batch = batch,
                              .num_nonfinite = &num_nonfinite});
  std::vector<float> out(static_cast<size_t>(batch.num_tokens) * c.q_heads * c.head_dim);
  invokePrefillAttention(device, {.q = qkv.data(),
                                  .q_stride = int64_t{heads} * c.head_dim,
                                  .out = out.data(),
                                  .q_heads = c.q_heads,
                                  .softmax_scale = Scale(c),
                                  .exact = c.exact,
                                  .window = c.window,
                                  .kv = paged.LayerView(0),
                                  .batch = batch});
  std::vector<TokenMajor> tokens(static_cast<size_t>(prompt.tokens));
  const int64_t row = int64_t{c.q_heads} * c.head_dim;
  for (int i = 0; i < batch.num_tokens; ++i) {
    TokenMajor& token = tokens[static_cast<size_t>(i % prompt.tokens)];
    token.insert(token.end(), out.begin() + i * row, out.begin() + (i + 1) * row);
  }
  return tokens;
}

bool SameBits(const std::vector<TokenMajor>& a, const std::vector<TokenMajor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const TokenMajor& x, const TokenMajor& y) {
                      return x.size() == y.size() &&
                             std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
                    });
}

std::shared_ptr<Device> MakeDevice(int threads) { return MakeCpuDevice(threads); }

TEST_CASE("attention has the bits of a paged cache, for every format and split into calls") {
  testing::SanitizedSample sample(5);
  for (const KvCacheMode k : kAllKvCacheModes) {
    for (const KvCacheMode v : {k, KvCacheMode::kFp4Nv}) {
      for (const bool exact : {false, true}) {
        if (!IsListedPair(k, v) || !sample.Next()) {
          continue;
        }
        CAPTURE(ToString(k));
        CAPTURE(ToString(v));
        ContiguousCacheConfig config = MakeConfig(k, v);
        config.exact = exact;
        const Prompt prompt(config, 211);
        const std::vector<TokenMajor> want = AttendPaged(*MakeDevice(1), prompt);
        for (const std::vector<int>& sizes :
             {std::vector{211}, std::vector{1, 64}, std::vector{3, 97, 2}}) {
          const int threads = sizes.front() == 1 ? 1 : 2;
          ContiguousCache cache(MakeDevice(threads), config);
          CHECK(SameBits(want, AttendInCalls(cache, prompt, sizes)));
        }
      }
    }
  }
}

TEST_CASE("a window's ring has the bits of a cache that keeps every block") {
  testing::SanitizedSample sample(3);
  for (const int window : {1, 2, 63, 64, 65, 130}) {
    for (const KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kFp4Nv, KvCacheMode::kInt8}) {
      if (!sample.Next()) {
        continue;
      }
      CAPTURE(window);
      ContiguousCacheConfig config = MakeConfig(format, format);
      config.window = window;
      config.max_seq_len = 1 << 30;
      const Prompt prompt(config, 3 * window + 270);
      const std::vector<TokenMajor> want = AttendPaged(*MakeDevice(1), prompt);
      for (const std::vector<int>& sizes :
           {std::vector{prompt.tokens}, std::vector{1}, std::vector{200, 1, 7}}) {
        ContiguousCache cache(MakeDevice(2), config);
        CHECK(SameBits(want, AttendInCalls(cache, prompt, sizes)));
        CHECK(cache.num_bytes() == ContiguousCache::PoolBytes(config));
      }
    }
  }
}

TEST_CASE("dense rows are those that new tokens see, with a window and without") {
  for (const int window : {0, 1, 40, 64, 100}) {
    CAPTURE(window);
    ContiguousCacheConfig config = MakeConfig(KvCacheMode::kNone, KvCacheMode::kNone);
    config.dtype = DataType::kFloat32;
    config.window = window;
    const Prompt prompt(config, 300);
    ContiguousCache cache(MakeDevice(1), config);
    for (const int count : {150, 1, 149}) {
      const int begin = cache.seq_len();
      const int end = begin + count;
      const int first = window == 0 ? 0 : std::max(0, begin + 1 - window);
      CHECK(cache.FirstDense(end, count) == first);
      const int64_t row = config.head_dim;
      const int64_t heads = int64_t{config.batch_size} * config.kv_heads;
      const auto check = [&](const std::vector<float>& dense, const std::vector<float>& given,
                             int from, int num_tokens) {
        for (int64_t head = 0; head < heads; ++head) {
          CHECK(std::equal(dense.begin() + head * num_tokens * row,
                           dense.begin() + (head + 1) * num_tokens * row,
                           given.begin() + (head * prompt.tokens + from) * row));
        }
      };
      std::vector<float> k(static_cast<size_t>(heads * (end - first) * row));
      std::vector<float> v(k.size());
      cache.Append(0, prompt.New(begin, count), {k.data(), v.data()});
      check(k, prompt.k, first, end - first);
      check(v, prompt.v, first, end - first);
      cache.Advance(count);
      const int kept = window == 0 ? 0 : std::max(0, end - window);
      CHECK(cache.FirstDense(end, 0) == kept);
      cache.Read(0, {k.data(), v.data()});
      check(k, prompt.k, kept, end - kept);
    }
  }
}

TEST_CASE("truncated tokens are computed again with the same bits") {
  ContiguousCacheConfig config = MakeConfig(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv);
  config.window = 70;
  const Prompt prompt(config, 300);
  const std::vector<TokenMajor> want = AttendPaged(*MakeDevice(1), prompt);
  ContiguousCache cache(MakeDevice(2), config);
  std::vector<TokenMajor> got = AttendInCalls(cache, prompt, {30});
  CHECK(SameBits(want, got));
  cache.Truncate(260);  // the ring still has what position 260 sees
  CHECK(cache.seq_len() == 260);
  Join(config, Attend(cache, prompt, 260, 40), 260, 40, &got);
  CHECK(SameBits(want, got));
  cache.Advance(25);  // accepts a part of the tokens
  CHECK(cache.seq_len() == 285);
  Join(config, Attend(cache, prompt, 285, 15), 285, 15, &got);
  CHECK(SameBits(want, got));
  CHECK_THROWS_AS(cache.Truncate(100), InvalidArgument);
  CHECK(cache.seq_len() == 285);
  cache.Reset();
  CHECK(SameBits(want, AttendInCalls(cache, prompt, {300})));
}

TEST_CASE("a repeated call overwrites the tokens of the one before") {
  const ContiguousCacheConfig config = MakeConfig(KvCacheMode::kInt4, KvCacheMode::kInt4);
  const Prompt prompt(config, 20);
  ContiguousCache cache(MakeDevice(1), config);
  Attend(cache, prompt, 5, 15);
  const std::vector<float> first = Attend(cache, prompt, 0, 9);
  CHECK_THROWS_AS(cache.Advance(10), InvalidArgument);
  cache.Advance(9);
  CHECK_THROWS_AS(cache.Advance(1), InvalidArgument);
  ContiguousCache fresh(MakeDevice(1), config);
  CHECK(Attend(fresh, prompt, 0, 9) == first);
}

TEST_CASE("a ring rejects a call whose window an earlier call has dropped") {
  ContiguousCacheConfig config = MakeConfig(KvCacheMode::kInt8, KvCacheMode::kInt8);
  config.window = 64;
  const Prompt prompt(config, 300);
  ContiguousCache cache(MakeDevice(1), config);
  Attend(cache, prompt, 0, 100);
  cache.Advance(100);
  Attend(cache, prompt, 100, 200);
  CHECK_THROWS_AS(Attend(cache, prompt, 100, 1), InvalidArgument);
  CHECK_THROWS_AS(cache.Advance(1), InvalidArgument);
  cache.Advance(200);
  CHECK(cache.seq_len() == 300);
}

TEST_CASE("NaN and infinities are stored and counted") {
  const ContiguousCacheConfig config = MakeConfig(KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E4m3);
  Prompt prompt(config, 3);
  prompt.v[0] = NAN;
  prompt.v[1] = -INFINITY;
  ContiguousCache cache(MakeDevice(1), config);
  cache.Append(0, prompt.New(0, 3));
  CHECK(cache.num_nonfinite() == 2);
}

TEST_CASE("a bad configuration or call is rejected and changes nothing") {
  const ContiguousCacheConfig good = MakeConfig(KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv);
  for (int ContiguousCacheConfig::*field :
       {&ContiguousCacheConfig::q_heads, &ContiguousCacheConfig::kv_heads,
        &ContiguousCacheConfig::head_dim, &ContiguousCacheConfig::max_seq_len,
        &ContiguousCacheConfig::batch_size, &ContiguousCacheConfig::window}) {
    for (const int value : {-1, 2147483647}) {
      ContiguousCacheConfig bad = good;
      bad.*field = value;
      CHECK_THROWS_AS(ContiguousCache(MakeDevice(1), bad), InvalidArgument);
    }
  }
  ContiguousCacheConfig huge = good;
  huge.max_seq_len = 1 << 20;
  huge.batch_size = 65536;
  huge.layers.resize(4096, {KvCacheMode::kNone, KvCacheMode::kNone});
  CHECK_THROWS_AS(ContiguousCache(MakeDevice(1), huge), OutOfMemory);
  const Prompt prompt(good, 301);
  ContiguousCache cache(MakeDevice(1), good);
  CHECK_THROWS_AS(cache.Append(1, prompt.New(0, 1)), InvalidArgument);
  CHECK_THROWS_AS(cache.Append(-1, prompt.New(0, 1)), InvalidArgument);
  CHECK_THROWS_AS(cache.Append(0, prompt.New(0, 0)), InvalidArgument);
  CHECK_THROWS_AS(cache.Append(0, prompt.New(0, 301)), InvalidArgument);
  CHECK_THROWS_AS(cache.Truncate(1), InvalidArgument);
  cache.Append(0, prompt.New(0, 299));
  CHECK_THROWS_AS(cache.Append(0, prompt.New(0, 301)), InvalidArgument);
  cache.Advance(299);
  CHECK_THROWS_WITH_AS(cache.Append(0, prompt.New(0, 2)),
                       "k_new has 2 tokens at position 299. At most 1 fit until max_seq_len 300. "
                       "Make a larger cache or call reset().",
                       InvalidArgument);
}

}  // namespace
}  // namespace turbomind
