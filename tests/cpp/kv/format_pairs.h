#pragma once

// The pairs of formats of K and V that tests go through.

#include <vector>

#include "turbomind/kv/kv_cache_mode.h"

namespace turbomind {

struct FormatPair {
  KvCacheMode k;
  KvCacheMode v;
};

// Every format for both sides, and the listed mixtures (KV_FORMATS, section 2).
inline std::vector<FormatPair> ListedPairs() {
  std::vector<FormatPair> pairs;
  for (KvCacheMode format : kAllKvCacheModes) {
    pairs.push_back({format, format});
  }
  for (KvCacheMode k : {KvCacheMode::kNone, KvCacheMode::kInt8, KvCacheMode::kFp8E4m3}) {
    for (KvCacheMode v : {KvCacheMode::kInt4, KvCacheMode::kFp4Mx, KvCacheMode::kFp4Nv}) {
      pairs.push_back({k, v});
    }
  }
  return pairs;
}

}  // namespace turbomind
