#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"
#include "sanitized_sample.h"

namespace turbomind {
namespace {

constexpr PrecisionWindowTokens kBalanced = {64, 64};

TEST_CASE(
    "with a 16-bit window, prefill and decode return the same bits, close to double precision") {
  testing::SanitizedSample sample(9);
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {64, 80, 96, 128, 256, 512}) {
      for (int block : {16, 32, 64, 128}) {
        if (!sample.Next()) {
          continue;
        }
        Case c = BlockCase(pair, dim, block);
        c.shape.dtype = dim == 96    ? DataType::kFloat16
                        : dim == 256 ? DataType::kFloat32
                                     : DataType::kBFloat16;
        c.group = block == 16 ? 1 : block == 32 ? 7 : 3;
        c.window = block == 32 ? 100 : block == 128 ? 200 : 0;
        c.sinks = block >= 64;
        c.mean = block == 64;
        CheckCase(c, BestIsa(), Affine(pair));
      }
    }
  }
}

TEST_CASE(
    "with 16-bit windows of several sizes, all positions and sliding windows match the reference") {
  constexpr PrecisionWindowTokens kSizes[] = {{64, 64}, {64, 0},    {0, 64},
                                              {0, 0},   {128, 128}, {64, 256}};
  int i = 0;
  testing::SanitizedSample sample(21);
  for (const PrecisionWindowTokens& window16 : kSizes) {
    for (int block : {16, 32, 64, 128}) {
      for (int window : {0, 30, 64, 100, 150, -96, -150}) {
        if (!sample.Next()) {
          ++i;
          continue;
        }
        Case c;
        c.shape.k = c.shape.v = i % 3 == 0   ? KvCacheMode::kFp4Nv
                                : i % 3 == 1 ? KvCacheMode::kInt4
                                             : KvCacheMode::kFp8E4m3;
        c.shape.kv_heads = 1;
        c.shape.block_seq_len = block;
        c.shape.context = 400;
        c.group = 2;
        c.window = window;
        c.sinks = i % 2 == 0;
        c.first = 0;
        c.window16 = window16;
        CheckCase(c, BestIsa(), Affine({c.shape.k, c.shape.v}));
        ++i;
      }
    }
  }
}

TEST_CASE("with a 16-bit window, every instruction set returns the same bits") {
  for (const FormatPair& pair : ListedPairs()) {
    for (int block : {16, 64}) {
      Case c;
      c.shape.k = pair.k;
      c.shape.v = pair.v;
      c.shape.head_dim = block == 16 ? 80 : 64;
      c.shape.block_seq_len = block;
      c.shape.context = 270;
      c.group = block == 16 ? 2 : 5;
      c.sinks = true;
      c.mean = true;
      c.first = 250;
      c.window16 = kBalanced;
      const std::vector<float> want = CheckCase(c, BestIsa(), Affine(pair));
      for (const std::string& isa : AvailableCpuIsas()) {
        CHECK(SameBits(want, CheckCase(c, isa, Affine(pair))));
      }
    }
  }
}

TEST_CASE("with a 16-bit window, slots and blocks that a query does not see have no effect") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (const FormatPair& pair : ListedPairs()) {
    Case c;
    c.shape.k = pair.k;
    c.shape.v = pair.v;
    c.window = 150;
    c.first = 300;
    c.window16 = kBalanced;
    const Inputs in = MakeInputs(c);
    Caches clean(c, 0x00);
    const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 64);
    for (int poison : {0x7f, 0xff, 0x7e}) {
      Caches cache(c, static_cast<uint8_t>(poison));
      CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 64)));
      CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 1)));
    }
  }
}

// The reference detects a 16-bit window that is one block longer or shorter than requested.
TEST_CASE("the reference detects a 16-bit window of the wrong size") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kInt4;
  c.shape.context = 400;
  c.window16 = kBalanced;
  ThreadPool pool(2);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  Caches cache(c);
  const Inputs in = MakeInputs(c);
  for (int chunk : {1, 64}) {
    const std::vector<float> out = RunChunks(kernels, pool, c, cache, in, chunk);
    CHECK(ErrorOf(c, cache, in, out) < kMaxErrorAffine);
    for (const PrecisionWindowTokens& other :
         {PrecisionWindowTokens{0, 64}, PrecisionWindowTokens{64, 0},
          PrecisionWindowTokens{64, 128}, PrecisionWindowTokens{128, 64},
          PrecisionWindowTokens{}}) {
      Case wrong = c;
      wrong.window16 = other;
      Caches wrong_cache(wrong);
      CHECK(ErrorOf(wrong, wrong_cache, in, out) > 100 * kMaxErrorAffine);
    }
    Case with_mean = c;
    with_mean.sinks = with_mean.mean = true;
    const std::vector<float> lowered = RunChunks(kernels, pool, with_mean, cache, in, chunk);
    CHECK(ErrorOf(with_mean, cache, in, lowered) < kMaxErrorAffine);
    Case dropped = with_mean;
    dropped.mean = false;
    CHECK(ErrorOf(dropped, cache, in, lowered) > 100 * kMaxErrorAffine);
  }
}

TEST_CASE("a context inside the 16-bit window returns the bits of KV format none") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kFp4Nv;
  c.shape.context = 192;
  c.first = 100;
  c.window16 = kBalanced;
  Case none = c;
  none.shape.k = none.shape.v = KvCacheMode::kNone;
  none.window16 = {};
  const Inputs in = MakeInputs(c);
  Caches cache(c);
  Caches plain(none);
  for (int chunk : {1, 64}) {
    CHECK(SameBits(RunChunks(kernels, pool, c, cache, in, chunk),
                   RunChunks(kernels, pool, none, plain, in, chunk)));
  }
}

}  // namespace
}  // namespace turbomind
