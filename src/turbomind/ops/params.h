#pragma once

// ⑥⑦ Arguments of the cache ops and the dense ops: one struct per op, with the shape next to each
// pointer. Plain data that every backend reads. Everything is row-major; activations are FP32.

#include <cmath>
#include <cstdint>
#include <memory>

#include "turbomind/core/host_device.h"
#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"
#include "turbomind/ops/fast_bias.h"
#include "turbomind/ops/matrix_format.h"

namespace turbomind {

class RopeTable;
struct StateBatch;

// The flat arrays of one step. Sequences with one new token (decode) come first.
struct BatchView {
  int num_seqs = 0;
  int num_decode = 0;                     // the first num_decode sequences have exactly one token
  int num_tokens = 0;                     // cu_seqlens[num_seqs]
  const int32_t* cu_seqlens = nullptr;    // [num_seqs + 1] new tokens of each sequence
  const int32_t* context_lens = nullptr;  // [num_seqs] tokens in the cache after this step's write
  const int32_t* positions = nullptr;     // [num_tokens] context_len - new tokens + i
  // [num_seqs, block_table_stride] of the layer's group, indexed by position / block_seq_len. -1 if
  // a sliding-window group has freed the block, or if it is only in the 16-bit pool.
  const int32_t* block_tables = nullptr;
  int64_t block_table_stride = 0;
  // Same shape, with ids in the group's 16-bit pool. -1 if the block has no 16-bit copy. Null if
  // there is no 16-bit window.
  const int32_t* window16_tables = nullptr;
  const PendingQuantization* blocks_to_quantize =
      nullptr;  // [num_to_quantize] blocks to quantize after this step's write
  int num_to_quantize = 0;
  const int32_t* rope_sets = nullptr;  // [num_tokens] as in RopeTable; null: all 0
};

// The part of a step that the layers of a group share.
struct StepGroup {
  BatchView batch;
  int window = 0;  // as in kv/sliding_window.h
  int kv_heads = 0;
  bool has_window16 = false;
  PrecisionWindow rule = {};
};

struct StepParams {
  const int32_t* tokens = nullptr;    // [num_tokens]
  const StepGroup* groups = nullptr;  // [num_groups]
  int num_groups = 0;
  int q_heads = 0;
  const StateBatch* states = nullptr;  // null without recurrent layers
  bool op_by_op = false;  // run the ops themselves, even if the device has recorded the step
};

// The temperature of Q by position: multiplies Q at position p by 1 + beta * log(1 + n), where n is
// (p + offset) / length, rounded down.
struct QueryScaling {
  float beta = 0.f;  // 0: none
  int length = 1;
  int offset = 0;

