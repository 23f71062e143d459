#pragma once

#include <cstdint>
#include <vector>

#include "turbomind/engine/engine_config.h"
#include "turbomind/kv/layer_group.h"
#include "turbomind/model/decoder_scratch.h"
#include "turbomind/model/model_config.h"
#include "turbomind/ops/device.h"

namespace turbomind {

// Memory of the pools, over all layer groups.
struct MemoryPlan {
  int64_t num_blocks = 0;  // quantized blocks of the full-attention group, or of the largest group
  int64_t reserved_bytes = 0;  // address space of data and scale pools
  // Bytes of all blocks that were ever used. Unused blocks are allocated last (kv/block_manager.h),
  // so this is the pools' part of the resident set, up to page rounding.
  int64_t touched_bytes = 0;
  // The decoder's activations of a full step. They are not part of the pools and are touched as
  // steps fill them.
  int64_t scratch_bytes = 0;
  double bytes_per_token = 0;               // quantized blocks, metadata and scales included
  int64_t window16_bytes_per_sequence = 0;  // 16-bit blocks of a long sequence, between steps
  double bytes_per_token_none = 0;          // the same model without quantization
  int64_t max_tokens = 0;                   // tokens of sequences of session_len that fit
  int64_t max_sequence_tokens = 0;          // longest sequence that fits, <= session_len
  // Bytes of one sequence of session_len in whole blocks, 16-bit blocks and its state included, and
  // the same without quantization.
  int64_t session_bytes = 0;
  int64_t session_bytes_none = 0;
  // The 16-bit cache of the draft model and its activations of a full step; 0 without one.
  int64_t draft_cache_bytes = 0;
  int64_t draft_scratch_bytes = 0;
  // Recurrent layers: the state of one sequence, which it has while it runs, the checkpoints that
  // the pools hold, and the blocks between those that divide a prompt. 0 without such layers.
  int64_t state_bytes_per_sequence = 0;
  int64_t num_checkpoints = 0;
  int64_t checkpoint_bytes = 0;  // of all of them
  StateFormat checkpoint_format = StateFormat::kF32;
  int64_t checkpoint_interval = 0;  // 0: none divide a prompt
};

// Returns the bytes of one sequence of `num_tokens` between steps: whole blocks of every KV pool
// and its state, without cached copies.
int64_t SequenceBytes(const ModelConfig& model, const EngineConfig& config, int64_t num_tokens);

// Plans the memory before anything is allocated. `free_bytes` is the memory that the weights leave
// free. Throws InvalidArgument if not even one sequence of one block fits.
MemoryPlan PlanMemory(const ModelConfig& model, const EngineConfig& config, int64_t free_bytes,
                      const DeviceCapability& device);

// Throws InvalidArgument if the device has no kernels for the model's cache. Engine does the same,
// but this check needs no weights.
void RequireKernels(const ModelConfig& model, const EngineConfig& config, const Device& device);

// The parts of PlanMemory that the engine also uses, so that the plan and the pools cannot differ.

// Throws InvalidArgument that names the field and its flag.
void ValidateEngineConfig(const EngineConfig& config);

// Returns the configuration of the pools. Throws InvalidArgument if the list of KV formats does not
// match the number of layers.
KvCacheConfig CacheConfig(const ModelConfig& model, const EngineConfig& config);
// Returns the decode attention of an engine's steps, for Device::Tune.
std::vector<AttentionToTune> AttentionToTuneOf(const ModelConfig& model,
                                               const EngineConfig& config);

// Returns the maximum number of new tokens of a step: max_prefill_token_num, or less if all
// sequences are shorter.
int StepTokens(const EngineConfig& config);

// Returns the sizes of a step.
StepLimits PlanStep(const EngineConfig& config, const DeviceCapability& device);

// Returns the config of the draft model's cache and steps: 16 bits, and no prefix cache.
EngineConfig DraftConfig(const EngineConfig& config);

// Returns the blocks of each pool of the draft model's cache. It gets the part of the free bytes
// that a token in it takes of the bytes of a token in both caches. REQUIRES: config.draft_model.
std::vector<int64_t> PlanDraftBlocks(const ModelConfig& model, const EngineConfig& config,
                                     int64_t free_bytes, const DeviceCapability& device);

// Returns the blocks of each pool. Unless the device reserves lazily, a step's memory is subtracted
// before the pools get their share of the free bytes, of which the draft model has its part. With
// recurrent layers, max_batch_size working states come first, and the prefix cache shares the rest
// between checkpoints and KV. Both come on top of a given number of blocks.
std::vector<int64_t> PlanBlocks(const ModelConfig& model, const EngineConfig& config,
                                int64_t free_bytes, const DeviceCapability& device);

// Returns the blocks between the checkpoints that divide a prompt; 0: none.
int64_t CheckpointInterval(const EngineConfig& config, int64_t num_checkpoints);

}  // namespace turbomind
