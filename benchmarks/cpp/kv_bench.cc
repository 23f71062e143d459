// ns per row of the KV encoders, of the rotation and of QuantiseBlocks; one thread.
// Usage: kv_bench [isa]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "cpu/kv_fixture.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cpu/cpu_kv_ops.h"

namespace turbomind {
namespace {

constexpr int kRows = 2000;

// Least ns per row of several rounds.
template <class F>
double NsPerRow(int rows, F fn) {
  double best = 1e30;
  for (int round = 0; round < 30; ++round) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count());
  }
  return best * 1e9 / rows;
}

void Encode(const CpuKvKernels& kernels, KvCacheMode mode, int dim) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(static_cast<size_t>(kRows) * dim);
  for (float& x : rows) {
    x = normal(random);
  }
  std::vector<uint8_t> payload(rows.size() * 4);
  std::vector<uint8_t> metadata(rows.size());
  const auto measure = [&](DataType dtype, float g, bool search) {
    const CodecRows shape = {mode, dtype, g, kRows, dim, search};
    return NsPerRow(
        kRows, [&] { EncodeRows(kernels, shape, rows.data(), payload.data(), metadata.data()); });
  };
  std::printf("encode %-9s D=%-4d bf16 %7.1f", ToString(mode), dim,
              measure(DataType::kBFloat16, 1.f, false));
  if (block::ScaleBytes(mode, dim) > 0) {
    std::printf("   search: bf16 %7.1f, g = 0.37 %7.1f, fp32 %7.1f",
                measure(DataType::kBFloat16, 1.f, true), measure(DataType::kBFloat16, 0.37f, true),
                measure(DataType::kFloat32, 1.f, true));
  }
  std::printf(" ns/row\n");
}

void Quantise(const CpuKvKernels& kernels, KvCacheMode mode, int dim) {
  CacheShape shape;
  shape.k = shape.v = mode;
  shape.head_dim = dim;
  shape.kv_heads = 4;
  shape.context = 1024;
  TestCache cold(shape);
  shape.k = shape.v = KvCacheMode::kNone;
  TestCache hot(shape);
  std::vector<BlockMove> moves;
  for (size_t i = 0; i < cold.table().size(); ++i) {
    moves.push_back({hot.table()[i], cold.table()[i]});
  }
  QuantiseBlocksParams p;
  p.kv = cold.view();
  p.hot = hot.view();
  p.search_scales = true;
  p.moves = moves.data();
  p.num_moves = static_cast<int>(moves.size());
  ThreadPool pool(1);
  std::printf(
      "quantise blocks %-9s D=%-4d %7.1f ns/row\n", ToString(mode), dim,
      NsPerRow(shape.context * shape.kv_heads * 2, [&] { CpuQuantiseBlocks(kernels, pool, p); }));
}

void Process(const CpuKvKernels& kernels, int dim) {
  constexpr int kTokens = 64;
  constexpr int kQHeads = 12;
  CacheShape shape;
  shape.kv_heads = 4;
  shape.head_dim = dim;
  shape.context = kTokens;
  TestCache hot(shape);
  const int heads = kQHeads + 2 * shape.kv_heads;
  std::vector<float> qkv(static_cast<size_t>(kTokens) * heads * dim, 1.f);
  std::vector<float> mean(static_cast<size_t>(shape.kv_heads) * dim, 0.f);
  std::vector<float> q_dot_mean(kTokens * kQHeads);
  std::vector<int32_t> positions(kTokens);
  for (int i = 0; i < kTokens; ++i) {
    positions[static_cast<size_t>(i)] = i;
  }
  const int32_t cu_seqlens[2] = {0, kTokens};
  const int32_t context = kTokens;
  int64_t num_nonfinite = 0;
  ProcessKVParams p;
  p.qkv = qkv.data();
  p.q_heads = kQHeads;
  p.kv = p.hot = hot.view();
  p.batch = {1, 0, kTokens, cu_seqlens, &context, positions.data(), nullptr, 1};
  p.batch.hot_tables = hot.table().data();
  p.num_nonfinite = &num_nonfinite;
  ThreadPool pool(1);
  const auto measure = [&](bool rotate, bool with_mean) {
    p.rotate = rotate;
    p.k_mean = with_mean ? mean.data() : nullptr;
    p.q_dot_mean = q_dot_mean.data();
    return NsPerRow(kTokens * heads, [&] { CpuProcessKV(kernels, pool, p); });
  };
  std::printf(
      "process D=%-4d, 12 + 2 * 4 heads, into 16 bit: %5.1f, rotated %5.1f, with mean %5.1f "
      "ns/row\n",
      dim, measure(false, false), measure(true, false), measure(true, true));
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  using namespace turbomind;
  const std::string isa = argc > 1 ? argv[1] : AvailableCpuIsas().back();
  const CpuKvKernels kernels = CpuKvKernelsFor(isa);
  std::printf("isa %s, 1 thread\n", isa.c_str());
  for (int dim : {64, 128}) {
    for (KvCacheMode mode : kAllKvCacheModes) {
      Encode(kernels, mode, dim);
    }
    for (KvCacheMode mode : kAllKvCacheModes) {
      Quantise(kernels, mode, dim);
    }
    Process(kernels, dim);
  }
}
