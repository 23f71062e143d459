// Tests the formats of blocks that CUDA stores with all their bits, over every code and scale.
// Other properties of the formats are in linear_ops_test.cc.

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "cpu/linear_fixture.h"
#include "cuda/gpu_array.h"
#include "cuda/linear_gpu.h"
#include "turbomind/backend/cpu/cpu_device.h"
#include "turbomind/backend/cuda/cuda_device.h"
#include "turbomind/backend/cuda/linear/cuda_matrix.h"

namespace turbomind::cuda {
namespace {

using testing::Matrix;
using testing::RandomMatrix;

// Return the rows of the definition, and those of the first rows of the identity times the matrix:
// its columns.
struct Values {
  std::vector<float> want;  // [rows, cols]
  std::vector<float> got;   // [num_rows, rows]
};
Values ValuesOf(Device& device, const Matrix& m, int num_rows) {
  Values values;
  values.want.resize(static_cast<size_t>(m.rows * m.cols));
  for (int64_t row = 0; row < m.rows; ++row) {
    DequantizeMatrixRow(m.source(), row, values.want.data() + row * m.cols);
  }
  std::vector<float> x(static_cast<size_t>(num_rows * m.cols));
  for (int64_t i = 0; i < num_rows; ++i) {
    x[static_cast<size_t>(i * m.cols + i)] = 1.f;
  }
  const auto weight = device.PackMatrix(m.source(), false);
  values.got = testing::RunLinear(device, *weight, x, {}, {num_rows});
  return values;
}

// Check that embeddings have the bits of the definition.
void CheckEmbedding(Gpu& gpu, const Matrix& m) {
  const auto table = CudaPackMatrix(gpu.memory, gpu.uploader, m.source(), false);
  std::vector<int32_t> ids;
  std::vector<float> want(static_cast<size_t>(m.rows * m.cols));
  for (int32_t row = 0; row < m.rows; ++row) {
    ids.push_back(row);
    DequantizeMatrixRow(m.source(), row, want.data() + row * m.cols);
  }
  const GpuArray<int32_t> from(gpu.stream, ids);
  const GpuArray<float> out(gpu.stream, std::vector<float>(want.size(), testing::kSentinel));
  gpu.linear.Embed(gpu.ctx, {table.get(), from.data(), out.data(), static_cast<int>(ids.size())});
  REQUIRE(testing::SameBits(out.Read(), want));
}

// With the last two, scales times the factor are rounded to subnormals, or are the largest.
constexpr float kFactors[] = {1.f, 0x1.23p-12f, 0x1.fedcbap3f, 0x1.9p-140f, 0x1p116f};

// Return an NVFP4 matrix with every code at every column of a lane, and every scale, with both
// signs, in every group.
Matrix EveryNvfp4(float factor) {
  constexpr int kRows = 256;
  Matrix m{MatrixFormat::kNvfp4, kRows, 2 * kNvBlock, {}, {}, {}, factor};
  for (int row = 0; row < kRows; ++row) {
    for (int block = 0; block < 2; ++block) {
      for (int group = 0; group < 4; ++group) {
        const int scale = (row + 64 * group) % 256;
        m.bytes.push_back(static_cast<uint8_t>(scale % 128 == 127 ? 1 : scale));
      }
      for (int j = 0; j < 32; ++j) {
        m.bytes.push_back(static_cast<uint8_t>((j + row / 3 + 7 * block) * 17 + row));
      }
    }
  }
  return m;
}

TEST_CASE("products of every code and scale of NVFP4 are exact") {
  const std::unique_ptr<Device> device = MakeDevice(0, {});
  for (float factor : kFactors) {
    const Matrix m = EveryNvfp4(factor);
    for (int num_rows : {7, 12, 128}) {  // few rows have other kernels
      const Values values = ValuesOf(*device, m, num_rows);
      for (int i = 0; i < num_rows; ++i) {
        for (int64_t o = 0; o < m.rows; ++o) {
          // The definition rounds the product of a scale and the factor first.
          const float want = values.want[static_cast<size_t>(o * m.cols + i)];
          const float got = values.got[static_cast<size_t>(i * m.rows + o)];
          REQUIRE(std::abs(got - want) <= std::abs(want) * 0x1p-23f + 6 * 0x1p-149f);
          REQUIRE((factor != 1.f || got == want));
        }
      }
    }
  }
}

TEST_CASE("embeddings in NVFP4 have the bits of the definition for every factor") {
  Gpu gpu;
  for (float factor : kFactors) {
    CheckEmbedding(gpu, EveryNvfp4(factor));
  }
}

TEST_CASE("values of K-quants have the bits of the definition") {
  Gpu gpu;
  const std::unique_ptr<Device> device = MakeDevice(0, {});
  for (MatrixFormat format : {MatrixFormat::kQ4_K, MatrixFormat::kQ5_K, MatrixFormat::kQ6_K}) {
    CAPTURE(InfoOf(format).name);
    const Matrix m = testing::RandomBf16Weights(format, 50, 512, 7);
    for (int num_rows : {7, 12, 512}) {  // few rows have other kernels
      const Values values = ValuesOf(*device, m, num_rows);
      for (int i = 0; i < num_rows; ++i) {
        for (int64_t o = 0; o < m.rows; ++o) {
          REQUIRE(values.got[static_cast<size_t>(i * m.rows + o)] ==
                  values.want[static_cast<size_t>(o * m.cols + i)]);
        }
      }
    }
    CheckEmbedding(gpu, m);
  }
}

TEST_CASE("no format of blocks is converted") {
  const std::unique_ptr<Device> devices[] = {MakeDevice(0, {}), MakeCpuDevice(1)};
  for (MatrixFormat format :
       {MatrixFormat::kQ4_K, MatrixFormat::kQ5_K, MatrixFormat::kQ6_K, MatrixFormat::kNvfp4}) {
    const Matrix m = RandomMatrix(format, 4, 256, 1);
    for (const auto& device : devices) {
      CHECK(device->capability().has_all_formats);
      CHECK(device->PackMatrix(m.source(), false)->format == format);
      CHECK(device->PackMatrix(m.source(), true)->format == MatrixFormat::kF32);
    }
  }
}

TEST_CASE("K-quants take the bytes of their layout") {
  Gpu gpu;
  const auto bits = [&](MatrixFormat format) {
    const Matrix m = RandomMatrix(format, 32, 512, 1);
    const auto packed = CudaPackMatrix(gpu.memory, gpu.uploader, m.source(), false);
    return static_cast<double>(packed->num_bytes()) * 8 / (32 * 512);
  };
  CHECK(bits(MatrixFormat::kQ4_K) == 4.625);
  CHECK(bits(MatrixFormat::kQ5_K) == 5.625);
  CHECK(bits(MatrixFormat::kQ6_K) == 6.5625);
  CHECK(bits(MatrixFormat::kNvfp4) == 4.5);
}

}  // namespace
}  // namespace turbomind::cuda
