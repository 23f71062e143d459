#pragma once

// ⑥ Linear layers and embedding: host side.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "turbomind/backend/cuda/linear/cublas_lt.h"
#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Weights are CudaMatrix; x, y, biases, ids, x_rows and offsets are GPU memory; the arrays of
// LinearPart are the host's.
//
// Activations are rounded to BF16 (not beside FP32 weights), sums are FP32; linear_stream.cuh says
// what that costs. An output's sum depends on its row of x and its matrices alone, not on num_rows:
// always where ctx.deterministic asks for it or there is no library. With cuBLASLt, calls of many
// rows are its products, whose order of sums is its own; weights with scales are rounded to BF16
// for it.
class CudaLinear {
 public:
  explicit CudaLinear(std::unique_ptr<CublasLt> library = nullptr);
  ~CudaLinear();
  CudaLinear(const CudaLinear&) = delete;
  CudaLinear& operator=(const CudaLinear&) = delete;

  void Linear(const Context& ctx, const LinearParams& params);

  // Keeps a table of each array of experts on the GPU, made when the array is first seen and again
  // when it holds something else: such a call allocates, and must not be part of a graph.
  void GroupedLinear(const Context& ctx, const GroupedLinearParams& params);

  void Embed(const Context& ctx, const EmbedParams& params);

 private:
  struct ExpertTable {
    std::vector<ExpertWeight> host;
    ExpertWeight* gpu = nullptr;
  };
  const ExpertWeight* TableOf(const Context& ctx, const GroupedLinearParams& params);

  std::unique_ptr<CublasLt> library_;
  std::map<const LinearPart*, ExpertTable> tables_;
};

// Slices of the columns that are summed apart: so many that few rows of a matrix of this shape keep
// a GPU busy.
int NumSlices(MatrixFormat stored, int64_t outputs, int64_t cols);

}  // namespace turbomind::cuda
