#pragma once

// The pairs of K and V formats that tests run through.

#include <vector>

#include "turbomind/kv/kv_cache_mode.h"

namespace turbomind {

struct FormatPair {
  KvCacheMode k;
  KvCacheMode v;
};

// Returns every format for both K and V, and the mixed pairs of IsListedPair.
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
