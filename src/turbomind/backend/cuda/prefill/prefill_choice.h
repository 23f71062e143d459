#pragma once

// ⑦ Which kernel of prefill attention a device uses. The table's choice is always kMma: products of
// warp groups come into use only where a tuner has timed them (prefill_tuning.h).

#include <compare>
#include <map>
#include <string>

#include "turbomind/core/dtype.h"
#include "turbomind/kv/kv_format.h"

namespace turbomind::cuda {

enum class PrefillProducts {
  kMma,         // prefill_attention.cuh
  kWarpGroups,  // prefill_wide.cuh
};

inline const char* NameOf(PrefillProducts products) {
  return products == PrefillProducts::kMma ? "mma" : "wgmma";
}

// Return the type of the operands for a layer: BF16 for a BF16 cache that is not quantized, else
// FP16.
constexpr DataType PrefillType(KvCacheMode k, KvCacheMode v, DataType dtype) {
  return k == KvCacheMode::kNone && v == KvCacheMode::kNone && dtype == DataType::kBFloat16
             ? DataType::kBFloat16
             : DataType::kFloat16;
}

// Launches that share a choice.
struct PrefillQuestion {
  DataType type = DataType::kFloat16;  // of the operands: kFloat16 or kBFloat16
  int head_dim = 0;
  bool fills_gpu = false;  // there is a block of kWarpGroups for every SM

  auto operator<=>(const PrefillQuestion&) const = default;
  bool operator==(const PrefillQuestion&) const = default;

  std::string name() const {
    return "prefill attention, " + std::string(type == DataType::kBFloat16 ? "bf16" : "fp16") +
           ", head_dim " + std::to_string(head_dim) + (fills_gpu ? ", many rows" : ", few rows");
  }
};

class PrefillChoices {
 public:
  PrefillProducts Get(const PrefillQuestion& question) const {
    const auto found = chosen_.find(question);
    return found == chosen_.end() ? PrefillProducts::kMma : found->second;
  }
  void Set(const PrefillQuestion& question, PrefillProducts products) {
    chosen_[question] = products;
  }

 private:
  std::map<PrefillQuestion, PrefillProducts> chosen_;
};

}  // namespace turbomind::cuda
