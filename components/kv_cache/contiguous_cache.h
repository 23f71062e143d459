#pragma once

// ⑥⑦ A KV cache for a model loop outside the engine. All sequences of a batch have one length.
//
// It adds no kernel, format or layout. A contiguous cache is a paged cache with one block per
// sequence, and the ring buffer of a sliding window is a cyclic block table.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "turbomind/kv/kv_cache.h"
#include "turbomind/ops/device.h"

namespace turbomind {

struct ContiguousCacheConfig {
  std::vector<block::Config::LayerFormats> layers;
  int q_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int max_seq_len = 0;
  int batch_size = 1;
  int window = 0;  // 0: full attention; else a query at p sees (p - window, p]
  DataType dtype = DataType::kFloat16;
  bool rotate_k = false;  // without effect on layers that store K in 16 bits
  bool search_scales = true;
  bool exact = false;  // use FP32 instead of integer arithmetic on integer codes
  // Cut full attention into blocks of 64 tokens. The constructor sets it for CUDA, which has no
  // kernels for long blocks.
  bool paged = false;
};

// An array [batch, heads, tokens, head_dim] in the device's memory that is only read.
struct HeadRows {
  const std::byte* data = nullptr;
  DataType dtype = DataType::kFloat32;
  std::array<int64_t, 4> strides = {};  // bytes, of any sign
};

// K and V of new tokens, [batch_size, kv_heads, num_tokens, head_dim] each. K is after RoPE.
struct NewRows {
  HeadRows k;
  HeadRows v;
  int num_tokens = 0;
};

// The queries of the same tokens, [batch_size, q_heads, num_tokens, head_dim].
struct Queries {
  HeadRows q;
  std::byte* out = nullptr;  // like q, contiguous, in out_dtype
  DataType out_dtype = DataType::kFloat32;
  float softmax_scale = 1.f;
  const float* sinks = nullptr;  // [q_heads] or null
  void* stream = nullptr;        // of the caller, as of Device::RunInOrderOf
};

// Receives decoded rows, [batch_size, kv_heads, num_tokens, head_dim] each. K is rotated back.
struct DenseRows {
  float* k = nullptr;
  float* v = nullptr;
};

// Owns the memory of the cache and the flat arrays of a step.
//
// Invariants:
//  1. Positions [0, seq_len()) are stored in every layer. A layer may have new tokens behind them,
//     which a later call for the layer overwrites and Advance accepts.
//  2. On a CPU, the bits of every result depend only on the rows that were stored, not on how the
//     tokens were split into calls or on the number of threads.
//  3. A function that throws InvalidArgument has changed nothing.
//  4. Memory is reserved by the constructor. Later calls allocate only what a device's attention
//     keeps for longer contexts.
// One thread at a time may use it and its device. If the host cannot access the device's memory,
// arrays are in that memory, and Append, Read and View throw InvalidArgument.
class ContiguousCache {
 public:
  // Throws InvalidArgument, and OutOfMemory or std::bad_alloc.
  ContiguousCache(std::shared_ptr<Device> device, ContiguousCacheConfig config);
  ~ContiguousCache();
  ContiguousCache(const ContiguousCache&) = delete;
  ContiguousCache& operator=(const ContiguousCache&) = delete;

  // Returns the bytes that the pools of such a cache would take. Throws InvalidArgument.
  static int64_t PoolBytes(const ContiguousCacheConfig& config);

  const ContiguousCacheConfig& config() const { return config_; }
  int seq_len() const { return seq_len_; }
  int64_t num_bytes() const { return cache_->reserved_bytes(); }
  double bytes_per_token() const;
  // Counts the NaN and infinite values of all calls.
  int64_t num_nonfinite() const;

  // Throw InvalidArgument for a layer that does not exist, and for tokens that cannot be stored.
  void RequireLayer(int layer) const;
  void RequireRoom(int layer, int num_tokens) const;

