#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"

namespace turbomind {
namespace {

constexpr float kSentinel = 12345.f;
// Largest error against double precision, as a share of the largest |v|: FP32 sums of up to 333
// weights and 256 products (observed below 4e-6). Affine codes cancel: code * scale is up to
// 2^bits times finer than the zero point it is added to.
constexpr double kMaxError = 1e-5;
constexpr double kMaxErrorAffine = 3e-5;

struct Case {
  CacheShape shape;
  int group = 3;
  int window = 0;
  bool sinks = false;
  int first = 200;  // queries are positions [first, context)
};

struct Inputs {
  std::vector<float> q;  // [context, q_heads, head_dim]; rows before `first` are not read
  std::vector<float> sinks;
};

Inputs MakeInputs(const Case& c) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Inputs in;
  const int q_heads = c.group * c.shape.kv_heads;
  in.q.resize(static_cast<size_t>(c.shape.context) * q_heads * c.shape.head_dim);
  for (float& x : in.q) {
    x = normal(random);
  }
  for (int h = 0; h < q_heads; ++h) {
    in.sinks.push_back(normal(random) + 4.f);  // heavy: a dropped sink must show
  }
  return in;
}

// What the steps of one run share.
struct Run {
  const CpuKvKernels& kernels;
  ThreadPool& pool;
  const Case& c;
  TestCache& cache;
  const Inputs& in;
};

// Attention of the queries [begin, begin + count), as one step.
void RunStep(const Run& run, int begin, int count, float* out) {
  const Case& c = run.c;
  const int q_heads = c.group * c.shape.kv_heads;
  const int32_t cu_seqlens[2] = {0, count};
  const int32_t context = begin + count;
  std::vector<int32_t> positions(count);
  std::iota(positions.begin(), positions.end(), begin);
  AttentionParams p;
  p.q_stride = static_cast<int64_t>(q_heads) * c.shape.head_dim;
  p.q = run.in.q.data() + begin * p.q_stride;
  p.out = out;
  p.q_heads = q_heads;
  p.softmax_scale = 1.f / std::sqrt(static_cast<float>(c.shape.head_dim));
  p.window = c.window;
  p.sinks = c.sinks ? run.in.sinks.data() : nullptr;
  p.kv = run.cache.view();
  p.batch = {1,
             count == 1 ? 1 : 0,
             count,
             cu_seqlens,
             &context,
             positions.data(),
             run.cache.table().data(),
             static_cast<int64_t>(run.cache.table().size())};
  CpuKvScratch memory;
  if (count == 1) {
    CpuDecodeAttention(run.kernels, run.pool, memory, p);
  } else {
    CpuPrefillAttention(run.kernels, run.pool, memory, p);
  }
}

std::vector<float> RunChunks(const CpuKvKernels& kernels, ThreadPool& pool, const Case& c,
                             TestCache& cache, const Inputs& in, int chunk) {
  const int64_t row = static_cast<int64_t>(c.group) * c.shape.kv_heads * c.shape.head_dim;
  std::vector<float> out(static_cast<size_t>((c.shape.context - c.first) * row) + 1, kSentinel);
  for (int begin = c.first; begin < c.shape.context; begin += chunk) {
    const int count = std::min(chunk, c.shape.context - begin);
    RunStep({kernels, pool, c, cache, in}, begin, count, out.data() + (begin - c.first) * row);
  }
  CHECK(out.back() == kSentinel);
  out.pop_back();
  return out;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Plain attention in double precision over what the codecs decode: one query head.
std::vector<double> Reference(const Case& c, TestCache& cache, const Inputs& in, int position,
                              int q_head) {
  const int dim = c.shape.head_dim;
  const int head = q_head / c.group;
  const int q_heads = c.group * c.shape.kv_heads;
  const float* q = in.q.data() + (static_cast<int64_t>(position) * q_heads + q_head) * dim;
  const int begin = c.window > 0 ? std::max(0, position + 1 - c.window) : 0;
  const double scale = 1.f / std::sqrt(static_cast<float>(dim));
  std::vector<double> scores;
  double largest = c.sinks ? in.sinks[q_head] : -1e300;
  for (int t = begin; t <= position; ++t) {
    const float* k = cache.Decoded(KvSide::kK, head, t);
    double score = 0;
    for (int d = 0; d < dim; ++d) {
      score += static_cast<double>(q[d]) * k[d];
    }
    scores.push_back(score * scale);
    largest = std::max(largest, scores.back());
  }
  double total = c.sinks ? std::exp(in.sinks[q_head] - largest) : 0;
  std::vector<double> out(dim, 0.0);
  for (int t = begin; t <= position; ++t) {
    const double weight = std::exp(scores[t - begin] - largest);
    total += weight;
    for (int d = 0; d < dim; ++d) {
      out[d] += weight * cache.Decoded(KvSide::kV, head, t)[d];
    }
  }
  for (double& x : out) {
    x /= total;
  }
  return out;
}

// Largest error of some queries, as a share of the largest |v|.
double ErrorOf(const Case& c, TestCache& cache, const Inputs& in, const std::vector<float>& out) {
  const int q_heads = c.group * c.shape.kv_heads;
  const int dim = c.shape.head_dim;
  double largest = 0;
  double error = 0;
  for (int t = 0; t < c.shape.context; ++t) {
    for (int d = 0; d < dim; ++d) {
      largest = std::max<double>(largest, std::fabs(cache.Decoded(KvSide::kV, 0, t)[d]));
    }
  }
  for (int position = c.first; position < c.shape.context; position += 19) {
    for (int h = 0; h < q_heads; ++h) {
      const std::vector<double> want = Reference(c, cache, in, position, h);
      const float* got =
          out.data() + (static_cast<int64_t>(position - c.first) * q_heads + h) * dim;
      for (int d = 0; d < dim; ++d) {
        const double difference = std::fabs(got[d] - want[d]);
        error = std::max(error, std::isnan(difference) ? 1e300 : difference);
      }
    }
  }
  return error / largest;
}

struct ModePair {
  KvCacheMode k;
  KvCacheMode v;
};

std::vector<ModePair> ListedPairs() {
  std::vector<ModePair> pairs;
  for (KvCacheMode mode : kAllKvCacheModes) {
    pairs.push_back({mode, mode});
  }
  pairs.push_back({KvCacheMode::kFp8E4m3, KvCacheMode::kFp4Nv});
  pairs.push_back({KvCacheMode::kInt8, KvCacheMode::kInt4});
  return pairs;
}

bool Affine(const ModePair& pair) {
  return pair.k == KvCacheMode::kInt8 || pair.k == KvCacheMode::kInt4;
}

std::string Name(const Case& c, const std::string& isa) {
  return isa + " k=" + ToString(c.shape.k) + " v=" + ToString(c.shape.v) + " " +
         ToString(c.shape.dtype) + " dim=" + std::to_string(c.shape.head_dim) +
         " group=" + std::to_string(c.group) + " window=" + std::to_string(c.window) +
         " sinks=" + std::to_string(c.sinks);
}

// Every chunking gives the same bits, close to double precision. Returns the bits.
std::vector<float> CheckCase(const Case& c, const std::string& isa, bool affine) {
  INFO(Name(c, isa));
  ThreadPool pool(2);
  const CpuKvKernels kernels = CpuKvKernelsFor(isa);
  TestCache cache(c.shape);
  const Inputs in = MakeInputs(c);
  const std::vector<float> whole = RunChunks(kernels, pool, c, cache, in, c.shape.context);
  for (int chunk : {1, 16, 64}) {
    INFO("chunk " << chunk);
    CHECK(SameBits(whole, RunChunks(kernels, pool, c, cache, in, chunk)));
  }
  CHECK(ErrorOf(c, cache, in, whole) < (affine ? kMaxErrorAffine : kMaxError));
  return whole;
}

std::string BestIsa() { return AvailableCpuIsas().back(); }

TEST_CASE("prefill and decode agree bit for bit and with double precision") {
  for (const ModePair& pair : ListedPairs()) {
    for (int dim : {64, 80, 96, 128, 256}) {
      for (int group : {1, 3, 7, 9}) {
        for (int window : {0, 100}) {
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

TEST_CASE("every instruction set gives the same bits") {
  for (const ModePair& pair : ListedPairs()) {
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

TEST_CASE("block lengths, cache types and short contexts") {
  for (KvCacheMode mode : kAllKvCacheModes) {
    for (int block : {16, 32, 64, 128}) {
      for (int context : {1, 15, 64, 65, 257}) {
        Case c;
        c.shape.k = c.shape.v = mode;
        c.shape.block_seq_len = block;
        c.shape.context = context;
        c.shape.dtype = block == 16   ? DataType::kFloat32
                        : block == 32 ? DataType::kFloat16
                                      : DataType::kBFloat16;
        c.first = 0;
        CheckCase(c, BestIsa(), Affine({mode, mode}));
      }
    }
  }
}

TEST_CASE("small heads") {
  for (const ModePair& pair : ListedPairs()) {
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

TEST_CASE("slots and blocks outside what a query sees do not matter") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (const ModePair& pair : ListedPairs()) {
    Case c;
    c.shape.k = pair.k;
    c.shape.v = pair.v;
    c.window = 100;
    c.first = 300;
    const Inputs in = MakeInputs(c);
    TestCache clean(c.shape, 0x00);
    const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 64);
    for (int poison : {0x7f, 0xff, 0x7e}) {
      TestCache cache(c.shape, static_cast<uint8_t>(poison));
      cache.table()[0] = cache.table()[1] = cache.table()[2] = -1;  // before every window
      CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 64)));
      CHECK(SameBits(want, RunChunks(kernels, pool, c, cache, in, 1)));
    }
  }
}

TEST_CASE("a NaN value reaches the queries that see it and no other") {
  ThreadPool pool(1);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  for (KvCacheMode mode : {KvCacheMode::kNone, KvCacheMode::kFp8E4m3, KvCacheMode::kFp8E5m2}) {
    Case c;
    c.shape.k = c.shape.v = mode;
    c.shape.kv_heads = 1;
    c.first = 260;
    const Inputs in = MakeInputs(c);
    TestCache clean(c.shape);
    const std::vector<float> want = RunChunks(kernels, pool, c, clean, in, 1);
    TestCache cache(c.shape);
    std::vector<float> row(c.shape.head_dim, std::numeric_limits<float>::quiet_NaN());
    cache.Write(KvSide::kV, 0, 300, row.data());
    const std::vector<float> whole = RunChunks(kernels, pool, c, cache, in, 333);
    const size_t before = static_cast<size_t>(300 - c.first) * c.group * c.shape.head_dim;
    CHECK(std::memcmp(want.data(), whole.data(), before * sizeof(float)) == 0);
    CHECK(std::all_of(whole.begin() + before, whole.end(), [](float x) { return std::isnan(x); }));
  }
}

TEST_CASE("a dropped sink and an ignored window are caught") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kFp4Nv;
  c.window = 50;
  c.sinks = true;
  ThreadPool pool(2);
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  TestCache cache(c.shape);
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

TEST_CASE("threads do not change a bit") {
  Case c;
  c.shape.k = c.shape.v = KvCacheMode::kFp4Mx;
  c.shape.context = 1100;
  c.first = 1000;
  const CpuKvKernels kernels = CpuKvKernelsFor(BestIsa());
  TestCache cache(c.shape);
  const Inputs in = MakeInputs(c);
  ThreadPool one(1);
  ThreadPool three(3);
  for (int chunk : {1, 100}) {
    CHECK(SameBits(RunChunks(kernels, one, c, cache, in, chunk),
                   RunChunks(kernels, three, c, cache, in, chunk)));
  }
}

}  // namespace
}  // namespace turbomind
