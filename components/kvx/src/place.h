#pragma once

// Where the rows of a cache lie: the only code that depends on a layout.

#include <cstddef>
#include <cstdint>

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"

namespace kvx {

// K or V of a cache. All strides are in bytes. A row of head_dim values is split into chunks of
// `pack` values; only HND_PACKED has more than one chunk.
struct CacheView {
  std::byte* base = nullptr;
  int dtype = KVX_DTYPE_INVALID;
  int64_t block = 0;
  int64_t token = 0;
  int64_t head = 0;
  int64_t chunk = 0;
  int64_t value = 0;
  int64_t pack = 0;

  bool is_dense() const { return chunk == 0 && value == ElementBytes(dtype); }
};

// REQUIRES: CheckCache accepted the tensor.
inline CacheView ViewOf(const kvx_tensor_desc_t& tensor, int64_t head_dim) {
  const int64_t bytes = ElementBytes(Raw(tensor.dtype));
  const auto stride = [&](int i) { return tensor.shape[i] > 1 ? tensor.stride[i] * bytes : 0; };
  CacheView view;
  view.base = static_cast<std::byte*>(tensor.data);
  view.dtype = Raw(tensor.dtype);
  view.block = stride(0);
  view.value = stride(3);
  view.pack = head_dim;
  switch (Raw(tensor.layout)) {
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      view.head = stride(1);
      view.chunk = stride(2);
      view.token = stride(3);
      view.value = stride(4);
      view.pack = tensor.shape[4];
      break;
    case KVX_LAYOUT_BLOCK_HND:
      view.head = stride(1);
      view.token = stride(2);
      break;
    default:
      view.token = stride(1);
      view.head = stride(2);
  }
  if (view.pack == 1) {  // one chunk of values that are `chunk` apart
    view.value = view.chunk;
    view.pack = head_dim;
  }
  if (view.pack == head_dim) {
    view.chunk = 0;
  }
  return view;
}

}  // namespace kvx