  TM_HD float At(int position) const {
    return 1.f + beta * log1pf(static_cast<float>((position + offset) / length));
  }
};

// Applies bias, qk-norm and RoPE to Q and K in place, and the bias to V. Then it scales Q,
// subtracts K's mean and rotates Q and K, also in place. K and V are rounded to the cache dtype,
// quantized and stored. With a window they are stored in its pool, and QuantizeBlocks follows.
//
// If the pool that is written has K offsets, a block's offset comes from K's bias, because its keys
// are not known yet. It is k_base after RoPE at the middle of the block, minus K's mean and rotated
// as keys are, in int8.
// It is stored with the first slot and subtracted from every key. It depends on the position alone.
//
// With `only_queries`, the layer has no K and V of its own: rows of qkv have only query heads, and
// nothing is stored or counted.
struct WriteKvParams {
  float* qkv = nullptr;           // [num_tokens, q_heads + 2 * kv_heads, head_dim]
  const float* bias = nullptr;    // [q_heads + 2 * kv_heads, head_dim] or null
  const float* q_norm = nullptr;  // [head_dim] or null
  const float* k_norm = nullptr;  // [head_dim] or null
  const float* v_norm = nullptr;  // [head_dim] or null
  bool only_queries = false;
  float norm_eps = 1e-6f;
  const float* rope_cos = nullptr;  // [num_tokens, rope_dim / 2]; null: no RoPE
  const float* rope_sin = nullptr;  // [num_tokens, rope_dim / 2]
  int rope_dim = 0;  // the first rope_dim values rotate, paired by halves (i, i + dim/2)
  bool norm_after_rope = false;  // q_norm and k_norm follow RoPE instead of preceding it
  QueryScaling query_scaling = {};
  int q_heads = 0;
  // Apply a normalized Hadamard rotation to every Q and K head, in runs of RotationSize(head_dim).
  bool rotate = false;
  bool search_scales = false;     // FP4: use the search rule of kv/codec.h
  const float* k_mean = nullptr;  // [kv_heads, head_dim] before the rotation, or null
  // [kv_heads, head_dim] before RoPE (MakeKBase); null unless the written pool has K offsets
  const float* k_base = nullptr;
  const float* block_cos = nullptr;  // [num_tokens, rope_dim / 2] of the middle of each token's
  const float* block_sin = nullptr;  // block; null: no RoPE or no k_base
  // [num_tokens, q_heads] output: q · k_mean of the head's group, the amount missing from each
  // score. Written if both it and k_mean are set. Sinks need it.
  float* q_dot_mean = nullptr;
  KvLayerView kv;
  KvLayerView window16 = {};  // 16 bits; data is null if there is no 16-bit window
  BatchView batch;
  int64_t* num_nonfinite = nullptr;  // counter that is added to (atomically); never null
  int64_t* num_clipped = nullptr;    // the same for values that the KV format clips; may be null
};

// Encodes every slot of each 16-bit block, as stored, into its quantized block. The bytes are the
// same as if each row had been encoded when it was written.
struct QuantizeBlocksParams {
  KvLayerView kv;
  KvLayerView window16 = {};  // 16 bits
  bool search_scales = false;
  const PendingQuantization* blocks_to_quantize = nullptr;  // [num_to_quantize], both ids valid
  int num_to_quantize = 0;
  int64_t* num_clipped = nullptr;  // as in WriteKvParams
};

// Dequantizes the cache of some sequences to dense FP32, as a query at position context_len - 1
// reads it. Values are as stored (K after RoPE, mean removal and rotation, without FastBias).
struct FlattenKVParams {
  float* k = nullptr;  // [num_seqs, kv_heads, max_len, head_dim]; rotary_dim with latents
  float* v = nullptr;  // same; slots at or beyond context_len are not written
  int max_len = 0;
  KvLayerView kv;
  KvLayerView window16 = {};  // data is null if there is no 16-bit window
  PrecisionWindow rule = {};
  BatchView batch;
};

// Attention of new tokens over the cache. Their own K and V are included, read back as stored.
//
// The arithmetic is defined and is the same for prefill and decode. Logits therefore do not depend
// on chunking, batching, prefix hits or the number of threads. Positions are cut into splits of
// kSplitTokens and tiles of kTileTokens at absolute positions. Each split uses FP32 online softmax
// over its tiles; splits are merged in order of position.
//
// With a 16-bit window a tile is read up to twice, each time with the positions that the query
// reads there: first the quantized view, then the 16-bit one (kv/precision_window.h). The global
// scale of K is part of the scale of the quantized scores. The global scale of V multiplies the
// output. With a 16-bit window it instead multiplies the softmax weight of every quantized value,
// but not the sum of weights.
struct AttentionParams {
  const float* q = nullptr;  // row i at q + i * q_stride: [q_heads, head_dim]
  int64_t q_stride = 0;      // floats between tokens (q is part of qkv)
  float* out = nullptr;      // [num_tokens, q_heads, head_dim]
  int q_heads = 0;
  float softmax_scale = 1.f;
  // A score s becomes score_cap * tanh(s / score_cap); 0: no cap. A cap needs a layer without a
  // mean, because the mean shifts the scores.
  float score_cap = 0.f;
  bool exact = false;            // use FP32 instead of integer arithmetic on integer codes
  int window = 0;                // as in kv/sliding_window.h
  const float* sinks = nullptr;  // [q_heads] learned sink logits or null
  // [num_tokens, q_heads] from WriteKv if K's mean was subtracted. A sink's logit is lowered by
  // softmax_scale times this value, as all scores are. Null: no mean.
  const float* q_dot_mean = nullptr;
  FastBias fast_bias = {};
  KvLayerView kv;
  KvLayerView window16 = {};  // 16 bits; data is null if there is no 16-bit window
  PrecisionWindow rule = {};
  BatchView batch;
};

inline constexpr int kMaxLatentDim = 512;  // of the kernels of latents
inline constexpr int kTileTokens = 64;
inline constexpr int kSplitTokens = 256;

// One matrix as stored in the checkpoint: [rows, cols]; rows are outputs.
struct MatrixSource {
  MatrixFormat format = MatrixFormat::kF32;
  const void* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  const void* scales = nullptr;  // kMxfp4Split: E8M0; kFp8 and kFp8Block: FP32, of every row
  float factor = 1.f;            // kNvfp4 only: multiplies all values
  // Owns data and scales if a device may read them in place; the device then keeps a copy of this
  // pointer. Null: the memory may be freed once the matrix is packed.
  std::shared_ptr<const void> owner = {};
  // `data` comes from PackedMatrix::packed_data() of an equal matrix, and `format` is that
  // matrix's.
  bool packed = false;
};

// A matrix that a device packed for its kernels. Made by Device::PackMatrix.
class PackedMatrix {
 public:
  virtual ~PackedMatrix() = default;
  int64_t rows = 0;
  int64_t cols = 0;
  MatrixFormat format = MatrixFormat::kF32;
  virtual int64_t num_bytes() const = 0;
  // Returns [num_bytes()] that the device accepts as a packed source; null if it accepts none.
  virtual const uint8_t* packed_data() const { return nullptr; }
};

struct LinearPart {
  const PackedMatrix* weight = nullptr;  // [outputs, cols]
  const float* bias = nullptr;           // [outputs] or null
};

// Computes y = x · [w0; w1; ...]ᵀ + bias (+ y if accumulate). The parts are stacked along the
// outputs, each in its own format. Each output is summed in one fixed order over cols, whatever
// num_rows is.
struct LinearParams {
  const float* x = nullptr;  // [num_rows, cols], row stride x_stride floats
  int64_t x_stride = 0;
  const LinearPart* parts = nullptr;  // [num_parts], all with the same cols
  int num_parts = 0;
  float* y = nullptr;  // [num_rows, outputs of all parts], row stride y_stride floats
  int64_t y_stride = 0;
  int num_rows = 0;
  bool accumulate = false;
};

struct EmbedParams {
  const PackedMatrix* table = nullptr;  // [vocab, hidden]
  const int32_t* ids = nullptr;         // [num_tokens], each in [0, vocab)
  float* out = nullptr;                 // [num_tokens, hidden]
  int num_tokens = 0;
  float scale = 1.f;  // factor of every value
};

// Computes cos and sin for the tokens of a step, as RopeTable::Fill does. With `block_seq_len` the
// angles are those of position block_seq_len / 2 of each token's block.
struct FillRopeParams {
  const RopeTable* table = nullptr;    // on the host
  const float* inv_freq = nullptr;     // [num_sets, dim / 2] table->inv_freq(), on the device
  const int32_t* positions = nullptr;  // [num_tokens]
  float* cos = nullptr;                // [num_tokens, dim / 2]
  float* sin = nullptr;                // same
  int num_tokens = 0;
  int block_seq_len = 0;
  const int32_t* sets = nullptr;  // [num_tokens]; null: all 0
};

// Computes out = x / sqrt(mean(x^2) + eps) * weight + bias (RMSNorm). If `centered` is set, the
// mean of x is subtracted first (LayerNorm). `out` may be `x`.
struct NormParams {
  const float* x = nullptr;       // [num_rows, dim]
  const float* weight = nullptr;  // [dim]
  float* out = nullptr;           // [num_rows, dim]
  int num_rows = 0;
  int dim = 0;
  float eps = 1e-6f;
  int64_t stride = 0;           // floats between rows of x and of out; 0 means dim
  const float* bias = nullptr;  // [dim] or null
  bool centered = false;

