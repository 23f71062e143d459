#pragma once

// The pairs of formats of K and V that tests go through.

#include <vector>

#include "turbomind/kv/kv_cache_mode.h"

namespace turbomind {

struct ModePair {
  KvCacheMode k;
  KvCacheMode v;
};

// Every format for both sides, and the listed mixtures (KV_FORMATS, section 2).
inline std::vector<ModePair> ListedPairs() {
  std::vector<ModePair> pairs;
  for (KvCacheMode mode : kAllKvCacheModes) {
    pairs.push_back({mode, mode});
  }
  for (KvCacheMode k : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3}) {
    for (KvCacheMode v : {KvCacheMode::kInt4, KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
      pairs.push_back({k, v});
    }
  }
  return pairs;
}

}  // namespace turbomind
