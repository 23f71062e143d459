// Speed of linear layers on this machine: GB/s of weights for one row, GOP/s (2 per multiply-add)
// for more, beside the machine's own peaks measured in the same run.
// Then MXFP4 read in place beside Q4_0 of the same shape, an expert's of gpt-oss, in turn.
// Usage: linear_bench [threads] [isa] [all | mxfp4]

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
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
    LinearPart part;
    LinearParams params;
    params.parts = &part;
    params.num_parts = 1;
    params.x = x.data();
    params.x_stride = shape.cols;
    params.y = y.data();
    params.y_stride = shape.rows;
    params.num_rows = num_rows;
    const double seconds = SecondsPerCall([&] {
                             for (const auto& copy : copies) {
                               part.weight = copy.get();
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

// Read-only bytes of a file without a name, in small pages as a mapped checkpoint.
class MappedBytes {
 public:
  explicit MappedBytes(const std::vector<uint8_t>& bytes) : size_(bytes.size()) {
    std::FILE* file = std::tmpfile();
    if (file == nullptr || std::fwrite(bytes.data(), 1, size_, file) != size_ ||
        std::fflush(file) != 0) {
      throw std::runtime_error("cannot write a temporary file");
    }
    data_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED | MAP_POPULATE, fileno(file), 0);
    std::fclose(file);
    if (data_ == MAP_FAILED) {
      throw std::runtime_error("cannot map a temporary file");
    }
  }
  ~MappedBytes() { munmap(data_, size_); }
  MappedBytes(const MappedBytes&) = delete;
  MappedBytes& operator=(const MappedBytes&) = delete;

  const uint8_t* data() const { return static_cast<const uint8_t*>(data_); }

 private:
  size_t size_ = 0;
  void* data_ = nullptr;
};

constexpr int64_t kExpertRows = 5760;
constexpr int64_t kExpertCols = 2880;
constexpr int kExpertCopies = 12;  // 108 MB
constexpr int kRounds = 21;

// One way to hold the weights of the comparison.
struct Contender {
  const char* name;
  MatrixFormat format;
  bool mapped;
  std::vector<std::unique_ptr<PackedMatrix>> copies = {};
  std::vector<double> seconds = {};  // of one matrix, one per round
};

void PackCopies(Device& device, Contender& contender) {
  std::mt19937 random(2);
  const int64_t blocks = kExpertRows * kExpertCols / 32;
  const bool split = contender.format == MatrixFormat::kMxfp4Split;
  std::vector<uint8_t> bytes(static_cast<size_t>(
      kExpertRows * RowBytes({"", kExpertRows, kExpertCols, contender.format})));
  for (size_t i = 0; i < bytes.size(); ++i) {
    const bool is_scale = split ? i >= static_cast<size_t>(blocks) * 16
                          : contender.format == MatrixFormat::kMxfp4 ? i % 17 == 0
                                                                     : false;
    bytes[i] = static_cast<uint8_t>(is_scale ? 115 + random() % 8 : random() & 0x3f);
  }
  for (int i = 0; i < kExpertCopies; ++i) {
    MatrixSource source{contender.format, bytes.data(), kExpertRows, kExpertCols};
    if (contender.mapped) {
      const auto mapped = std::make_shared<MappedBytes>(bytes);
      source.data = mapped->data();
      source.owner = mapped;
    }
    source.scales = split ? static_cast<const uint8_t*>(source.data) + blocks * 16 : nullptr;
    contender.copies.push_back(device.PackMatrix(source, false));
  }
}

double SecondsPerMatrix(Device& device, const Contender& contender, LinearParams params) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (const auto& copy : contender.copies) {
    const LinearPart part = {copy.get()};
    params.parts = &part;
    params.num_parts = 1;
    device.Linear(params);
  }
  return std::chrono::duration<double>(Clock::now() - begin).count() / kExpertCopies;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + kRounds / 2, values.end());
  return values[kRounds / 2];
}

void CompareMxfp4(Device& device) {
  Contender contenders[] = {{"q4_0", MatrixFormat::kQ4_0, false},
                            {"mxfp4 copied", MatrixFormat::kMxfp4, false},
                            {"mxfp4 mapped", MatrixFormat::kMxfp4, true},
                            {"mxfp4_split copied", MatrixFormat::kMxfp4Split, false},
                            {"mxfp4_split mapped", MatrixFormat::kMxfp4Split, true}};
  for (Contender& contender : contenders) {
    PackCopies(device, contender);
  }
  std::vector<float> x(256 * kExpertCols, 0.5f);
  std::vector<float> y(256 * kExpertRows);
  LinearParams params;
  params.x = x.data();
  params.x_stride = kExpertCols;
  params.y = y.data();
  params.y_stride = kExpertRows;
  std::printf("%ld x %ld, medians of %d rounds in turn: ms, GB/s of weights, the same / q4_0's\n",
              kExpertRows, kExpertCols, kRounds);
  for (int num_rows : {1, 4, 32, 256}) {
    params.num_rows = num_rows;
    for (int round = 0; round < kRounds; ++round) {
      for (Contender& contender : contenders) {
        contender.seconds.resize(kRounds);
        contender.seconds[static_cast<size_t>(round)] = SecondsPerMatrix(device, contender, params);
      }
    }
    double reference = 0;
    for (const Contender& contender : contenders) {
      const double seconds = Median(contender.seconds);
      const double speed =
          static_cast<double>(contender.copies.front()->num_bytes()) / seconds * 1e-9;
      reference = reference == 0 ? speed : reference;
      std::printf("rows %3d  %-20s %8.3f ms %7.2f GB/s  %.3f\n", num_rows, contender.name,
                  seconds * 1e3, speed, speed / reference);
    }
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace turbomind

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  const auto device = turbomind::MakeCpuDevice(threads, argc > 2 ? argv[2] : "");
  std::printf("%s\n", device->name().c_str());
  if (argc <= 3 || std::strcmp(argv[3], "mxfp4") != 0) {
    for (const turbomind::Shape& shape : turbomind::kShapes) {
      turbomind::Bench(*device, shape);
    }
  }
  turbomind::CompareMxfp4(*device);
}