  int64_t Stride() const { return stride != 0 ? stride : dim; }
};

// Computes out += scale * x.
struct AddParams {
  const float* x = nullptr;  // [count]
  float* out = nullptr;      // [count]
  int64_t count = 0;
  float scale = 1.f;
};

// Computes x = scale * x, and then x = cap * tanh(x / cap) unless cap is 0.
struct SoftCapParams {
  float* x = nullptr;  // [count]
  int64_t count = 0;
  float scale = 1.f;
  float cap = 0.f;
};

// kGelu is 0.5 x (1 + erf(x / sqrt(2))), kGeluTanh its usual approximation, and kRelu2 is
// max(x, 0)^2. kClampedSwiglu (GPT-OSS): g = min(gate, limit), u = clamp(up, -limit, limit);
// out = g * sigmoid(1.702 g) * (u + 1).
enum class Activation : uint8_t { kSilu, kGeluTanh, kClampedSwiglu, kGelu, kRelu2 };

// Computes out = act(gate) * up, or out = act(x) if the feed-forward has no gate.
struct GatedActivationParams {
  // [num_rows, 2 * dim]: gate, then up; [num_rows, dim] without a gate
  const float* gate_up = nullptr;
  float* out = nullptr;  // [num_rows, dim]
  int num_rows = 0;
  int dim = 0;
  Activation activation = Activation::kSilu;
  bool interleaved = false;  // a row of gate_up is gate0, up0, gate1, up1, ...
  float limit = 7.f;         // kClampedSwiglu
  bool gated = true;         // REQUIRES for false: not kClampedSwiglu, not interleaved
  // [num_rows] factors of gate and up, or null
  const float* row_scales = nullptr;
  // If set, row i is multiplied with other + i * other_stride [dim]. REQUIRES: not `gated`, and no
  // row_scales.
  const float* other = nullptr;
  int64_t other_stride = 0;
};

// Computes the argmax of each row; ties go to the lowest id. Writes -1 if the row contains NaN or
// +infinity, or only -infinity.
struct ArgMaxRowsParams {
  const float* logits = nullptr;  // [num_rows, vocab_size]
  int32_t* ids = nullptr;         // [num_rows]
  int num_rows = 0;
  int vocab_size = 0;
};

// How to sample the token of a row of logits: the SamplingParams, and the random number in [0, 1).
// The temperature is above that of greedy sampling. ops/sampling_math.h defines the meaning.
struct RowSampling {
  double uniform = 0;
  int32_t row = 0;    // row of the logits
  int32_t top_k = 0;  // 0: no limit
  float inverse_temperature = 1.f;
  float top_p = 1.f;
  float min_p = 0.f;
};

// Samples the token of each sample exactly as the sampler does. Writes -1 to leave a row to the
// host: if the sampler would reject it (NaN or +infinity, or only -infinity), or if too many tokens
// could be sampled.
struct SampleRowsParams {
  const float* logits = nullptr;           // rows of [vocab_size]
  const RowSampling* samplings = nullptr;  // [num_samplings] on the host
  int32_t* ids = nullptr;                  // [num_samplings]
  int num_samplings = 0;
  int vocab_size = 0;
};

// Computes y = norm(x) · wᵀ + bias, and the activation of y, as far as the parts are set.
//
// With a norm, linear.x is norm.out, and its rows are not strided. With an activation, gate.gate_up
// is linear.y, and linear.y is scratch memory, whose contents are undefined afterwards. So are
// those of norm.out unless `keeps_normed` is set.
struct ProjectParams {
  NormParams norm = {};       // `x` is null if there is none
  bool keeps_normed = false;  // other ops read norm.out
  LinearParams linear = {};
  GatedActivationParams gate = {};  // `out` is null if there is none; not interleaved
};

// Computes y = x · wᵀ + bias per expert: rows [offsets[e], offsets[e + 1]) of y use expert e's
// weight, [out, cols]. All weights have one shape and one format. A row of y has the same bits as
// Linear with its row of x and its weight, unless a device chooses kernels by their times. Weights
// of experts without rows are not read.
struct GroupedLinearParams {
  const float* x = nullptr;  // rows of [cols], x_stride floats apart
  int64_t x_stride = 0;
  const int32_t* x_rows = nullptr;  // [num_rows] the row of x for each row of y; null: the same row
  float* y = nullptr;               // [num_rows, out], rows y_stride floats apart
  int64_t y_stride = 0;
  const LinearPart* experts = nullptr;  // [num_experts]; address fixed while its weights exist
  int num_experts = 0;
  const int32_t* offsets = nullptr;  // [num_experts + 1] from GroupRows; the last one is num_rows
  int num_rows = 0;
};

// Computes out = activation(x · wᵀ + bias) per expert, where the outputs of w are gate0, up0,
// gate1, up1, …. `linear` is as in GroupedLinear; its y is scratch memory, whose contents are
// undefined afterwards. `activation` has gate_up = linear.y, its rows, and `interleaved`.
struct GroupedGateParams {
  GroupedLinearParams linear;
  GatedActivationParams activation;
};

// Computes a score for each expert: the softmax over all experts, or each logit's sigmoid. Selects
// the top_k experts with the highest score + bias. Their weights are the scores without the bias.
// With groups it selects only from the top_groups groups of adjacent experts in which the two
// highest score + bias have the largest sum. Among equals the lower id wins, and NaN comes last. A
// token's experts are in order of their ids, whatever the logits contain.
struct RouteExpertsParams {
  const float* logits = nullptr;  // [num_tokens, num_experts]
  int32_t* ids = nullptr;         // [num_tokens, top_k], ascending, each in [0, num_experts)
  float* weights = nullptr;       // [num_tokens, top_k]
  int num_tokens = 0;
  int num_experts = 0;
  int top_k = 0;           // 1 to num_experts
  bool normalize = false;  // normalize a token's weights to a sum of 1
  bool sigmoid = false;
  const float* bias = nullptr;          // [num_experts] or null
  const float* expert_scale = nullptr;  // [num_experts] factors of the weights, or null
  // num_experts is a multiple of num_groups; 1 or at most kMaxExpertGroups. The selected groups
  // have at least top_k experts, and every group has at least two unless there is one.
  int num_groups = 1;
  int top_groups = 1;
  bool best_of_group = false;  // a group counts as its highest score + bias alone
};

inline constexpr int kMaxExpertGroups = 32;

// Sorts the (token, rank) pairs by expert; pairs of one expert stay in order of tokens.
struct GroupRowsParams {
  const int32_t* ids = nullptr;  // [num_tokens, top_k] from RouteExperts
  int32_t* slots = nullptr;      // [num_tokens, top_k] index of each pair in that order
  int32_t* x_rows = nullptr;     // [num_tokens * top_k] the token of each slot
  int32_t* offsets = nullptr;    // [num_experts + 1] first slot of each expert, then the number of
                                 // slots
  int num_tokens = 0;
  int num_experts = 0;
  int top_k = 0;
  const float* weights = nullptr;  // [num_tokens, top_k] or null
  float* slot_weights = nullptr;   // [num_tokens * top_k] the weight of each slot; null: no weights
};

// RouteExperts, and GroupRows of its ids and weights.
struct AssignExpertsParams {
  RouteExpertsParams route;
  GroupRowsParams rows;
};

// Computes out[t] = out[t] + scale * sum over ascending j of w(t, j) * y[slots[t, j]], or without
// out[t] if `accumulate` is not set. w is the weight, its sigmoid, or 1 without weights.
struct CombineExpertsParams {
  const float* y = nullptr;        // rows of [dim]
  const int32_t* slots = nullptr;  // [num_tokens, top_k]; null means t * top_k + j
  const float* weights = nullptr;  // [num_tokens, top_k] or null
  bool sigmoid = false;
  float* out = nullptr;  // [num_tokens, dim]
  int num_tokens = 0;
  int top_k = 0;
  int dim = 0;
  float scale = 1.f;
  bool accumulate = true;
};

}  // namespace turbomind
