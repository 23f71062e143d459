// Prefill attention in BF16 on AMX (isa/attention/bf16_attention.cc).

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/attention_fixture.h"

namespace turbomind {
namespace {

// The largest error, relative to the largest |v|, with queries of any size. A weight w has a
// relative error of at most e = 2^-9 + 8e-5 (BF16 and bf16_attention_softmax.h), which moves the
// average o of the values by at most e Σ w |v - o| / Σ w. Here the average |v - o| is below the
// largest |v|. Scores add less than 1e-4 (kMaxErrorRounded). Values that are not BF16 numbers are
// rounded, too. Observed: below 1.6e-3 and 2.1e-3.
constexpr double kMaxErrorWeights = 0x1p-9 + 8e-5 + 1e-4;
constexpr double kMaxErrorValues = kMaxErrorWeights + 0x1p-9;

// With these chunks, every item of the cases has at least 16 rows.
constexpr int kFirst = 205;
constexpr int kChunk = 128;
constexpr int kOtherChunks[] = {64, 16};

bool HasAmx() {
  if (AvailableCpuIsas().back() == "amx") {
    return true;
  }
  MESSAGE("skipped: this machine has no AMX");
  return false;
}

CpuKvKernels Bf16Kernels() {
  CpuKvKernels kernels = CpuKvKernelsFor("amx");
  amx::FillBf16KvKernels(kernels);
  return kernels;
}

Case MakeCase(const FormatPair& pair, int dim, int group) {
  Case c;
  c.shape.k = pair.k;
  c.shape.v = pair.v;
  c.shape.head_dim = dim;
  c.group = group;
  c.first = kFirst;
  c.exact = false;
  return c;
}

// Returns true if the values of every view are BF16 numbers.
bool HasBf16Values(const Case& c) {
  const bool rounded = c.shape.v == KvCacheMode::kInt8 || c.shape.v == KvCacheMode::kInt4;
  const bool reads_16_bits =
      c.shape.v == KvCacheMode::kNone || MakePrecisionWindow(c.window16, 64).enabled();
  return !rounded && (!reads_16_bits || c.shape.dtype == DataType::kBFloat16);
}

// Checks that every chunk size returns the same bits, close to double precision, for small and
// large scores.
void CheckBf16(const Case& c) {
  INFO(Name(c, "amx"));
  ThreadPool pool(2);
  const CpuKvKernels kernels = Bf16Kernels();
  Caches caches(c);
  Inputs in = MakeInputs(c);
  for (float factor : {1.f, 16.f}) {
    INFO("queries times " << factor);
    std::for_each(in.q.begin(), in.q.end(), [&](float& x) { x *= factor; });
    const std::vector<float> whole = RunChunks(kernels, pool, c, caches, in, kChunk);
    for (int chunk : kOtherChunks) {
      INFO("chunk " << chunk);
      CHECK(SameBits(whole, RunChunks(kernels, pool, c, caches, in, chunk)));
    }
    CHECK(ErrorOf(c, caches, in, whole) < (HasBf16Values(c) ? kMaxErrorWeights : kMaxErrorValues));
  }
}

TEST_CASE("attention in BF16 is close to double precision and the same for every chunk size") {
  if (!HasAmx()) {
    return;
  }
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    for (int dim : {64, 80, 128}) {
      Case c = MakeCase(pair, dim, i % 3 == 0 ? 1 : i % 3 == 1 ? 3 : 8);
      c.shape.kv_heads = 1 + i % 2;
      c.shape.dtype = dim == 80    ? DataType::kFloat32
                      : dim == 128 ? DataType::kFloat16
                                   : DataType::kBFloat16;
      c.window = i % 4 == 1 ? 100 : i % 4 == 3 ? -90 : 0;
      c.sinks = i % 5 == 2;
      c.score_cap = i % 7 == 4 ? 0.75f : 0.f;
      c.fast_pairs = i % 7 > 3 ? 2 : 0;
      CheckBf16(c);
      ++i;
    }
  }
}

TEST_CASE("attention in BF16 reads a 16-bit window") {
  if (!HasAmx()) {
    return;
  }
  int i = 0;
  for (const FormatPair& pair : ListedPairs()) {
    Case c = MakeCase(pair, i % 2 == 0 ? 64 : 80, i % 3 == 0 ? 1 : 3);
    c.shape.kv_heads = 1;
    c.shape.block_seq_len = 16 << i % 3;
    c.window16 = {64, 64};
    c.window = i % 3 == 2 ? 150 : 0;
    c.sinks = c.mean = i % 4 == 1;
    CheckBf16(c);
    ++i;
  }
}

TEST_CASE("attention in BF16 is correct for other head sizes and several splits") {
  if (!HasAmx()) {
    return;
  }
  for (int dim : {16, 32, 48, 192, 256, 512}) {
    Case c = MakeCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, dim, 2);
    c.shape.kv_heads = 1;
    CheckBf16(c);
    c.shape.k = c.shape.v = KvCacheMode::kInt8;
    CheckBf16(c);
  }
  Case c = MakeCase({KvCacheMode::kFp8E4m3, KvCacheMode::kFp4Mx}, 64, 1);
  c.shape.kv_heads = 1;
  c.shape.context = 1100;
  c.first = 1100 - 128;
  CheckBf16(c);
}