  // Returns the first position that Read and Append return. `end` is the position after the last
  // one that they return and `num_tokens` how many of them are new.
  int FirstDense(int end, int num_tokens) const;

  // Stores K and V of new tokens at positions seq_len() and up. If `dense` is set, it receives
  // positions [FirstDense(end, num_tokens), end) with end = seq_len() + num_tokens.
  void Append(int layer, const NewRows& rows, const DenseRows& dense = {});
  // Stores K and V, and computes causal attention of the queries over all stored positions.
  void Attend(int layer, const NewRows& rows, const Queries& queries);
  // Decodes positions [FirstDense(seq_len(), 0), seq_len()).
  void Read(int layer, const DenseRows& dense);

  // Accepts the first `num_tokens` new tokens of every layer and drops the others.
  void Advance(int num_tokens);
  // Drops the tokens from `seq_len` on.
  void Truncate(int seq_len);
  void Reset();

  // Returns the kernels' view of a layer. Block b is sequence b if there is no window.
  // REQUIRES: the layer exists.
  KvLayerView View(int layer) const { return cache_->LayerView(layer); }
  // Throws InvalidArgument unless the host can access the device's memory.
  void RequireHostMemory(const char* call) const;
  // Returns the attention of a decode step at seq_len(), for the count of its bytes. It is valid
  // until the next call.
  AttentionParams NextStep(int layer);

 private:
  struct Span {
    int begin = 0;
    int end = 0;
  };
  struct Piece {
    int first = 0;  // among the new tokens
    int count = 0;  // of each sequence
  };
  // Receives positions from `first` on, in arrays with room for num_tokens per head.
  struct DenseTarget {
    DenseRows rows;
    int first = 0;
    int num_tokens = 0;
  };
  void ReserveScratch();
  int PieceTokens() const;
  void RequireHeld(int layer, Span positions, const char* call) const;
  BatchView Plan(Span queries, int first_position, int first_needed);
  bool Rotates(int layer) const;
  BatchView PlanPiece(int layer, const Piece& piece);
  void Store(int layer, const BatchView& batch);
  AttentionParams ParamsOf(int layer, const BatchView& batch, const Queries& queries) const;
  void Gather(const HeadRows& rows, const Piece& piece, int first_head, int num_heads);
  void Scatter(const Queries& queries, const Piece& piece, int num_tokens);
  void Decode(int layer, Span positions, const DenseTarget& target);
  void RotateBack(float* k, int64_t num_rows);
  void CopySinks(const Queries& queries);
  void AttendInOrder(int layer, const NewRows& rows, const Queries& queries);
  void RunBatch(const BatchView& batch, FunctionRef<void()> ops);
  int64_t* Counter();

  std::shared_ptr<Device> device_;
  ContiguousCacheConfig config_;
  std::unique_ptr<KvCache> cache_;
  int ring_blocks_ = 0;  // blocks of a sequence; 0: full attention
  int seq_len_ = 0;
  std::vector<int> new_tokens_;  // by layer
  std::vector<int> ring_;        // [layers, ring_blocks_] the logical block in a slot; -1: none
  int64_t scratch_bytes_ = 0;
  float* qkv_ = nullptr;       // [tokens of a piece, q_heads + 2 * kv_heads, head_dim]
  float* attended_ = nullptr;  // [tokens of a piece, q_heads, head_dim]
  float* sinks_ = nullptr;     // [q_heads], of a device whose memory the host cannot access
  int64_t* device_nonfinite_ = nullptr;  // of such a device; else num_nonfinite_ counts
  int row_heads_ = 0;                    // heads of a token in qkv_, in the current call
  // The arrays of a BatchView.
  std::vector<int32_t> cu_seqlens_;
  std::vector<int32_t> context_lens_;
  std::vector<int32_t> positions_;
  std::vector<int32_t> tables_;
  int64_t table_stride_ = 1;
  int64_t num_nonfinite_ = 0;
};

}  // namespace turbomind
