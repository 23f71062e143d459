#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "sanitized_sample.h"

namespace turbomind {
namespace {

TEST_CASE("prefill and decode return the same bits, close to double precision") {
  testing::SanitizedSample sample(42);
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {64, 80, 96, 128, 256, 512}) {
      for (int group : {1, 3, 7, 9}) {
        for (int window : {0, 100, -90}) {
          if (!sample.Next()) {
            continue;
          }
          Case c;
          c.shape.k = pair.k;
          c.shape.v = pair.v;
          c.shape.head_dim = dim;
          c.shape.dtype = dim == 96 ? DataType::kFloat16 : DataType::kBFloat16;
          c.group = group;
          c.window = window;
          c.sinks = (group + window / 100) % 2 == 0;
          c.first = dim <= 80 ? 200 : 270;
          CheckCase(c, BestIsa(), Affine(pair));
        }
      }
    }
  }
}

TEST_CASE("every instruction set returns the same bits for attention") {
  for (const FormatPair& pair : ListedPairs()) {
    for (int group : {2, 5}) {
      Case c;
      c.shape.k = pair.k;
      c.shape.v = pair.v;
      c.shape.head_dim = group == 2 ? 80 : 64;
      c.shape.kv_heads = 1;
      c.group = group;
      c.window = group == 2 ? 70 : 0;
      c.sinks = group == 2;
      c.first = 312;
      const std::vector<float> want = CheckCase(c, BestIsa(), Affine(pair));
      for (const std::string& isa : AvailableCpuIsas()) {
        CHECK(SameBits(want, CheckCase(c, isa, Affine(pair))));
      }
    }
  }
}

TEST_CASE("every instruction set returns the same bits for heads of 512 values") {
  for (const FormatPair& pair : ListedPairs()) {
    Case c;
    c.shape.k = pair.k;
    c.shape.v = pair.v;
    c.shape.head_dim = 512;
    c.shape.kv_heads = 1;
    c.window = pair.k == pair.v ? 70 : 0;
    CheckEveryIsa(c);
  }
}

// Sums of 512 products with codes of 255 need more than 32 bits, unless queries have fewer.
TEST_CASE("scores of wide heads with the largest codes do not overflow") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kInt8;
  c.shape.head_dim = 512;
  c.exact = false;
  Caches caches(c);
  Inputs in = MakeInputs(c);
  std::fill(in.q.begin(), in.q.end(), 1.f);
  for (int token = 0; token < c.shape.context; ++token) {
    std::vector<float> row(512, token % 2 == 0 ? 1.f : 0.5f);
    row[0] = 0.f;
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      caches.quantized.Write(KvSide::kK, head, token, row.data());
    }
  }
  ThreadPool pool(1);
  for (const std::string& isa : AvailableCpuIsas()) {
    for (int chunk : {1, 64}) {
      CHECK(ErrorOf(c, caches, in, RunChunks(CpuKvKernelsFor(isa), pool, c, caches, in, chunk)) <
            kMaxErrorRounded);
    }
  }
}

TEST_CASE("attention is correct for all block lengths, cache dtypes and short contexts") {
  for (KvCacheMode format : kAllKvCacheModes) {
    for (int block : {16, 32, 64, 128}) {
      for (int context : {1, 15, 64, 65, 257}) {
        Case c;
        c.shape.k = c.shape.v = format;
        c.shape.block_seq_len = block;
        c.shape.context = context;
        c.shape.dtype = block == 16   ? DataType::kFloat32
                        : block == 32 ? DataType::kFloat16
                                      : DataType::kBFloat16;
        c.first = 0;
        CheckCase(c, BestIsa(), Affine({format, format}));
      }
    }
  }
}

// 11 splits for each of 3 heads, in runs of 2. Some runs begin with one head and end with the next.
TEST_CASE("attention is correct if a run has several splits") {
  for (const std::string& isa : AvailableCpuIsas()) {
    for (KvCacheMode format : {KvCacheMode::kFp4Nv, KvCacheMode::kNone}) {
      Case c;
      c.shape.k = c.shape.v = format;
      c.shape.kv_heads = 3;
      c.shape.context = 2700;
      c.first = c.shape.context - 2;
      c.window16 = {64, 64};
      CheckCase(c, isa, false);
      c.window16 = {};
      c.group = 9;  // needs more than one kernel call
      c.window = 2500;
      CheckCase(c, isa, false);
    }
  }
}

TEST_CASE("attention is correct for small heads") {
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {16, 32, 48}) {
      Case c;
      c.shape.k = pair.k;
      c.shape.v = pair.v;
      c.shape.head_dim = dim;
      c.shape.context = 100;
      c.first = 0;
      CheckCase(c, BestIsa(), Affine(pair));
    }
  }
}

TEST_CASE("soft caps of scores have the same bits for prefill, decode and instruction sets") {
  testing::SanitizedSample sample(5);
  for (const FormatPair& pair : ListedPairs()) {
    if (!sample.Next()) {
      continue;
    }
    Case c;
    c.shape.k = pair.k;
    c.shape.v = pair.v;
    c.group = 5;
    c.window = pair.k == pair.v ? 100 : 0;
    c.sinks = pair.k != pair.v;
    c.score_cap = 0.75f;  // most scores are above it
    const std::vector<float> want = CheckCase(c, BestIsa(), Affine(pair));
    for (const std::string& isa : AvailableCpuIsas()) {
      CHECK(SameBits(want, CheckCase(c, isa, Affine(pair))));
    }
    c.score_cap = 0.f;
    CHECK_FALSE(SameBits(want, CheckCase(c, BestIsa(), Affine(pair))));
  }
}

