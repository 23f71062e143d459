// Measures the decode attention of one layer over a paged KV cache on the CPU. Prints one JSON
// object with the bytes that a call reads, the seconds of a call in each round, and the bytes per
// second at which the same threads read that many bytes (a STREAM-like sum). Usage, with defaults:
//   attention_alone_bench mode=nvfp4 context=8192 batch=8 kv_heads=3 group=3 head_dim=64 threads=1
//     rounds=5 isa=BEST
// A round repeats the call for at least 50 ms, after one call that is not timed. Every block holds
// the same random rows at its own address.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "kv_cells.h"
#include "turbomind/core/thread_pool.h"

namespace turbomind::bench {
namespace {

constexpr double kRoundSeconds = 0.05;
constexpr int64_t kReadItemValues = int64_t{1} << 15;  // 256 KiB

template <class F>
double SecondsPerCall(F fn) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double seconds = 0;
  int calls = 0;
  do {
    fn();
    ++calls;
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  } while (seconds < kRoundSeconds);
  return seconds / calls;
}

// Returns the bytes per second of a sum over `num_bytes` bytes on `threads` threads.
double ReadSpeed(int64_t num_bytes, int threads) {
  const int64_t items = std::max<int64_t>(CeilDiv(num_bytes / 8, kReadItemValues), threads);
  const std::vector<int64_t> values(static_cast<size_t>(items * kReadItemValues), 1);
  std::vector<int64_t> sums(static_cast<size_t>(items));
  ThreadPool pool(threads);
  const auto read = [&](int64_t item, int) {
    const int64_t* begin = values.data() + item * kReadItemValues;
    sums[static_cast<size_t>(item)] = std::accumulate(begin, begin + kReadItemValues, int64_t{0});
  };
  const double seconds = SecondsPerCall([&] { pool.ParallelFor(items, read); });
  if (sums.back() != kReadItemValues) {
    throw std::runtime_error("the sum of the values read is wrong");
  }
  return static_cast<double>(items * kReadItemValues * 8) / seconds;
}

int Main(int argc, char** argv) {
  Cell arguments(argc, argv);
  const std::string isa = arguments.Text("isa", AvailableCpuIsas().back());
  const int threads = arguments.Number("threads", 1);
  const int rounds = arguments.Number("rounds", 5);
  for (const auto& [key, value] :
       {std::pair("mode", "nvfp4"), std::pair("context", "8192"), std::pair("batch", "8"),
        std::pair("kv_heads", "3"), std::pair("group", "3"), std::pair("head_dim", "64")}) {
    arguments.SetDefault(key, value);
  }
  const KvShape shape(arguments);
  arguments.RequireAllRead();
  const std::unique_ptr<Device> device = MakeCpuDevice(threads, isa);
  const KvBench bench(*device, shape, {.launches = 1}, 1);
  const AttentionParams params = bench.Attention(0);
  const auto bytes = static_cast<double>(DecodeCost(params).kv_bytes);
  device->DecodeAttention(params);
  std::printf("{\"isa\": \"%s\", \"mode\": \"%s\", \"bytes\": %.0f, \"seconds\": [", isa.c_str(),
              ToString(shape.format), bytes);
  for (int i = 0; i < rounds; ++i) {
    const double seconds = SecondsPerCall([&] { device->DecodeAttention(params); });
    std::printf("%s%.6g", i > 0 ? ", " : "", seconds);
  }
  std::printf("], \"read_bytes_per_s\": %.6g}\n", ReadSpeed(static_cast<int64_t>(bytes), threads));
  return 0;
}

}  // namespace
}  // namespace turbomind::bench

int main(int argc, char** argv) {
  return turbomind::bench::RunMain("attention_alone_bench", turbomind::bench::Main, argc, argv);
}
