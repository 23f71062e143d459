#include "turbomind/backend/cpu/ceilings.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "turbomind/backend/cpu/packed_matrix.h"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kChunkBytes = 2 * kMiB;  // of memory, per work item
constexpr int64_t kLeastMemoryBytes = 64 * kMiB;
constexpr int64_t kWantedMemoryBytes = 512 * kMiB;
constexpr int64_t kLineBytes = 512;  // what `read` takes at once
constexpr int kRuns = 5;

// Shares of the time: the pages must be written before they are read, or all are one zero page.
constexpr double kTouchShare = 0.35;
constexpr double kMemoryShare = 0.25;
constexpr double kOtherShare = 0.08;  // of L3, L2 and each of three products

double SecondsSince(Clock::time_point begun) {
  return std::chrono::duration<double>(Clock::now() - begun).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string ReadWord(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

// "32768K", "1M" → bytes; 0 for anything else.
int64_t ParseSize(const std::string& text) {
  int64_t value = 0;
  size_t i = 0;
  for (; i < text.size() && i < 12 && text[i] >= '0' && text[i] <= '9'; ++i) {
    value = value * 10 + (text[i] - '0');
  }
  const std::string unit = text.substr(i);
  return unit.empty() ? value : unit == "K" ? value << 10 : unit == "M" ? value << 20 : 0;
}

// Set bits of a mask such as "ffffffff,00000003".
int CountCpus(const std::string& mask) {
  int count = 0;
  for (const char c : mask) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 0;
    count += __builtin_popcount(static_cast<unsigned>(digit));
  }
  return count;
}

class Measurement {
 public:
  Measurement(const CpuCeilingKernels& kernels, ThreadPool& pool)
      : kernels_(kernels), pool_(pool) {}

  ReadCeiling ReadMemory(int64_t wanted_bytes, double seconds) {
    const Pages buffer(wanted_bytes);
    const int64_t num_bytes = Touch(buffer.data(), wanted_bytes, seconds * kTouchShare);
    std::vector<double> rates;
    const auto begun = Clock::now();
    while (rates.size() < 3 ||
           (rates.size() < 2 * kRuns && SecondsSince(begun) < seconds * kMemoryShare)) {
      const auto started = Clock::now();
      pool_.ParallelFor(num_bytes / kChunkBytes, [&](int64_t item, int) {
        Keep(kernels_.read(buffer.data() + item * kChunkBytes, kChunkBytes));
      });
      rates.push_back(static_cast<double>(num_bytes) / SecondsSince(started));
    }
    return {Median(rates), num_bytes};
  }

  // Every thread reads `slice_bytes` of its own.
  ReadCeiling ReadCache(int64_t slice_bytes, double seconds) {
    const int64_t total = slice_bytes * pool_.num_threads();
    const Pages buffer(total);
    pool_.ParallelFor(pool_.num_threads(), [&](int64_t item, int) {
      std::memset(buffer.data() + item * slice_bytes, 1, static_cast<size_t>(slice_bytes));
    });
    const double passes = Rate(seconds, [&](int64_t rounds, int worker) {
      for (int64_t i = 0; i < rounds; ++i) {
        Keep(kernels_.read(buffer.data() + worker * slice_bytes, slice_bytes));
      }
    });
    return {passes * static_cast<double>(slice_bytes), total};
  }

  // Operations per second, 0 without the instruction. `ones` fills the operands.
  double Multiply(const MultiplyCeiling& ceiling, uint32_t ones, double seconds) {
    if (ceiling.run == nullptr) {
      return 0.0;
    }
    alignas(64) uint32_t operands[kCeilingOperandBytes / sizeof(uint32_t)];
    std::fill(std::begin(operands), std::end(operands), ones);
    const auto* bytes = reinterpret_cast<const uint8_t*>(operands);
    constexpr int64_t kRoundsAtLeast = 1000;
    const double rounds = Rate(seconds, [&](int64_t amount, int) {
      Keep(std::bit_cast<uint32_t>(ceiling.run(bytes, amount * kRoundsAtLeast)));
    });
    return rounds * static_cast<double>(kRoundsAtLeast * ceiling.operations);
  }

 private:
  // Results that must not be left out.
  void Keep(uint64_t value) { kept_.fetch_xor(value, std::memory_order_relaxed); }

  // Writes pages until `seconds` are over; returns how many bytes, at least kLeastMemoryBytes.
  int64_t Touch(uint8_t* data, int64_t wanted_bytes, double seconds) {
    const auto begun = Clock::now();
    int64_t done = 0;
    while (done < wanted_bytes && (done < kLeastMemoryBytes || SecondsSince(begun) < seconds)) {
      const int64_t chunks = std::min(wanted_bytes - done, kLeastMemoryBytes) / kChunkBytes;
      pool_.ParallelFor(chunks, [&](int64_t item, int) {
        std::memset(data + done + item * kChunkBytes, 1, static_cast<size_t>(kChunkBytes));
      });
      done += chunks * kChunkBytes;
    }
    return done;
  }

  // Median of units per second of all threads together, where `work(units, worker)` does some.
  double Rate(double seconds, const std::function<void(int64_t units, int worker)>& work) {
    const int threads = pool_.num_threads();
    const auto run = [&](int64_t units) {
      const auto started = Clock::now();
      pool_.ParallelFor(threads, [&](int64_t, int worker) { work(units, worker); });
      return SecondsSince(started);
    };
    int64_t units = 1;
    const double wanted = seconds / (kRuns + 3);  // those before the last double up to it
    while (run(units) < wanted) {
      units *= 2;
    }
    std::vector<double> rates;
    for (int i = 0; i < kRuns; ++i) {
      rates.push_back(static_cast<double>(units * threads) / run(units));
    }
    return Median(rates);
  }

  const CpuCeilingKernels& kernels_;
  ThreadPool& pool_;
  std::atomic<uint64_t> kept_ = 0;
};

// More than L2 holds and no more than three quarters of the thread's share of L3; 0: no room.
int64_t L3SliceBytes(const CacheSizes& caches, int num_threads) {
  const int64_t threads_each = CeilDiv(num_threads, caches.num_l3);
  const int64_t share = caches.l3_bytes / threads_each * 3 / 4;
  const int64_t slice = std::min(share, 4 * caches.l2_bytes);
  return slice < 2 * caches.l2_bytes ? 0 : slice / kLineBytes * kLineBytes;
}

}  // namespace