TEST_CASE("slots and blocks that a query does not see have no effect") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (const FormatPair& pair : ListedPairs()) {
    for (bool exact : {true, false}) {
      Case c;
      c.shape.k = pair.k;
      c.shape.v = pair.v;
      c.window = 100;
      c.first = 300;
      c.exact = exact;
      const Inputs in = MakeInputs(c);
      Caches clean(c, 0x00);
      const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 64);
      for (int poison : {0x7f, 0xff, 0x7e}) {
        Caches cache(c, static_cast<uint8_t>(poison));
        cache.quantized.table()[0] = cache.quantized.table()[1] = cache.quantized.table()[2] =
            -1;  // before every window
        CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 64)));
        CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 1)));
      }
    }
  }
}

TEST_CASE("a NaN value affects only the queries that see it") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E5m2}) {
    Case c;
    c.shape.k = c.shape.v = format;
    c.shape.kv_heads = 1;
    c.first = 260;
    const Inputs in = MakeInputs(c);
    Caches clean(c);
    const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 1);
    Caches cache(c);
    std::vector<float> row(c.shape.head_dim, std::numeric_limits<float>::quiet_NaN());
    cache.quantized.Write(KvSide::kV, 0, 300, row.data());
    const std::vector<float> whole = RunChunks(kernels, pool, c, cache, in, 333);
    const size_t before = static_cast<size_t>(300 - c.first) * c.group * c.shape.head_dim;
    CHECK(std::memcmp(want.data(), whole.data(), before * sizeof(float)) == 0);
    CHECK(std::all_of(whole.begin() + before, whole.end(), [](float x) { return std::isnan(x); }));
  }
}

TEST_CASE("a NaN or an infinity in a query affects only its own head") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (KvCacheMode format : {KvCacheMode::kInt8, KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    Case c;
    c.shape.k = c.shape.v = format;
    c.first = 300;
    c.exact = false;
    Caches cache(c);
    const Inputs clean = MakeInputs(c);
    const int64_t row = int64_t{c.group} * c.shape.kv_heads * c.shape.head_dim;
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      Inputs in = clean;
      in.q[static_cast<size_t>(310 * row + c.shape.head_dim + 5)] = bad;  // head 1
      for (int chunk : {1, 64}) {
        std::vector<float> want = RunChunks(kernels, pool, c, cache, clean, chunk);
        std::vector<float> got = RunChunks(kernels, pool, c, cache, in, chunk);
        const auto head = got.begin() + (310 - c.first) * row + c.shape.head_dim;
        CHECK(std::all_of(head, head + c.shape.head_dim, [](float x) { return std::isnan(x); }));
        std::copy_n(want.begin() + (head - got.begin()), c.shape.head_dim, head);
        CHECK(SameBits(want, got));
      }
    }
  }
}

TEST_CASE("queries and value scales of zero return zero") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (KvCacheMode format : {KvCacheMode::kInt8, KvCacheMode::kInt4, KvCacheMode::kFp4Nv}) {
    Case c;
    c.shape.k = c.shape.v = format;
    c.shape.context = 100;
    c.first = 90;
    c.exact = false;
    Caches cache(c);
    const std::vector<float> zeros(static_cast<size_t>(c.shape.head_dim));
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      for (int token = 0; token < c.shape.context; ++token) {
        cache.quantized.Write(KvSide::kV, head, token, zeros.data());
      }
    }
    Inputs in = MakeInputs(c);
    std::fill(in.q.begin(), in.q.end(), 0.f);
    for (int chunk : {1, 64}) {
      const std::vector<float> out = RunChunks(kernels, pool, c, cache, in, chunk);
      CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 0.f; }));
    }
  }
}

TEST_CASE("the reference detects a dropped sink and a wrong sliding window") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kFp4Nv;
  c.window = 50;
  c.sinks = true;
  ThreadPool pool(2);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  Caches cache(c);
  const Inputs in = MakeInputs(c);
  Case without_sinks = c;
  without_sinks.sinks = false;
  Case without_window = c;
  without_window.window = 0;
  Case wider = c;
  wider.window = 51;
  for (int chunk : {1, 64}) {
    const std::vector<float> out = RunChunks(kernels, pool, c, cache, in, chunk);
    CHECK(ErrorOf(c, cache, in, out) < kMaxError);
    CHECK(ErrorOf(without_sinks, cache, in, out) > 100 * kMaxError);
    CHECK(ErrorOf(without_window, cache, in, out) > 100 * kMaxError);
    CHECK(ErrorOf(wider, cache, in, out) > 100 * kMaxError);
  }
}

TEST_CASE("the number of threads does not change a bit of attention") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kFp4Mx;
  c.shape.context = 1100;
  c.first = 1000;
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  Caches cache(c);
  const Inputs in = MakeInputs(c);
  ThreadPool one(1);
  ThreadPool three(3);
  for (bool exact : {true, false}) {
    c.exact = exact;
    for (int chunk : {1, 100}) {
      CHECK(SameBits(RunChunks(kernels, one, c, cache, in, chunk),
                     RunChunks(kernels, three, c, cache, in, chunk)));
    }
  }
}

}  // namespace
}  // namespace turbomind
