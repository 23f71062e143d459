// Linear layers with a matrix for each head (CudaLinear::HeadLinear): the bits of Linear.

#include <doctest/doctest.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/linear_suite.h"
#include "cuda/linear_call.h"
#include "cuda/linear_gpu.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

struct Shape {
  MatrixFormat format = MatrixFormat::kBF16;
  int64_t outputs = 48;
  int64_t cols = 128;
  int heads = 3;
  int rows = 1;
  bool starts_full = false;  // the first call finds no memory
};

void CheckHeads(const Shape& s) {
  CAPTURE(static_cast<int>(s.format));
  CAPTURE(s.rows);
  CAPTURE(s.cols);
  Gpu gpu;
  std::vector<std::unique_ptr<PackedMatrix>> weights;
  std::vector<LinearPart> heads;
  for (int head = 0; head < s.heads; ++head) {
    const Matrix matrix =
        RandomMatrix(s.format, s.outputs, s.cols, static_cast<uint32_t>(7 + head));
    weights.push_back(CudaPackMatrix(gpu.memory, gpu.uploader, matrix.source(), false));
    heads.push_back({weights.back().get(), nullptr});
  }
  // Rows of x begin behind other values, and y has room between the heads.
  const int64_t x_head = s.cols + 16;
  const int64_t y_head = s.outputs + 4;
  const GpuArray<float> x(gpu.stream, RandomVector(s.rows * s.heads * x_head, 3));
  const std::vector<float> unwritten(static_cast<size_t>(s.rows * s.heads * y_head), kSentinel);
  const GpuArray<float> got(gpu.stream, unwritten);
  const GpuArray<float> want(gpu.stream, unwritten);
  for (int head = 0; head < s.heads; ++head) {
    gpu.linear.Linear(gpu.ctx, {.x = x.data() + head * x_head,
                                .x_stride = s.heads * x_head,
                                .parts = &heads[static_cast<size_t>(head)],
                                .num_parts = 1,
                                .y = want.data() + head * y_head,
                                .y_stride = s.heads * y_head,
                                .num_rows = s.rows});
  }
  const HeadLinearParams params = {.x = x.data(),
                                   .x_stride = s.heads * x_head,
                                   .x_head_stride = x_head,
                                   .y = got.data(),
                                   .y_stride = s.heads * y_head,
                                   .y_head_stride = y_head,
                                   .heads = heads.data(),
                                   .num_heads = s.heads,
                                   .num_rows = s.rows};
  if (s.starts_full && gpu.ctx.gpu.name == "shim") {
    setenv("CUDA_SHIM_FAULT", "memory=0", 1);
    CHECK_THROWS_AS(gpu.linear.HeadLinear(gpu.ctx, params), OutOfMemory);
    unsetenv("CUDA_SHIM_FAULT");
  }
  gpu.linear.HeadLinear(gpu.ctx, params);
  CHECK(testing::SameBits(got.Read(), want.Read()));
  // The first heads of the array alone have a table of their own.
  const GpuArray<float> first(gpu.stream, unwritten);
  HeadLinearParams some = params;
  some.y = first.data();
  some.num_heads = 1;
  gpu.linear.HeadLinear(gpu.ctx, some);
  gpu.linear.HeadLinear(gpu.ctx, params);
  CHECK(testing::SameBits(got.Read(), want.Read()));
  const std::vector<float> alone = first.Read();
  const std::vector<float> all = got.Read();
  CHECK(std::equal(alone.begin(), alone.begin() + s.outputs, all.begin()));
  CHECK(alone[static_cast<size_t>(y_head)] == kSentinel);
}

TEST_CASE("the matrices of all heads in one launch give the bits of Linear") {
  for (const MatrixFormat format :
       {MatrixFormat::kF32, MatrixFormat::kBF16, MatrixFormat::kQ8_0, MatrixFormat::kQ4_K,
        MatrixFormat::kNvfp4, MatrixFormat::kFp8Block}) {
    for (const int rows : {1, 9, 40}) {
      const int64_t cols = format == MatrixFormat::kQ4_K ? 256 : 128;
      CheckHeads({.format = format, .cols = cols, .rows = rows});
    }
  }
  CheckHeads({.cols = 48, .heads = 20, .rows = 5});  // columns are padded
  CheckHeads({.cols = 48, .heads = 2, .rows = 70, .starts_full = true});
  CheckHeads({.outputs = 16, .cols = 32, .heads = 2, .rows = 300});  // a launch for each head
}

}  // namespace
}  // namespace turbomind::cuda
