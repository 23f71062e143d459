#pragma once

// ⑥ Linear layers and embedding: the host side.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "turbomind/backend/cuda/linear/cublas_lt.h"
#include "turbomind/backend/cuda/linear/linear_choice.h"
#include "turbomind/backend/cuda/linear/linear_shape.cuh"
#include "turbomind/backend/cuda/linear/linear_wide.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/latent_params.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Weights are CudaMatrix objects. x, y, biases, ids, x_rows and offsets are in GPU memory; the
// arrays of LinearPart are on the host.
//
// Activations are rounded to BF16, except with FP32 weights and as linear_fp8.h says, and sums are
// in FP32. linear_stream.cuh states the resulting error. If ctx.deterministic is set, an output's
// sum depends only on its row of x and its matrices, not on num_rows. Otherwise some numbers of
// rows may use products of cuBLASLt or of warp groups, which have their own order of sums. Weights
// with scales are rounded to BF16 for these.
class CudaLinear {
 public:
  explicit CudaLinear(std::unique_ptr<CublasLt> library = nullptr);
  ~CudaLinear();
  CudaLinear(const CudaLinear&) = delete;
  CudaLinear& operator=(const CudaLinear&) = delete;

  void Linear(const Context& ctx, const LinearParams& params);
  // The norm and the activation are part of the layer's launch if the tuner has found that faster.
  void Project(const Context& ctx, const ProjectParams& params);

  // Keeps a table of each array of experts on the GPU. The table is made when the array is first
  // seen, and again when its contents change. Such a call allocates and must not be part of a
  // graph.
  void GroupedLinear(const Context& ctx, const GroupedLinearParams& params);

  void GroupedGate(const Context& ctx, const GroupedGateParams& params);

  // Up to some number of rows, the heads are the experts of one launch. Keeps tables as
  // GroupedLinear does.
  void HeadLinear(const Context& ctx, const HeadLinearParams& params);

  void Embed(const Context& ctx, const EmbedParams& params);

  // The tuner's part. Calls with ctx.deterministic ignore the choices.
  LinearChoices& choices() { return choices_; }
  LinearMachine machine(const Context& ctx) const;
  bool multiplies_fp8(const Context& ctx) const {
    return library_ != nullptr && LibraryMultipliesFp8(machine(ctx));
  }
  size_t library_version() const;  // e.g. 130102; 0 without a library
  // Free the table of an array of experts. REQUIRES: no graph uses it.
  void ForgetExperts(const LinearPart* experts);

 private:
  struct ExpertTable {
    std::vector<ExpertWeight> host;
    ExpertWeight* gpu = nullptr;
  };
  // The x_rows and the offsets of GroupedLinearParams, for heads that are experts. They are not
  // changed once they are made, so that graphs may use them.
  struct HeadRows {
    std::vector<int32_t> host;
    int32_t* gpu = nullptr;
  };
  // Row r of head h is row r * x_step + h of x.
  const HeadRows& RowsOf(const Context& ctx, int num_heads, int num_rows, int x_step);
  const ExpertWeight* TableOf(const Context& ctx, const GroupedLinearParams& params);
  LinearKernelParams KernelParamsOf(const Context& ctx, const GroupedLinearParams& params);
  LinearKernel KernelOf(const Context& ctx, const LinearStack& stack, int64_t num_rows) const;
  void Run(const Context& ctx, const LinearStack& stack, LinearKernelParams params);
  // REQUIRES: `kernel` is not kWide or kFused.
  void RunOwn(const Context& ctx, const LinearStack& stack, LinearKernelParams params,
              LinearKernel kernel);

  std::unique_ptr<CublasLt> library_;
  LinearChoices choices_;
  // By array and number: attention over latents may use the first heads of an array alone.
  std::map<std::pair<const LinearPart*, int>, ExpertTable> tables_;
  std::map<std::array<int, 3>, HeadRows> head_rows_;  // by the arguments of RowsOf
  WideCounters wide_counters_;
};

}  // namespace turbomind::cuda
