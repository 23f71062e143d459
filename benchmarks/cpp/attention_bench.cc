// ns per cached token and query head of decode attention, and FMA rate of prefill attention, for
// every mode: in FP32, with the kernels that are served, and with those and 64 sink and 64 recent
// tokens; one thread. Usage: attention_bench [isa [mode]]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"

namespace turbomind {
namespace {

constexpr int kGroup = 3;
constexpr int kKvHeads = 3;

double Seconds(const std::vector<double>& times) {
  return *std::min_element(times.begin(), times.end());
}

template <class F>
double Best(int rounds, F fn) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    times.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return Seconds(times);
}

struct Times {
  double decode;   // ns per cached token and query head
  double prefill;  // GFMA/s
};

// One layer's cache, with hot blocks or without.
struct Caches {
  Caches(const CacheShape& shape, const HotTokens& tokens)
      : cold(shape), hot(HotShape(shape)), rule(MakeHotRule(tokens, shape.block_seq_len)) {}
  static CacheShape HotShape(CacheShape shape) {
    shape.k = shape.v = KvCacheMode::kNone;
    return shape;
  }
  TestCache cold;
  TestCache hot;
  HotRule rule;
};

Times Measure(const CpuKvKernels& kernels, Caches& caches, bool exact) {
  const CacheShape& shape = caches.cold.shape();
  const int context = shape.context;
  ThreadPool pool(1);
  CpuKvScratch memory;
  const int q_heads = kGroup * kKvHeads;
  const int chunk = std::min(256, context);
  std::vector<float> q(static_cast<size_t>(chunk) * q_heads * shape.head_dim, 0.1f);
  std::vector<float> out(q.size());
  std::vector<int32_t> positions(chunk);
  std::iota(positions.begin(), positions.end(), context - chunk);
  const int32_t decode_cu[2] = {0, 1};
  const int32_t prefill_cu[2] = {0, chunk};
  const int32_t last = context - 1;
  const int32_t length = context;
  AttentionParams p;
  p.q = q.data();
  p.q_stride = static_cast<int64_t>(q_heads) * shape.head_dim;
  p.out = out.data();
  p.q_heads = q_heads;
  p.softmax_scale = 0.125f;
  p.kv = caches.cold.view();
  p.rule = caches.rule;
  p.exact = exact;
  const auto with_tables = [&](BatchView batch) {
    batch.block_tables = caches.cold.table().data();
    batch.block_table_stride = static_cast<int64_t>(caches.cold.table().size());
    batch.hot_tables = caches.hot.table().data();
    return batch;
  };
  if (p.rule.enabled()) {
    p.hot = caches.hot.view();
  }
  const int repeats = std::max(1, 2048 / context);
  p.batch = with_tables({1, 1, 1, decode_cu, &length, &last});
  const double decode = Best(100, [&] {
    for (int i = 0; i < repeats; ++i) {
      CpuDecodeAttention(kernels, pool, memory, p);
    }
  });
  p.batch = with_tables({1, 0, chunk, prefill_cu, &length, positions.data()});
  const double prefill = Best(5, [&] { CpuPrefillAttention(kernels, pool, memory, p); });
  const double fmas = 2.0 * chunk * (context - chunk / 2.0) * q_heads * shape.head_dim;
  return {decode * 1e9 / (static_cast<double>(context) * q_heads * repeats), fmas / prefill * 1e-9};
}

void Report(const CpuKvKernels& kernels, KvCacheMode mode, int context, int head_dim) {
  CacheShape shape;
  shape.k = shape.v = mode;
  shape.kv_heads = kKvHeads;
  shape.head_dim = head_dim;
  shape.context = context;
  Caches raw(shape, {});
  const Times exact = Measure(kernels, raw, true);
  const Times a = Measure(kernels, raw, false);
  Caches balanced(shape, {64, 64});
  const Times b = Measure(kernels, balanced, false);
  std::printf(
      "%-9s D=%-4d context %5d   decode %7.3f %7.3f %7.3f ns/(token*q_head)   prefill %6.1f %6.1f "
      "%6.1f GFMA/s\n",
      ToString(mode), head_dim, context, exact.decode, a.decode, b.decode, exact.prefill, a.prefill,
      b.prefill);
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  const std::string isa = argc > 1 ? argv[1] : AvailableCpuIsas().back();
  const CpuKvKernels kernels = CpuKvKernelsFor(isa);
  std::printf("isa %s, %d KV heads, %d query heads each, 1 thread\n", isa.c_str(), kKvHeads,
              kGroup);
  for (int head_dim : {64, 128}) {
    for (int context : {128, 512, 2048, 8192}) {
      for (KvCacheMode mode : kAllKvCacheModes) {
        if (argc > 2 && std::string(argv[2]) != ToString(mode)) {
          continue;
        }
        Report(kernels, mode, context, head_dim);
      }
    }
  }
}
