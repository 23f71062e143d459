#pragma once

#include <cstdint>
#include <string>

namespace turbomind {

// Describes a device, so that no other code asks which device it is. Each device fills it in its
// own folder. The defaults describe the CPU.
struct DeviceCapability {
  // Only GetKvCacheMode and KvCacheConversion (kv/kv_format.h) read these two.
  bool is_cuda = false;
  int sm = 0;  // CUDA's compute capability, e.g. 90

  // The generation of the hardware, for messages: "CPU", "SM 90".
  std::string generation = "CPU";

  // The size of a step if the options give none.
  int default_batch_size = 32;
  int default_step_tokens = 256;
  // The tokens whose linear layers take as long as what every step does once: reading the weights
  // and starting the ops.
  int step_cost_tokens = 4;
  // Rows of logits and of the feed-forward network that are computed at once. More rows read the
  // weights less often. Fewer rows keep the activations near the cores.
  int max_logit_rows = 32;
  int ffn_rows = 128;

  // Reserve takes address space, and memory is taken page by page when it is first used. If false,
  // Reserve takes memory, so the plan subtracts a step's scratch before it sizes the pools.
  bool reserves_lazily = true;
  // Memory that the ops take beyond the weights, the pools and the scratch.
  int64_t workspace_bytes = 0;
  // The pools take no more than max_batch_size sequences of session_len need. If false, they take
  // their whole share of the free memory.
  bool limits_pools_to_batch = true;

  // The ops can read weights from a mapped file. If false, the device copies them.
  bool reads_mapped_files = true;
  // The device computes in FP32 if the option `exact` asks for it.
  bool has_fp32 = true;
  // The ops compute K-quants and NVFP4 as they are. If false, the loader converts them to other
  // formats, and PackMatrix refuses them.
  bool has_all_formats = false;
  // The same for FP8.
  bool has_fp8_weights = false;
  // The device has the ops of recurrent layers.
  bool has_recurrent_layers = false;
  // The host can read K and V between the ops of a step.
  bool collects_kv_statistics = true;
  // n-gram drafts are on unless the options turn them off: StepCost describes what they cost.
  bool drafts_by_default = true;
};

}  // namespace turbomind