// Whether a row is computed in BF16 depends on its item alone.
TEST_CASE("items of fewer than 16 rows and exact attention have the bits of the usual kernels") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels usual = CpuKvKernelsFor("amx");
  const CpuKvKernels bf16 = Bf16Kernels();
  for (KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp4Nv}) {
    Case c = MakeCase({format, format}, 64, 3);
    Caches cache(c);
    const Inputs in = MakeInputs(c);
    const auto same = [&](int chunk) {
      return SameBits(RunChunks(usual, pool, c, cache, in, chunk),
                      RunChunks(bf16, pool, c, cache, in, chunk));
    };
    CHECK(same(5));
    CHECK_FALSE(same(6));
    c.exact = true;
    CHECK(same(kChunk));
  }
}

TEST_CASE("only a device that is asked for it computes attention in BF16") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(2);
  Case c = MakeCase({KvCacheMode::kFp4Nv, KvCacheMode::kFp4Nv}, 64, 3);
  Caches cache(c);
  const Inputs in = MakeInputs(c);
  const CpuKvKernels usual = CpuKvKernelsFor("amx");
  const CpuKvKernels bf16 = Bf16Kernels();
  for (bool deterministic : {false, true}) {
    const CpuKvKernels& kernels = deterministic ? usual : bf16;
    const auto device = MakeCpuDevice(2, "amx", {.deterministic = deterministic});
    std::vector<float> out(in.q.size());
    RunStep({kernels, pool, c, cache, in, device.get()}, c.first, kChunk, out.data());
    std::vector<float> want(in.q.size());
    RunStep({kernels, pool, c, cache, in}, c.first, kChunk, want.data());
    CHECK(SameBits(want, out));
  }
}

TEST_CASE("in BF16, slots and blocks that a query does not see have no effect") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (const FormatPair& pair : ListedPairs()) {
    for (bool window16 : {false, true}) {
      Case c = MakeCase(pair, 64, 1);
      c.window = 150;
      c.shape.context = 300;
      c.first = 268;
      c.window16 = window16 ? PrecisionWindowTokens{64, 64} : PrecisionWindowTokens{};
      const Inputs in = MakeInputs(c);
      Caches clean(c, 0x00);
      const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 32);
      for (int poison : {0x7f, 0xff, 0x7e}) {
        Caches cache(c, static_cast<uint8_t>(poison));
        CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 32)));
      }
    }
  }
}

