#include "turbomind/backend/cuda/kv/latent_rows.cuh"
#include "turbomind/backend/cuda/kv/latent_rows.h"
#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"

namespace turbomind::cuda {
namespace {

// Launch the kernel for the cache dtype with a warp for each row.
template <class Params>
void LaunchRows(const Context& context, DataType dtype, int64_t num_rows, const Params& params,
                void (*bfloat)(Params), void (*half)(Params)) {
  Check(dtype != DataType::kFloat32, "the cache dtype must have 16 bits");
  Launch(dtype == DataType::kBFloat16 ? bfloat : half,
         {.grid_x = CeilDiv(num_rows, int64_t{kLatentRows}), .threads = kWriteThreads},
         context.stream, params);
}

}  // namespace

void CudaWriteLatents(const Context& context, const WriteLatentsParams& params) {
  const int64_t rows = int64_t{params.batch.num_tokens} * (1 + params.q_heads);
  LaunchRows(context, params.kv.dtype, rows, params, &WriteLatentsKernel<DataType::kBFloat16>,
             &WriteLatentsKernel<DataType::kFloat16>);
}

void CudaQuantizeLatents(const Context& context, const QuantizeBlocksParams& params) {
  const int64_t rows = int64_t{2} * params.num_to_quantize * params.kv.block_seq_len;
  LaunchRows(context, params.kv.dtype, rows, params, &QuantizeLatentsKernel<DataType::kBFloat16>,
             &QuantizeLatentsKernel<DataType::kFloat16>);
}

void CudaFlattenLatents(const Context& context, const FlattenKVParams& params) {
  const int64_t rows = int64_t{2} * params.batch.num_seqs * params.max_len;
  LaunchRows(context, params.kv.dtype, rows, params, &FlattenLatentsKernel<DataType::kBFloat16>,
             &FlattenLatentsKernel<DataType::kFloat16>);
}

}  // namespace turbomind::cuda
