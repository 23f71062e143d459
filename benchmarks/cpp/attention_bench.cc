// ns per cached token and query head of decode attention, and FMA rate of prefill attention, for
// every mode; one thread. Usage: attention_bench [isa [mode]]

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

void Measure(const CpuKvKernels& kernels, KvCacheMode mode, int context, int head_dim) {
  CacheShape shape;
  shape.k = shape.v = mode;
  shape.kv_heads = kKvHeads;
  shape.head_dim = head_dim;
  shape.context = context;
  TestCache cache(shape);
  ThreadPool pool(1);
  CpuKvScratch memory;
  const int q_heads = kGroup * kKvHeads;
  const int chunk = 256;
  std::vector<float> q(static_cast<size_t>(chunk) * q_heads * head_dim, 0.1f);
  std::vector<float> out(q.size());
  std::vector<int32_t> positions(chunk);
  std::iota(positions.begin(), positions.end(), context - chunk);
  const int32_t decode_cu[2] = {0, 1};
  const int32_t prefill_cu[2] = {0, chunk};
  const int32_t last = context - 1;
  const int32_t length = context;
  AttentionParams p;
  p.q = q.data();
  p.q_stride = static_cast<int64_t>(q_heads) * head_dim;
  p.out = out.data();
  p.q_heads = q_heads;
  p.softmax_scale = 0.125f;
  p.kv = cache.view();
  const int64_t stride = static_cast<int64_t>(cache.table().size());
  p.batch = {1, 1, 1, decode_cu, &length, &last, cache.table().data(), stride};
  const double decode = Best(60, [&] { CpuDecodeAttention(kernels, pool, memory, p); });
  p.batch = {1, 0, chunk, prefill_cu, &length, positions.data(), cache.table().data(), stride};
  const double prefill = Best(5, [&] { CpuPrefillAttention(kernels, pool, memory, p); });
  const double fmas = 2.0 * chunk * (context - chunk / 2.0) * q_heads * head_dim;
  std::printf("%-9s D=%-4d context %5d   decode %7.3f ns/(token*q_head)   prefill %6.1f GFMA/s\n",
              ToString(mode), head_dim, context, decode * 1e9 / (context * double(q_heads)),
              fmas / prefill * 1e-9);
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
    for (int context : {2048, 8192}) {
      for (KvCacheMode mode : kAllKvCacheModes) {
        if (argc > 2 && std::string(argv[2]) != ToString(mode)) {
          continue;
        }
        Measure(kernels, mode, context, head_dim);
      }
    }
  }
}