// Position 300 is hidden from the first rows of the item that reads it.
TEST_CASE("in BF16, a NaN in the cache affects only the queries that see it") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E5m2}) {
    for (KvSide side : {KvSide::kK, KvSide::kV}) {
      Case c = MakeCase({format, format}, 64, 3);
      c.shape.kv_heads = 1;
      const Inputs in = MakeInputs(c);
      Caches cache(c);
      const std::vector<float> want = RunChunks(kernels, pool, c, cache, in, kChunk);
      std::vector<float> row(c.shape.head_dim, std::numeric_limits<float>::quiet_NaN());
      cache.quantized.Write(side, 0, 300, row.data());
      const std::vector<float> got = RunChunks(kernels, pool, c, cache, in, kChunk);
      const size_t before = static_cast<size_t>(300 - c.first) * c.group * c.shape.head_dim;
      CHECK(std::memcmp(want.data(), got.data(), before * sizeof(float)) == 0);
      CHECK(std::all_of(got.begin() + before, got.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

// All bits of the scales of position 300 are set: NaN for int8, int4 and infinity for MXFP4.
TEST_CASE("in BF16, an invalid scale affects only the queries that see it") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (KvCacheMode format : {KvCacheMode::kInt8, KvCacheMode::kInt4, KvCacheMode::kFp4Mx}) {
    for (KvSide side : {KvSide::kK, KvSide::kV}) {
      Case c = MakeCase({format, format}, 64, 3);
      c.shape.kv_heads = 1;
      const Inputs in = MakeInputs(c);
      Caches cache(c);
      const std::vector<float> want = RunChunks(kernels, pool, c, cache, in, kChunk);
      std::memset(cache.quantized.Metadata(side, 0, 300), 0xff, 4);
      const std::vector<float> got = RunChunks(kernels, pool, c, cache, in, kChunk);
      const size_t before = static_cast<size_t>(300 - c.first) * c.group * c.shape.head_dim;
      CHECK(std::memcmp(want.data(), got.data(), before * sizeof(float)) == 0);
      CHECK(
          std::all_of(got.begin() + before, got.end(), [](float x) { return !std::isfinite(x); }));
    }
  }
}

TEST_CASE("in BF16, large values are added in FP32 and leave other rows unchanged") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (KvCacheMode format : {KvCacheMode::kNone, KvCacheMode::kInt8}) {
    Case c = MakeCase({format, format}, 80, 3);
    c.shape.kv_heads = 1;
    c.shape.dtype = DataType::kFloat32;
    const Inputs in = MakeInputs(c);
    Caches cache(c);
    const std::vector<float> want = RunChunks(kernels, pool, c, cache, in, kChunk);
    std::vector<float> row(c.shape.head_dim);
    for (size_t d = 0; d < row.size(); ++d) {
      row[d] = d % 2 == 0 ? 3.4e38f : -1e38f;
    }
    cache.quantized.Write(KvSide::kV, 0, 300, row.data());
    const std::vector<float> got = RunChunks(kernels, pool, c, cache, in, kChunk);
    const size_t before = static_cast<size_t>(300 - c.first) * c.group * c.shape.head_dim;
    CHECK(std::memcmp(want.data(), got.data(), before * sizeof(float)) == 0);
    CHECK(std::all_of(got.begin() + before, got.end(),
                      [](float x) { return std::isfinite(x) && std::fabs(x) > 1e30f; }));
  }
}

TEST_CASE("in BF16, a NaN or an infinity in a query affects only its own head") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (KvCacheMode format : kAllKvCacheModes) {
    Case c = MakeCase({format, format}, 64, 3);
    c.first = 300;
    c.shape.context = 332;
    Caches cache(c);
    const Inputs clean = MakeInputs(c);
    const int64_t row = int64_t{c.group} * c.shape.kv_heads * c.shape.head_dim;
    const std::vector<float> before = RunChunks(kernels, pool, c, cache, clean, 32);
    for (float bad :
         {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
      Inputs in = clean;
      in.q[static_cast<size_t>(310 * row + c.shape.head_dim + 5)] = bad;  // head 1
      std::vector<float> want = before;
      const std::vector<float> got = RunChunks(kernels, pool, c, cache, in, 32);
      const auto head = got.begin() + (310 - c.first) * row + c.shape.head_dim;
      CHECK(std::all_of(head, head + c.shape.head_dim, [](float x) { return std::isnan(x); }));
      std::copy_n(head, c.shape.head_dim, want.begin() + (head - got.begin()));
      CHECK(SameBits(want, got));
    }
  }
}

TEST_CASE("in BF16, queries and value scales of zero return zero") {
  if (!HasAmx()) {
    return;
  }
  ThreadPool pool(1);
  const CpuKvKernels kernels = Bf16Kernels();
  for (KvCacheMode format : kAllKvCacheModes) {
    Case c = MakeCase({format, format}, 64, 3);
    c.shape.context = 100;
    c.first = 84;
    Caches cache(c);
    const std::vector<float> zeros(static_cast<size_t>(c.shape.head_dim));
    for (int head = 0; head < c.shape.kv_heads; ++head) {
      for (int token = 0; token < c.shape.context; ++token) {
        cache.quantized.Write(KvSide::kV, head, token, zeros.data());
      }
    }
    Inputs in = MakeInputs(c);
    std::fill(in.q.begin(), in.q.end(), 0.f);
    const std::vector<float> out = RunChunks(kernels, pool, c, cache, in, 16);
    CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 0.f; }));
  }
}

}  // namespace
}  // namespace turbomind