CacheSizes ReadCacheSizes() {
  const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index";
  CacheSizes sizes;
  for (int index = 0; index < 8; ++index) {
    const std::string cache = folder + std::to_string(index);
    const int64_t bytes = ParseSize(ReadWord(cache + "/size"));
    if (bytes < (int64_t{64} << 10) || bytes > (int64_t{8} << 30)) {
      continue;
    }
    const std::string level = ReadWord(cache + "/level");
    if (level == "2") {
      sizes.l2_bytes = bytes;
    } else if (level == "3") {
      sizes.l3_bytes = bytes;
      const int sharing = CountCpus(ReadWord(cache + "/shared_cpu_map"));
      const auto cpus = static_cast<int>(std::thread::hardware_concurrency());
      sizes.num_l3 = std::max(1, cpus / std::max(1, sharing));
    }
  }
  return sizes;
}

CpuCeilings MeasureCeilings(const CpuCeilingKernels& kernels, ThreadPool& pool, double seconds) {
  if (!(seconds > 0.0) || seconds > 60.0) {
    throw InvalidArgument("seconds: got " + std::to_string(seconds) +
                          ", want more than 0, up to 60");
  }
  CpuCeilings result;
  result.num_threads = pool.num_threads();
  result.caches = ReadCacheSizes();
  const int64_t l3_bytes = result.caches.l3_bytes * result.caches.num_l3;
  const int64_t wanted = std::max(kWantedMemoryBytes, 4 * l3_bytes);
  Measurement measure(kernels, pool);
  result.memory = measure.ReadMemory(wanted / kChunkBytes * kChunkBytes, seconds);
  const double share = seconds * kOtherShare;
  if (const int64_t slice = L3SliceBytes(result.caches, pool.num_threads()); slice > 0) {
    result.l3 = measure.ReadCache(slice, share);
  }
  result.l2 = measure.ReadCache(result.caches.l2_bytes / 2 / kLineBytes * kLineBytes, share);
  result.int8_ops_per_s = measure.Multiply(kernels.int8, 0x01010101u, share);
  result.bf16_ops_per_s = measure.Multiply(kernels.bf16, 0x3f803f80u, share);
  result.fp32_ops_per_s = measure.Multiply(kernels.fp32, 0x3f800000u, share);
  result.tile_int8_ops_per_s = measure.Multiply(kernels.tile_int8, 0x01010101u, share);
  result.tile_bf16_ops_per_s = measure.Multiply(kernels.tile_bf16, 0x3f803f80u, share);
  return result;
}

}  // namespace turbomind
