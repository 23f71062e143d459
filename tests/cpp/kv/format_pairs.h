#pragma once

// The pairs of K and V formats that tests run through.

#include <vector>

#include "turbomind/kv/kv_format.h"

namespace turbomind {

struct FormatPair {
  KvCacheMode k;
  KvCacheMode v;
};

// Returns every format for both K and V, and then the mixed pairs of IsListedPair.
inline std::vector<FormatPair> ListedPairs() {
  std::vector<FormatPair> pairs;
  for (KvCacheMode format : kAllKvCacheModes) {
    pairs.push_back({format, format});
  }
  for (KvCacheMode k : kAllKvCacheModes) {
    for (KvCacheMode v : kAllKvCacheModes) {
      if (k != v && IsListedPair(k, v)) {
        pairs.push_back({k, v});
      }
    }
  }
  return pairs;
}

}  // namespace turbomind
