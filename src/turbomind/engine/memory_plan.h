#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/engine/engine_config.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/model/decoder_scratch.h"
#include "turbomind/model/model_config.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// What the pools take. All layer groups together.
struct MemoryPlan {
  int64_t num_blocks = 0;      // quantized ones of the full-attention group, or the largest group
  int64_t reserved_bytes = 0;  // address space of data and scale pools
  // Of blocks ever used: those never used are handed out last (kv/block_manager.h), so that this
  // is what the pools add to the resident set, up to pages.
  int64_t touched_bytes = 0;
  // The decoder's activations of a full step: beside the pools, touched as far as steps fill them.
  int64_t scratch_bytes = 0;
  double bytes_per_token = 0;               // quantized blocks; metadata and scales included
  int64_t window16_bytes_per_sequence = 0;  // of a long sequence, between steps
  double bytes_per_token_none = 0;          // the same model with mode none
  int64_t max_tokens = 0;                   // tokens that fit, of sequences of session_len
  int64_t max_sequence_tokens = 0;          // the longest sequence, at most session_len, that fits
  // One sequence of session_len, whole blocks, 16-bit ones included; and with mode none.
  int64_t session_bytes = 0;
  int64_t session_bytes_none = 0;
};

// Bytes of one sequence of `num_tokens` between steps: whole blocks of every pool, without cached
// copies.
int64_t SequenceBytes(const ModelConfig& model, const EngineConfig& config, int64_t num_tokens);

// Computed before anything is allocated. `free_bytes` is the memory that weights leave.
// Throws InvalidArgument when not even one sequence of one block fits.
MemoryPlan PlanMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                      bool is_cpu);

// Throws InvalidArgument where the device has no kernels for the model's cache, as Engine does, but
// before there are weights.
void RequireKernels(const ModelConfig& model, const EngineConfig& config, const Device& device);

// The parts of PlanMemory that the engine needs too, so that the plan and the pools cannot differ.

// Throws InvalidArgument naming the field and its flag.
void ValidateEngineConfig(const EngineConfig& config);

// What the pools store. Throws InvalidArgument for a table of another length than the model has.
KvCacheConfig CacheConfig(const ModelConfig& model, const EngineConfig& config);

// New tokens of one step at most: max_prefill_token_num, or less where all sequences are shorter.
int StepTokens(const EngineConfig& config);

// The sizes of a step.
StepLimits PlanStep(const EngineConfig& config, bool is_cpu);

// Blocks of each pool. A share of a GPU's free bytes is one of what a step leaves of them.
std::vector<int64_t> PlanBlocks(const ModelConfig& model, const EngineConfig& config,
                                int64_t free_bytes, bool is_cpu);

}  // namespace turbomind
