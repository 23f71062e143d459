// Speed of linear layers on this machine: GB/s of weights for one row, GOP/s (2 per multiply-add)
// for more, beside the machine's own peaks measured in the same run.
// Usage: linear_bench [threads] [isa]

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "turbomind/backend/cpu/cpu_device.h"

namespace turbomind {
namespace {

constexpr double kSecondsPerCase = 0.3;
// As in a model, each matrix is read once per step: the copies do not fit in L3 together.
constexpr int64_t kColdBytes = 96 << 20;

struct Shape {
  const char* name;
  int64_t rows;
  int64_t cols;
  MatrixFormat format;
};

constexpr Shape kShapes[] = {
    {"smollm2 qkv     q4_1", 960, 576, MatrixFormat::kQ4_1},
    {"smollm2 gate_up q4_1", 3072, 576, MatrixFormat::kQ4_1},
    {"smollm2 down    q4_1", 576, 1536, MatrixFormat::kQ4_1},
    {"smollm2 head    q8_0", 49152, 576, MatrixFormat::kQ8_0},
    {"smollm2 gate_up bf16", 3072, 576, MatrixFormat::kBF16},
    {"llama1b gate_up q4_0", 16384, 2048, MatrixFormat::kQ4_0},
    {"llama1b gate_up q8_0", 16384, 2048, MatrixFormat::kQ8_0},
    {"llama1b gate_up bf16", 16384, 2048, MatrixFormat::kBF16},
    {"llama1b down    f32 ", 2048, 8192, MatrixFormat::kF32},
};

int64_t RowBytes(const Shape& shape) {
  switch (shape.format) {
    case MatrixFormat::kF32:
      return shape.cols * 4;
    case MatrixFormat::kBF16:
      return shape.cols * 2;
    case MatrixFormat::kQ4_0:
      return shape.cols / 32 * 18;
    case MatrixFormat::kQ4_1:
      return shape.cols / 32 * 20;
    case MatrixFormat::kQ8_0:
      return shape.cols / 32 * 34;
    case MatrixFormat::kMxfp4:
    case MatrixFormat::kMxfp4Split:
      return shape.cols / 32 * 17;
  }
  return 0;
}

template <class F>
double SecondsPerCall(F&& fn) {
  using Clock = std::chrono::steady_clock;
  fn();
  double best = 1e9;
  const auto start = Clock::now();
  while (std::chrono::duration<double>(Clock::now() - start).count() < kSecondsPerCase) {
    const auto begin = Clock::now();
    fn();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return best;
}

void Bench(Device& device, const Shape& shape) {
  std::mt19937 random(1);
  std::vector<uint8_t> source(static_cast<size_t>(shape.rows * RowBytes(shape)));
  for (uint8_t& byte : source) {
    byte = static_cast<uint8_t>(random() & 0x3f);  // every float and half is finite
  }
  std::vector<std::unique_ptr<PackedMatrix>> copies;
  int64_t bytes = 0;
  while (bytes < kColdBytes) {
    copies.push_back(
        device.PackMatrix({shape.format, source.data(), shape.rows, shape.cols}, false));
    bytes += copies.back()->num_bytes();
  }
  const double matrix_bytes = static_cast<double>(copies.front()->num_bytes());
  constexpr int kMaxRows = 512;
  std::vector<float> x(static_cast<size_t>(kMaxRows * shape.cols));
  std::vector<float> y(static_cast<size_t>(kMaxRows * shape.rows));
  for (float& value : x) {
    value = static_cast<float>(random() % 2001) / 1000.f - 1.f;
  }
  std::printf("%s %6ld x %-5ld", shape.name, shape.rows, shape.cols);
  for (int num_rows : {1, 8, 32, kMaxRows}) {
    LinearParams params;
    params.x = x.data();
    params.x_stride = shape.cols;
    params.y = y.data();
    params.y_stride = shape.rows;
    params.num_rows = num_rows;
    const double seconds = SecondsPerCall([&] {
                             for (const auto& copy : copies) {
                               params.weight = copy.get();
                               device.Linear(params);
                             }
                           }) /
                           static_cast<double>(copies.size());
    if (num_rows == 1) {
      std::printf("  1 row %6.1f GB/s", matrix_bytes / seconds * 1e-9);
    } else {
      std::printf("  %d: %6.0f GOP/s", num_rows,
                  2.0 * num_rows * shape.rows * shape.cols / seconds * 1e-9);
    }
    std::fflush(stdout);
  }
  std::printf("\n");
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const auto device = turbomind::MakeCpuDevice(threads, argc > 2 ? argv[2] : "");
  std::printf("%s\n", device->name().c_str());
  for (const turbomind::Shape& shape : turbomind::kShapes) {
    turbomind::Bench(*device, shape);
  }
}
